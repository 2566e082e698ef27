"""What the slots of a block's specs hold."""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tempo_megatron.operations import OPERATIONS
from tempo_megatron.slots import transformer_engine as te
from tempo_megatron.slots.attention import TempoDotProductAttention
from tempo_megatron.slots.bias_dropout_add import tempo_bias_dropout_add
from tempo_megatron.slots.mlp import TempoMLP
from tempo_megatron.slots.norm import TempoLayerNorm, TempoRMSNorm

_TEMPO_CLASSES: dict[str, tuple[type, ...]] = {
    "activation": (TempoMLP,),
    "norm": (TempoLayerNorm, TempoRMSNorm),
    "attention": (TempoDotProductAttention,),
}


def count_slots(spec: TransformerBlockSubmodules) -> dict[str, tuple[int, int]]:
    """Per operation, how many slots of a block hold Tempo's module and how many there are, for a run's banner.

    A slot that a layer leaves empty (no cross attention, an attention or MLP that is left out) is not counted.
    """
    counts = {}
    for operation in OPERATIONS.values():
        slots = [getattr(spec, name) for name in operation.block_slots]
        slots += [_find_slot(layer, path) for layer in spec.layer_specs or [] for path in operation.slots]
        if operation.name == "norm":
            slots += [slot for layer in spec.layer_specs or [] for slot in te.find_fused_norms(layer)]
        filled = [slot for slot in slots if is_there(slot)]
        if operation.slots:
            counts[operation.name] = (sum(_is_tempo(operation.name, slot) for slot in filled), len(filled))
    return counts


def hides_the_future(spec: TransformerBlockSubmodules) -> bool:
    """Whether every attention of a block is Tempo's and causal by its type, so that it needs no mask for that."""
    attentions: list[Any] = [
        attention
        for layer in spec.layer_specs or []
        for name in ("self_attention", "cross_attention")
        if is_there(attention := getattr(layer.submodules, name, None))
    ]
    return all(
        _is_tempo("attention", getattr(attention.submodules, "core_attention", None))
        and getattr(attention, "params", {}).get("attn_mask_type") is AttnMaskType.causal
        for attention in attentions
    )


def _find_slot(layer: Any, path: str) -> Any:
    """What stands at a dotted path of a layer spec; None where a spec on the way has no submodules."""
    slot = layer
    for name in path.split("."):
        slot = getattr(getattr(slot, "submodules", None), name, None)
    return slot


def _is_tempo(operation: str, slot: Any) -> bool:
    if operation == "dropout":  # a function in the spec, as Megatron has it
        return getattr(slot, "__module__", "") == tempo_bias_dropout_add.__module__
    if operation == "norm" and te.is_split(slot):
        return True
    module = slot.module if isinstance(slot, ModuleSpec) else slot
    if operation == "activation":
        module = find_mlp_class(slot)
    return isinstance(module, type) and issubclass(module, _TEMPO_CLASSES[operation])


def is_there(slot: Any) -> bool:
    """Whether a slot holds a module that does something."""
    module = slot.module if isinstance(slot, ModuleSpec) else slot
    return module is not None and module not in (IdentityOp, IdentityFuncOp)


def find_mlp_class(slot: Any) -> Any:
    """The MLP class in a slot: a ModuleSpec's, or the class that `partial(MLP.as_mlp_submodule, ...)` is bound to."""
    return (
        getattr(slot.func, "__self__", None) if isinstance(slot, functools.partial) else getattr(slot, "module", None)
    )

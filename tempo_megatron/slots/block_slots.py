"""The slots of a block, built or as a spec: what each value of a switch puts into them, and what they hold.

One dictionary leads from an operation and a value of its switch to the classes that a layer then has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.slots import transformer_engine as te
from tempo_megatron.slots.attention import (
    TempoDotProductAttention,
    TempoRecomputeDotProductAttention,
    TempoSelfAttention,
    TempoSoftmaxDotProductAttention,
)
from tempo_megatron.slots.choose import Choices
from tempo_megatron.slots.dropout import tempo_bias_dropout_add
from tempo_megatron.slots.dropout_rng import Stack
from tempo_megatron.slots.experts import KeepsActivationInput, TempoMoELayer, TempoRepeatMoELayer, is_mixture
from tempo_megatron.slots.loss import tempoize_loss
from tempo_megatron.slots.mlp import (
    LinearRecomputeMLP,
    TempoLinearRecomputeMLP,
    TempoMLP,
    TempoRecomputeMLP,
    TempoTiledMLP,
    TiledMLP,
)
from tempo_megatron.slots.norm import TempoNorm, TempoRecomputeNorm
from tempo_megatron.slots.slot_content import find_class, find_submodules, is_there, list_fields

ATTENTIONS = ("self_attention", "cross_attention")
# A block's norm, by its slot in the spec, and as the built block calls it.
BUILT_NAMES = {"layer_norm": "final_layernorm"}
# As a built HybridStack calls it.
_HYBRID_NORM = "final_norm"
# Norms inside of an attention: of queries and keys, and of what latent attention compresses.
INNER_NORMS = ("q_layernorm", "k_layernorm", "kv_layernorm")
# Those of a layer of multi-token prediction, around the layer inside.
_PREDICTION_NORMS = ("enorm", "hnorm", "layer_norm", "final_layernorm")

CLASSES: dict[tuple[str, str], tuple[Any, ...]] = {
    ("activation", "inplace"): (TempoMLP,),
    ("activation", "recompute"): (TempoRecomputeMLP, KeepsActivationInput),
    ("norm", "inplace"): (TempoNorm,),
    ("norm", "recompute"): (TempoRecomputeNorm,),
    ("dropout", "recompute"): (tempo_bias_dropout_add,),
    # In the place of Megatron's attention, and of Transformer Engine's.
    ("attention", "flash"): (TempoDotProductAttention, te.TempoTEDotProductAttention),
    ("attention", "softmax"): (TempoSoftmaxDotProductAttention, te.TempoTESoftmaxDotProductAttention),
    ("attention", "recompute"): (TempoRecomputeDotProductAttention, te.TempoTERecomputeDotProductAttention),
    # With Tempo's activation, and with Megatron's own.
    ("linear_fc1", "recompute"): (TempoLinearRecomputeMLP, LinearRecomputeMLP),
    ("linear_fc1", "tile"): (TempoTiledMLP, TiledMLP),
    ("linear_qkv", "recompute"): (TempoSelfAttention,),
    ("moe_permute", "recompute"): (TempoMoELayer,),
    ("moe_permute", "repeat"): (TempoRepeatMoELayer,),
    ("loss", "fused"): (tempoize_loss,),
}
"""(operation, value) -> classes of a slot, or the function that fills it."""

_VALUES = {(operation, module): value for (operation, value), modules in CLASSES.items() for module in modules}
_VALUES |= {("activation", module): "off" for module in (LinearRecomputeMLP, TiledMLP)}


def get_value(operation: str, module: Any) -> str:
    """The value of the operation's switch that puts `module`, a class or a function, into its slot; "off" for a module
    that is not Tempo's."""
    if operation == "dropout":  # a function in the spec, as Megatron has it
        return "recompute" if getattr(module, "__module__", "") == tempo_bias_dropout_add.__module__ else "off"
    if not isinstance(module, type):
        return "off"
    if operation == "norm" and issubclass(module, te.SplitNorm):
        return module.keep
    return next((_VALUES[operation, base] for base in module.__mro__ if (operation, base) in _VALUES), "off")


@dataclasses.dataclass
class TempoBlockSubmodules(TransformerBlockSubmodules):
    """The spec that `tempoize` returns: a block's submodules, as every model takes them, and what `report_on` reads."""

    submodules: Any = None
    """The given layer's: BertModel reads `attn_mask_type` from them (models/bert/bert_model.py:201 of 0.16.1)."""

    choices: Choices | None = None
    """What was asked for and what was chosen; None in a block that `tempoize` has not made."""

    stack: Stack = Stack.DECODER
    first_layer: int = 0
    """Number of the first layer in the whole model, from 0."""

    stock_layers: list[Any] | None = None
    """The specs that `layer_specs` were made from, with which layers are compared."""


@dataclasses.dataclass
class TempoPredictionSubmodules(MultiTokenPredictionBlockSubmodules):
    """The spec that `tempoize` returns for multi-token prediction."""

    choices: Choices | None = None


def find_inner_name(prediction_layer: Any) -> str:
    """The attribute of a layer of multi-token prediction, or of its submodules, that holds the layer inside."""
    return "mtp_model_layer" if hasattr(prediction_layer, "mtp_model_layer") else "transformer_layer"  # since 0.17


def find_inner_layer(prediction_layer: Any) -> Any:
    """The layer inside a layer of multi-token prediction, or its spec."""
    return getattr(prediction_layer, find_inner_name(prediction_layer), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """A place of a block that holds an operation and is not empty."""

    operation: str
    name: str
    """In the layer: `mlp`, `self_attention.q_layernorm`."""

    content: Any
    holder: Any = None
    """The attention or MLP that contains the slot."""

    layer: int | None = None
    """The layer's number in the whole model, from 0; None for a block's own norm, and in multi-token prediction."""

    where: str = ""
    """As in checkpoint keys: `decoder.layers.3`; `decoder` for what the block has once."""

    @property
    def is_tempo(self) -> bool:
        """Whether it holds Tempo's module."""
        return self.value != "off"

    @property
    def value(self) -> str:
        """The value of the operation's switch that puts such a module here; "off" for a module that is not Tempo's."""
        return get_value(self.operation, find_class(self.content))

    def get_values(self, tempo_config: TempoConfig) -> TempoConfig:
        """What `tempo_config` says for its layer."""
        return tempo_config if self.layer is None else tempo_config.for_layer(self.layer, self.where.split(".")[0])


def list_slots(block: Any, spec: Any = None) -> Iterator[Slot]:
    """Each slot of a block, built or as a spec, whose operation Tempo knows, in the order of the layers.

    A slot that a layer leaves empty (no cross attention, an attention or MLP that is left out) is not there.

    spec: the spec that says which layers these are; by default the block itself.
    """
    spec, is_built = spec or block, isinstance(block, torch.nn.Module)
    predicts = isinstance(spec, MultiTokenPredictionBlockSubmodules)
    stack = "mtp" if predicts else getattr(spec, "stack", Stack.DECODER).name.lower()
    layers: Any = getattr(block, "layers" if is_built else "layer_specs")
    for number, layer in enumerate(layers or [], getattr(spec, "first_layer", 0)):
        for slot in list_layer_slots(layer):
            where = f"{stack}.layers.{number}"
            yield dataclasses.replace(slot, layer=None if predicts else number, where=where)
    for name in () if predicts else OPERATIONS["norm"].block_slots:
        places = {name: BUILT_NAMES[name], _HYBRID_NORM: _HYBRID_NORM} if is_built else {name: name}
        for known_as, attribute in places.items():
            if is_there(norm := getattr(block, attribute, None)):
                yield Slot(operation="norm", name=known_as, content=norm, where=stack)


def list_layer_slots(layer: Any) -> Iterator[Slot]:
    """Each slot of one layer, or of its spec; see `list_slots`."""
    submodules = find_submodules(layer)
    if inner := find_inner_layer(submodules):
        yield from list_layer_slots(inner)
    for operation in OPERATIONS.values():
        for path in operation.slots:
            holder_name, _, name = path.rpartition(".")
            holder = getattr(submodules, holder_name, None) if holder_name else None
            content = getattr(find_submodules(holder) if holder_name else submodules, name, None)
            if operation.name == "activation" and is_mixture(content):
                for name in ("experts", "shared_experts"):
                    if is_there(inner := getattr(find_submodules(content), name, None)):
                        yield Slot(operation="activation", name=f"{path}.{name}", content=inner, holder=content)
            elif is_there(content) and (operation.name != "moe_permute" or is_mixture(content)):
                yield Slot(operation=operation.name, name=path, content=content, holder=holder)
    for holder_name in (*ATTENTIONS, "mlp", "mixer"):
        holder = getattr(submodules, holder_name, None)
        for name, content in list_fields(find_submodules(holder)).items():
            if is_there(content) and (name in INNER_NORMS or te.is_norm_and_linear(content)):
                yield Slot(operation="norm", name=f"{holder_name}.{name}", content=content, holder=holder)
    for name in _PREDICTION_NORMS:
        if is_there(norm := getattr(submodules, name, None)):
            yield Slot(operation="norm", name=name, content=norm)


def hides_the_future(spec: TransformerBlockSubmodules) -> bool:
    """Whether every attention of a block is Tempo's and causal by its type, so that it needs no mask for that."""
    layers: Any = spec.layer_specs or []
    attentions: list[Any] = [getattr(layer.submodules, name, None) for layer in layers for name in ATTENTIONS]
    return all(
        get_value("attention", find_class(getattr(attention.submodules, "core_attention", None))) != "off"
        and getattr(attention, "params", {}).get("attn_mask_type") is AttnMaskType.causal
        for attention in filter(is_there, attentions)
    )

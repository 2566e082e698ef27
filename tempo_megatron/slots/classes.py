"""One dictionary from an operation and a value of its switch to the classes that a layer then has.

`transformer_engine.CLASSES` has those that replace modules of Transformer Engine.
"""

from __future__ import annotations

from typing import Any

from tempo_megatron.slots import transformer_engine as te
from tempo_megatron.slots.attention import (
    TempoDotProductAttention,
    TempoRecomputeDotProductAttention,
    TempoSelfAttention,
    TempoSoftmaxDotProductAttention,
)
from tempo_megatron.slots.dropout import tempo_bias_dropout_add
from tempo_megatron.slots.experts import KeepsActivationInput, TempoMoELayer, TempoRepeatMoELayer
from tempo_megatron.slots.loss import tempoize_loss
from tempo_megatron.slots.mlp import (
    LinearRecomputeMLP,
    TempoLinearRecomputeMLP,
    TempoMLP,
    TempoRecomputeMLP,
    TempoTiledMLP,
    TiledMLP,
)
from tempo_megatron.slots.norm import TempoLayerNorm, TempoRecomputeLayerNorm, TempoRecomputeRMSNorm, TempoRMSNorm

CLASSES: dict[tuple[str, str], tuple[Any, ...]] = {
    ("activation", "inplace"): (TempoMLP,),
    ("activation", "recompute"): (TempoRecomputeMLP, KeepsActivationInput),
    ("norm", "inplace"): (TempoLayerNorm, TempoRMSNorm),
    ("norm", "recompute"): (TempoRecomputeLayerNorm, TempoRecomputeRMSNorm),
    ("dropout", "recompute"): (tempo_bias_dropout_add,),
    ("attention", "flash"): (TempoDotProductAttention,),
    ("attention", "softmax"): (TempoSoftmaxDotProductAttention,),
    ("attention", "recompute"): (TempoRecomputeDotProductAttention,),
    # With Tempo's activation, and with Megatron's own.
    ("linear_fc1", "recompute"): (TempoLinearRecomputeMLP, LinearRecomputeMLP),
    ("linear_fc1", "tile"): (TempoTiledMLP, TiledMLP),
    ("linear_qkv", "recompute"): (TempoSelfAttention,),
    ("moe_permute", "recompute"): (TempoMoELayer,),
    ("moe_permute", "repeat"): (TempoRepeatMoELayer,),
    ("loss", "fused"): (tempoize_loss,),
}
"""(operation, value) -> classes of a slot, or the function that fills it."""

_VALUES = {
    (operation, module): value
    for (operation, value), modules in (*CLASSES.items(), *te.CLASSES.items())
    for module in modules
}
_VALUES |= {("activation", module): "off" for module in (LinearRecomputeMLP, TiledMLP)}


def get_norm(normalization: str, value: str) -> Any:
    """The norm for a value of `norm`; None for "off" and for a normalization that Tempo does not have."""
    found = CLASSES.get(("norm", value), ())
    return next((norm for norm in found if norm.normalization == normalization), None)


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

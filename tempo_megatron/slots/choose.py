"""Resolves "auto" to a value for each operation, and says before anything is built what cannot be had, and why.

A refusal says why one operation cannot have one value. If the user wrote that value, the refusal becomes an error with
a remedy. "auto" goes on to the next value of its preference and gives the refusal as its reason.

The refusals of this file follow from the TransformerConfig. Other reasons against an operation, such as the modules of
a spec's layers or a script without Megatron's arguments, are obstacles, which callers pass to `choose`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.slots.attention import recomputes_latent_projections
from tempo_megatron.slots.dropout_rng import list_dropouts
from tempo_megatron.slots.experts import find_permute_refusal
from tempo_megatron.slots.linear import HOLD_INPUTS, find_reason, is_quantised
from tempo_megatron.slots.megatron_versions import is_since
from tempo_megatron.slots.mlp import find_activation_refusal

# Recipes of fp8 whose linears can quantise an input that they keep as it is once more in backward.
_QUANTISED_AGAIN = ("tensorwise", "blockwise", "mxfp8")
_UNSUPPORTED = "which Tempo's attention does not support"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why an operation cannot have a value."""

    reason: str
    """A clause without a full stop: what the configuration says, and why that is in the way."""

    remedy: str = ""
    """What the user may change instead of the operation's value."""

    is_for_auto: bool = False
    """Whether it only keeps "auto" away: the operation would work, but save nothing."""


Obstacles = Mapping[str, Refusal]
"""Operation -> why it can have no value but "off", whatever the TransformerConfig allows."""

_NO_OBSTACLES: Obstacles = {}


def find_refusal(operation: str, value: str, transformer_config: TransformerConfig) -> Refusal | None:
    """Why tempo.`operation` cannot be `value` in a model of `transformer_config`; None where it can."""
    if value == "off":
        return None
    refusals = _list_refusals(operation, value, transformer_config)
    found = next((refusal for refusal in refusals if refusal is not None), None)
    return Refusal(found) if isinstance(found, str) else found


def refuse_written(
    transformer_config: TransformerConfig, tempo_config: TempoConfig, obstacles: Obstacles = _NO_OBSTACLES
) -> None:
    """Raise ValueError, one sentence, where a value that is not "auto" cannot be had.

    The sentence gives the first refusal, names every operation that it concerns and where it was written, such as
    `tempo.norm` or `tempo.layers["0-11"].norm`, and says what to write.
    """

    def find(name: str, value: str) -> Refusal | None:
        both = find_refusal(name, value, transformer_config), None if value == "off" else obstacles.get(name)
        return next((refusal for refusal in both if refusal is not None and not refusal.is_for_auto), None)

    refused = [
        (name, where, refusal)
        for name in OPERATIONS
        for where, value in tempo_config.list_values(name)
        if value != "auto" and (refusal := find(name, value)) is not None
    ]
    if not refused:
        return
    first = refused[0][2]
    names, places = zip(*((name, where) for name, where, refusal in refused if refusal == first), strict=True)
    # "off" is always possible and reads best at the end.
    values = [value for value in (*OPERATIONS[names[0]].keeps, "off") if not any(find(name, value) for name in names)]
    remedy = f"{first.remedy}, or " if first.remedy else ""
    where = " and ".join(filter(None, (", ".join(places[:-1]), places[-1])))
    raise ValueError(f"{first.reason}; {remedy}set {where} to " + " or ".join(f'"{value}"' for value in values))


def _refuse_recomputation(transformer_config: TransformerConfig) -> None:
    """Raise ValueError where Megatron's own recomputation of norms would end in a NameError."""
    modules = transformer_config.recompute_modules or ()
    if transformer_config.recompute_granularity != "selective" or "layernorm" not in modules:
        return
    # What Megatron asks about fp8 comes from Transformer Engine, and it asks whether or not fp8 is on.
    has_fp8_state = hasattr(megatron_random, "FP8GlobalStateManager")
    if megatron_random.CheckpointWithoutOutput().fp8 and not has_fp8_state:
        raise ValueError(
            "recompute_modules holds layernorm, in which this megatron-core ends in a NameError without Transformer "
            'Engine; take it out, and set tempo.norm to "recompute" for the same saving'
        )


def _list_refusals(operation: str, value: str, config: TransformerConfig) -> Iterator[Refusal | str | None]:
    """Yields why an operation cannot have a value, the most general reason first; None for a reason that is none."""
    if getattr(config, "enable_autocast", False):
        yield Refusal(
            "autocast is on, under which linears keep cast copies, so that keeping outputs saves nothing",
            remedy="use bf16 or fp16 parameters",
        )
    if is_quantised(config):
        yield _find_quantised_refusal(operation, value, config)
    if operation in list_dropouts(config):
        if getattr(config, "hybrid_context_parallel", False):
            yield (
                "hybrid_context_parallel is on, whose ranks do different numbers of forwards, and Tempo's dropout does "
                "not know which samples each of them sees, so two samples would draw the same masks"
            )
        if config.mtp_num_layers and getattr(config, "overlap_moe_expert_parallel_comm", False):
            yield (
                "overlap_moe_expert_parallel_comm is on, which runs parts of the layers of multi-token prediction, so "
                "that their depths are not told apart and would draw the same dropout masks"
            )
    match operation:
        case "activation":
            yield find_activation_refusal(config, value)
        case "norm":
            if config.normalization not in ("LayerNorm", "RMSNorm"):
                yield f"normalization is {config.normalization}, and Tempo has LayerNorm and RMSNorm only"
            if value == "recompute" and config.apply_residual_connection_post_layernorm:
                yield (
                    "apply_residual_connection_post_layernorm is on, which reads a norm's output once more after the "
                    "linear that follows it"
                )
        case "attention":
            if config.context_parallel_size > 1 and value == "softmax":
                size = config.context_parallel_size
                yield f"context_parallel_size is {size} and the form is softmax, {_UNSUPPORTED}"
            if getattr(config, "hybrid_context_parallel", False):
                yield f"hybrid_context_parallel is on, {_UNSUPPORTED}"
            if config.window_size is not None and not is_since("0.15"):
                yield f"window_size is {config.window_size}, {_UNSUPPORTED} before megatron-core 0.15"
            if value == "recompute" and recomputes_latent_projections(config):
                yield (
                    "recompute_modules holds mla_up_proj, after which queries, keys and values are there too late to "
                    f"make the output again, {_UNSUPPORTED}"
                )
        case "linear_fc1" | "linear_qkv":
            if operation == "linear_qkv" and getattr(config, "multi_latent_attention", False):
                yield "multi_latent_attention is on, and Tempo cannot recompute its projections"
            if reason := find_reason(config, HOLD_INPUTS):
                yield f"{reason}, and Tempo does not run a linear again beside it"
        case "moe_permute":
            yield find_permute_refusal(config, value)
        case "loss":
            if config.defer_embedding_wgrad_compute:
                yield "defer_embedding_wgrad_compute is on, which keeps the logits' gradient"


def _find_quantised_refusal(operation: str, value: str, config: TransformerConfig) -> Refusal | str | None:
    """Why fp8 or fp4 stands against an operation that depends on what a layer's linears keep, or runs a linear again.

    A linear keeps a quantised copy of its input, one byte per element in fp8, whatever the module before it keeps. So
    "recompute" keeps what stock keeps. "inplace" keeps 2 bytes where stock keeps 3, if the linear keeps the output
    itself and quantises it once more in backward, which delayed scaling cannot do.

    The other operations work: between linears tensors have 16 bits (bias-dropout-add, and core attention unless it is
    quantised too), and the output layer is in no layer.
    """
    if operation in ("activation", "norm") and config.fp8 and config.fp8_recipe in _QUANTISED_AGAIN:
        return Refusal(
            'fp8 is on, whose linears keep quantised copies, so that "recompute" saves nothing, and for "inplace" they '
            "quantise once more in backward",
            is_for_auto=value == "inplace",
        )
    if operation in ("activation", "norm", "moe_permute") or (operation, value) == ("attention", "recompute"):
        return "fp8 or fp4 is on, whose linears keep quantised copies, so that keeping outputs saves nothing"
    if operation in ("linear_fc1", "linear_qkv"):
        return "fp8 or fp4 is on, in which Tempo does not run a linear again"
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if operation == "attention" and getattr(config, name, False):
            return f"{name} is on, and Tempo's attention computes in 16 bits"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """A TempoConfig in which every operation has its value, in every layer."""

    config: TempoConfig
    """Without "auto"."""

    written: TempoConfig
    """What the user asked for."""

    reasons: Mapping[str, str]
    """Operation -> why "auto" could not take its first choice, a clause without a full stop. Operations that have their
    first choice, or a written value, are not in it."""

    def describe(self) -> str:
        """One line: `activation=recompute (auto: activation is swiglu, and ...) norm=inplace ...`.

        A reason that neighbours share is given once, after the last of them. All stock without a reason is `off`.
        """
        if self.config.is_off and not self.reasons:
            return "off (stock)"
        groups = []
        # Where only single layers have "auto", the reason comes after their values.
        of_all = {name: reason for name, reason in self.reasons.items() if getattr(self.written, name) == "auto"}
        for reason, names in itertools.groupby(self.config.list_mentioned(), key=of_all.get):
            values = " ".join(f"{name}={getattr(self.config, name)}" for name in names)
            groups.append(f"{values} (auto: {reason})" if reason else values)
        of_layers = [f"{name}: {reason}" for name, reason in self.reasons.items() if name not in of_all]
        groups.append(self.config.describe_layers())
        groups.append(f"(auto of {', '.join(of_layers)})" if of_layers else "")
        return " ".join(filter(None, groups))


def choose(
    transformer_config: TransformerConfig, tempo_config: TempoConfig | Choices, obstacles: Obstacles = _NO_OBSTACLES
) -> Choices:
    """`tempo_config` with a value in place of each "auto": the first of its preference that nothing refuses. Choices
    that were made already stay.

    Call it once for each block of layers. The loss is what the configuration allows; whether a built model can have it
    is decided by `tempo_megatron.slots.loss.choose_loss`.

    Raises ValueError where a written value cannot be had, and where Megatron itself would fail later.
    """
    if isinstance(tempo_config, Choices):
        return tempo_config
    if tempo_config.is_off:
        off = tempo_config.fill_auto(dict.fromkeys(OPERATIONS, "off"))
        return Choices(config=off, written=tempo_config, reasons={})
    _refuse_recomputation(transformer_config)
    refuse_written(transformer_config, tempo_config, obstacles)
    values, reasons = {}, {}
    for name, operation in OPERATIONS.items():
        if "auto" not in tempo_config.values_of(name):
            continue
        found = {value: find_refusal(name, value, transformer_config) for value in operation.preference}
        values[name] = next(value for value, refusal in found.items() if refusal is None)
        refusals = [refusal.reason for refusal in itertools.takewhile(bool, found.values()) if refusal]
        if values[name] != "off" and name in obstacles:
            values[name], refusals = "off", [obstacles[name].reason]
        if refusals:
            # Two values may be refused for one reason.
            reasons[name] = "; and ".join(dict.fromkeys(refusals))
    return Choices(config=tempo_config.fill_auto(values), written=tempo_config, reasons=reasons)


def choose_operation(name: str, transformer_config: TransformerConfig, tempo_config: TempoConfig) -> str:
    """The value of one operation outside of the layers.

    Raises ValueError where a written value cannot be had.
    """
    others: Any = dict.fromkeys(OPERATIONS.keys() - {name}, "off")
    layers = {key: {name: values[name]} for key, values in tempo_config.layers.items() if name in values}
    choices = choose(transformer_config, dataclasses.replace(tempo_config, **others, layers=layers))
    value: str = getattr(choices.config, name)
    return value

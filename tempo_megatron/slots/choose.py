"""Resolves "auto" to a value for each operation, and says before anything is built what cannot be had, and why.

A refusal says why one operation cannot have one value. If the user wrote that value, the refusal becomes an error with
a remedy. "auto" goes on to the next value of its preference and gives the refusal as its reason.

The refusals of this file follow from the TransformerConfig. Other reasons against an operation, such as the modules of
a spec's layers or a script without Megatron's arguments, are obstacles, which callers pass to `choose`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping

from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.slots.attention import find_attention_refusal
from tempo_megatron.slots.experts import find_permute_refusal
from tempo_megatron.slots.linear import is_quantised
from tempo_megatron.slots.mlp import find_activation_refusal

_NORMALIZATIONS = ("LayerNorm", "RMSNorm")
# Recipes of fp8 whose linears can quantise an input that they keep as it is once more in backward.
_QUANTISED_AGAIN = ("tensorwise", "blockwise", "mxfp8")


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
    found = (
        _find_refusal_of_everything(transformer_config)
        or _find_quantised_refusal(transformer_config, operation, value)
        or _FINDERS[operation](transformer_config, value)
    )
    return Refusal(found) if isinstance(found, str) else found


def refuse_written(
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig,
    operations: Iterable[str] = tuple(OPERATIONS),
    obstacles: Obstacles = _NO_OBSTACLES,
) -> None:
    """Raise ValueError, one sentence, where a value that is not "auto" cannot be had.

    The sentence gives the first refusal and names every operation that it concerns.
    """
    written = [
        (name, where, value)
        for name in operations
        for where, value in tempo_config.list_values(name)
        if value != "auto"
    ]
    refusals = [_find_refusal_of_written(name, value, transformer_config, obstacles) for name, _, value in written]
    first = next((refusal for refusal in refusals if refusal is not None), None)
    if first is not None:
        refused = [each[:2] for each, refusal in zip(written, refusals, strict=True) if refusal == first]
        raise ValueError(_write_refusal(first, refused, transformer_config, obstacles))


def _find_refusal_of_written(
    operation: str, value: str, transformer_config: TransformerConfig, obstacles: Obstacles
) -> Refusal | None:
    obstacle = None if value == "off" else obstacles.get(operation)
    both = (find_refusal(operation, value, transformer_config), obstacle)
    return next((refusal for refusal in both if refusal is not None and not refusal.is_for_auto), None)


def _write_refusal(
    refusal: Refusal, refused: list[tuple[str, str]], transformer_config: TransformerConfig, obstacles: Obstacles
) -> str:
    """The sentence for people who wrote the refused values: why not, and what to write.

    refused: (operation, where it was written, such as `tempo.norm` or `tempo.layers["0-11"].norm`).
    """
    operations = [name for name, _ in refused]
    can_be = [
        value
        for value in OPERATIONS[operations[0]].choices
        if value != "auto"
        and all(_find_refusal_of_written(name, value, transformer_config, obstacles) is None for name in operations)
    ]
    # "off" is always possible and reads best at the end.
    values = " or ".join(f'"{value}"' for value in sorted(can_be, key=lambda value: value == "off"))
    remedy = f"{refusal.remedy}, or " if refusal.remedy else ""
    return f"{refusal.reason}; {remedy}set {join_words([where for _, where in refused])} to {values}"


def refuse_recomputation(transformer_config: TransformerConfig) -> None:
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


def join_words(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _find_refusal_of_everything(transformer_config: TransformerConfig) -> Refusal | None:
    if getattr(transformer_config, "enable_autocast", False):
        return Refusal(
            "autocast is on, under which linears keep cast copies, so that keeping outputs saves nothing",
            remedy="use bf16 or fp16 parameters",
        )
    return None


def _find_quantised_refusal(transformer_config: TransformerConfig, operation: str, value: str) -> Refusal | str | None:
    """Why fp8 or fp4 stands against an operation that depends on what a layer's linears keep, or runs a linear again.

    A linear keeps a quantised copy of its input, one byte per element in fp8, whatever the module before it keeps. So
    "recompute" keeps what stock keeps. "inplace" keeps 2 bytes where stock keeps 3, if the linear keeps the output
    itself and quantises it once more in backward, which delayed scaling cannot do.

    The other operations work: between linears tensors have 16 bits (bias-dropout-add, and core attention unless it is
    quantised too), and the output layer is in no layer.
    """
    if not is_quantised(transformer_config):
        return None
    quantises_again = bool(transformer_config.fp8) and transformer_config.fp8_recipe in _QUANTISED_AGAIN
    if operation in ("activation", "norm") and quantises_again:
        return Refusal(
            'fp8 is on, whose linears keep quantised copies, so that "recompute" saves nothing, and for "inplace" they '
            "quantise once more in backward",
            is_for_auto=value == "inplace",
        )
    if operation in ("activation", "norm", "moe_permute") or (operation, value) == ("attention", "recompute"):
        return "fp8 or fp4 is on, whose linears keep quantised copies, so that keeping outputs saves nothing"
    if operation in ("linear_fc1", "linear_qkv"):
        return "fp8 or fp4 is on, in which Tempo does not run a linear again"
    quantised = (name for name in ("fp8_dot_product_attention", "fp8_multi_head_attention") if operation == "attention")
    name = next((name for name in quantised if getattr(transformer_config, name, False)), None)
    return None if name is None else f"{name} is on, and Tempo's attention computes in 16 bits"


def _find_shared_masks(transformer_config: TransformerConfig, dropout_p: float) -> str | None:
    """Why two places of the model, or two ranks, would draw the same dropout masks; None where none would."""
    if dropout_p == 0:
        return None
    if getattr(transformer_config, "hybrid_context_parallel", False):
        return (
            "hybrid_context_parallel is on, whose ranks do different numbers of forwards, and Tempo's dropout does not "
            "know which samples each of them sees, so two samples would draw the same masks"
        )
    if transformer_config.mtp_num_layers and getattr(transformer_config, "overlap_moe_expert_parallel_comm", False):
        return (
            "overlap_moe_expert_parallel_comm is on, which runs parts of the layers of multi-token prediction, so that "
            "their depths are not told apart and would draw the same dropout masks"
        )
    return None


def _find_norm_refusal(transformer_config: TransformerConfig, value: str) -> str | None:
    if transformer_config.normalization not in _NORMALIZATIONS:
        return f"normalization is {transformer_config.normalization}, and Tempo has LayerNorm and RMSNorm only"
    if value == "recompute" and transformer_config.apply_residual_connection_post_layernorm:
        return (
            "apply_residual_connection_post_layernorm is on, which reads a norm's output once more after the linear "
            "that follows it"
        )
    return None


def _find_dropout_refusal(transformer_config: TransformerConfig, value: str) -> str | None:
    return _find_shared_masks(transformer_config, transformer_config.hidden_dropout)


def _find_attention_refusal(transformer_config: TransformerConfig, value: str) -> str | None:
    return _find_shared_masks(transformer_config, transformer_config.attention_dropout) or find_attention_refusal(
        transformer_config, value
    )


def _find_loss_refusal(transformer_config: TransformerConfig, value: str) -> str | None:
    if transformer_config.defer_embedding_wgrad_compute:
        return "defer_embedding_wgrad_compute is on, which keeps the logits' gradient"
    return None


def _find_linear_refusal(transformer_config: TransformerConfig, value: str) -> str | None:
    for name, why in (
        ("delay_wgrad_compute", "by which linears hold their inputs beyond backward"),
        ("cpu_offloading", "which moves what a layer keeps to the host"),
        ("fine_grained_activation_offloading", "which moves what a layer keeps to the host"),
    ):
        if getattr(transformer_config, name, False):
            return f"{name} is on, {why}, and Tempo does not run a linear again beside it"
    return None


def _find_projection_refusal(transformer_config: TransformerConfig, value: str) -> str | None:
    if getattr(transformer_config, "multi_latent_attention", False):
        return "multi_latent_attention is on, and Tempo cannot recompute its projections"
    return _find_linear_refusal(transformer_config, value)


_FINDERS: dict[str, Callable[[TransformerConfig, str], str | None]] = {
    "activation": find_activation_refusal,
    "norm": _find_norm_refusal,
    "dropout": _find_dropout_refusal,
    "attention": _find_attention_refusal,
    "linear_fc1": _find_linear_refusal,
    "linear_qkv": _find_projection_refusal,
    "moe_permute": find_permute_refusal,
    "loss": _find_loss_refusal,
}


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
    transformer_config: TransformerConfig, tempo_config: TempoConfig, obstacles: Obstacles = _NO_OBSTACLES
) -> Choices:
    """`tempo_config` with a value in place of each "auto": the first of its preference that nothing refuses.

    Call it once for each block of layers. The loss is what the configuration allows; whether a built model can have it
    is decided by `tempo_megatron.slots.loss.choose_loss`.

    Raises ValueError where a written value cannot be had, and where Megatron itself would fail later.
    """
    if tempo_config.is_off:
        off = tempo_config.fill_auto(dict.fromkeys(OPERATIONS, "off"))
        return Choices(config=off, written=tempo_config, reasons={})
    refuse_recomputation(transformer_config)
    refuse_written(transformer_config, tempo_config, obstacles=obstacles)
    taken = {
        name: _take_preferred(name, transformer_config, obstacles)
        for name in OPERATIONS
        if "auto" in tempo_config.values_of(name)
    }
    return Choices(
        config=tempo_config.fill_auto({name: value for name, (value, _) in taken.items()}),
        written=tempo_config,
        reasons={name: reason for name, (_, reason) in taken.items() if reason is not None},
    )


def choose_operation(
    name: str, transformer_config: TransformerConfig, tempo_config: TempoConfig
) -> tuple[str, str | None]:
    """The value of one operation outside of the layers, and why it is not the first choice of "auto" (None if it is, or
    if it was written).

    Raises ValueError where a written value cannot be had.
    """
    refuse_written(transformer_config, tempo_config, [name])
    written: str = getattr(tempo_config, name)
    return _take_preferred(name, transformer_config) if written == "auto" else (written, None)


def _take_preferred(
    name: str, transformer_config: TransformerConfig, obstacles: Obstacles = _NO_OBSTACLES
) -> tuple[str, str | None]:
    """What "auto" is for one operation, and why it is not its first choice (None where it is)."""
    reasons = []
    for value in OPERATIONS[name].preference:
        refusal = find_refusal(name, value, transformer_config)
        if refusal is None:
            break
        reasons.append(refusal.reason)
    if value != "off" and name in obstacles:
        return "off", obstacles[name].reason
    # Two values may be refused for one reason.
    return value, "; and ".join(dict.fromkeys(reasons)) or None

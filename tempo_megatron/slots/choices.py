"""Resolves "auto" to a value for each operation, and says why when the first choice cannot be had."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.slots.refusals import find_refusal, refuse_recomputation, refuse_written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """A TempoConfig in which every operation has its value, in every layer."""

    config: TempoConfig
    """Without "auto"."""

    written: TempoConfig
    """What was asked for."""

    reasons: Mapping[str, str]
    """Operation -> a clause without a full stop, why "auto" took something lesser than its first choice. Operations
    that have their first choice, or what somebody wrote, are not in it."""

    def describe(self) -> str:
        """One line: `activation=recompute (auto: activation is swiglu, and ...) norm=inplace ...`.

        A reason that neighbours share stands once, after the last of them; stock throughout without a reason is `off`.
        """
        if self.config.is_off and not self.reasons:
            return "off (stock)"
        groups = []
        # A reason is of each "auto"; where only a layer's values say so, it stands behind them.
        of_all = {name: reason for name, reason in self.reasons.items() if getattr(self.written, name) == "auto"}
        for reason, names in itertools.groupby(self.config.list_spoken_of(), key=of_all.get):
            values = " ".join(f"{name}={getattr(self.config, name)}" for name in names)
            groups.append(f"{values} (auto: {reason})" if reason else values)
        of_layers = [f"{name}: {reason}" for name, reason in self.reasons.items() if name not in of_all]
        groups.append(self.config.describe_layers())
        groups.append(f"(auto of {', '.join(of_layers)})" if of_layers else "")
        return " ".join(filter(None, groups))


def choose(transformer_config: TransformerConfig, tempo_config: TempoConfig) -> Choices:
    """`tempo_config` with a value in place of each "auto": the first of its preference that nothing refuses.

    What can only be told of a built model is for `tempo_megatron.slots.loss.choose_loss` to say; here the loss is what
    the configuration allows.

    Raises ValueError where a written value cannot be had, and where Megatron itself would fail later.
    """
    if tempo_config.is_off:
        off = tempo_config.fill_auto(dict.fromkeys(OPERATIONS, "off"))
        return Choices(config=off, written=tempo_config, reasons={})
    refuse_recomputation(transformer_config)
    refuse_written(transformer_config, tempo_config)
    taken = {
        name: take_preferred(name, transformer_config) for name in OPERATIONS if "auto" in tempo_config.values_of(name)
    }
    return Choices(
        config=tempo_config.fill_auto({name: value for name, (value, _) in taken.items()}),
        written=tempo_config,
        reasons={name: reason for name, (_, reason) in taken.items() if reason is not None},
    )


def choose_operation(
    name: str, transformer_config: TransformerConfig, tempo_config: TempoConfig
) -> tuple[str, str | None]:
    """The value of one operation outside of the layers, and why it is not the first choice of "auto" (None where it is,
    or was written).

    Raises ValueError where a written value cannot be had.
    """
    refuse_written(transformer_config, tempo_config, [name])
    written: str = getattr(tempo_config, name)
    return take_preferred(name, transformer_config) if written == "auto" else (written, None)


def take_preferred(name: str, transformer_config: TransformerConfig) -> tuple[str, str | None]:
    """What "auto" is for one operation, and why it is not its first choice (None where it is)."""
    reasons = []
    for value in OPERATIONS[name].preference:
        refusal = find_refusal(name, value, transformer_config)
        if refusal is None:
            break
        reasons.append(refusal.reason)
    # Two values may be refused for one reason.
    return value, "; and ".join(dict.fromkeys(reasons)) or None


def leave_to_stock(
    tempo_config: TempoConfig, obstacles: Mapping[str, str], remedy: str
) -> tuple[TempoConfig, dict[str, str]]:
    """(`tempo_config` with "off" for each "auto" that `obstacles`, operation -> why not, stand against; those reasons).

    Raises ValueError, which names `remedy` too, where they stand against a written value.
    """
    left = {}
    for name, reason in obstacles.items():
        for where, value in tempo_config.list_values(name):
            if value not in ("auto", "off"):
                raise ValueError(f'{reason}; {remedy}, or set {where} to "off"')
            if value == "auto":
                left[name] = reason
    return tempo_config.fill_auto(dict.fromkeys(left, "off")), left

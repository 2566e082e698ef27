"""What a model takes where its TempoConfig says "auto", and why that may be less than the first choice."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron.config import TempoConfig
from tempo_megatron.operations import OPERATIONS
from tempo_megatron.slots.refusals import find_refusal, refuse_recomputation, refuse_written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """A TempoConfig in which every operation has its value."""

    config: TempoConfig
    """Without "auto"."""

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
        for reason, names in itertools.groupby(OPERATIONS, key=self.reasons.get):
            values = " ".join(f"{name}={getattr(self.config, name)}" for name in names)
            groups.append(f"{values} (auto: {reason})" if reason else values)
        return " ".join(groups)


def choose(transformer_config: TransformerConfig, tempo_config: TempoConfig) -> Choices:
    """`tempo_config` with a value in place of each "auto": the first of its preference that nothing refuses.

    What can only be told of a built model is for `tempo_megatron.slots.loss.choose_loss` to say; here the loss is what
    the configuration allows.

    Raises ValueError where a written value cannot be had, and where Megatron itself would fail later.
    """
    if tempo_config.is_off:
        return Choices(config=tempo_config, reasons={})
    refuse_recomputation(transformer_config)
    refuse_written(transformer_config, tempo_config)
    chosen = {name: _take_preferred(name, transformer_config, tempo_config) for name in OPERATIONS}
    return Choices(
        config=TempoConfig(**{name: value for name, (value, _) in chosen.items()}),
        reasons={name: reason for name, (_, reason) in chosen.items() if reason is not None},
    )


def choose_operation(
    name: str, transformer_config: TransformerConfig, tempo_config: TempoConfig
) -> tuple[str, str | None]:
    """The value of one operation, and why it is not the first choice of "auto" (None where it is, or was written).

    Raises ValueError where the written value cannot be had.
    """
    refuse_written(transformer_config, tempo_config, [name])
    return _take_preferred(name, transformer_config, tempo_config)


def leave_to_stock(
    tempo_config: TempoConfig, obstacles: Mapping[str, str], remedy: str
) -> tuple[TempoConfig, dict[str, str]]:
    """(`tempo_config` with "off" for each "auto" that `obstacles`, operation -> why not, stand against; those reasons).

    Raises ValueError, which names `remedy` too, where they stand against a written value.
    """
    for name, reason in obstacles.items():
        if getattr(tempo_config, name) not in ("auto", "off"):
            raise ValueError(f'{reason}; {remedy}, or set tempo.{name} to "off"')
    left = {name: reason for name, reason in obstacles.items() if getattr(tempo_config, name) == "auto"}
    return dataclasses.replace(tempo_config, **dict.fromkeys(left, "off")), left


def _take_preferred(
    name: str, transformer_config: TransformerConfig, tempo_config: TempoConfig
) -> tuple[str, str | None]:
    """As choose_operation, where what is written can be had."""
    written: str = getattr(tempo_config, name)
    if written != "auto":
        return written, None
    reasons = []
    for value in OPERATIONS[name].preference:
        refusal = find_refusal(name, value, transformer_config)
        if refusal is None:
            break
        reasons.append(refusal.reason)
    # Two values may be refused for one reason.
    return value, "; and ".join(dict.fromkeys(reasons)) or None

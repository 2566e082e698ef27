"""The grid's cases: its axes, what cannot be and why, and a subset in which every pair of values meets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from grid.models import FAMILIES, RECOMPUTE
from tempo_megatron import TempoConfig

WORLD_SIZE = 4
CHOICES = ("inplace", "recompute", "auto", "off")
DROPOUTS = (0.0, 0.1)
DTYPES = ("fp32", "bf16")


@dataclasses.dataclass(frozen=True, order=True)
class Layout:
    """How a model lies over processes."""

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    virtual: int = 1
    """Chunks of each pipeline stage; more than one is the interleaved schedule."""

    def __str__(self) -> str:
        parts = [f"TP {self.tp}" + (" + SP" if self.sequence_parallel else "")]
        parts += [f"PP {self.pp}" + (", interleaved" if self.virtual > 1 else "")] if self.pp > 1 else []
        return ", ".join(parts)

    @property
    def num_processes(self) -> int:
        return self.tp * self.pp

    @property
    def num_layers(self) -> int:
        """Of the model: two for each stage or more."""
        return 4 if self.pp > 1 else 2


ONE_PROCESS = Layout()
LAYOUTS = (
    *(Layout(tp, sequence_parallel, pp) for pp in (1, 2) for tp in (1, 2, 4) for sequence_parallel in (False, True)),
    Layout(1, False, 2, 2),
    Layout(2, True, 2, 2),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the grid."""

    family: str
    layout: Layout
    recompute: str
    choice: str
    dropout: float
    dtype: str

    @property
    def key(self) -> str:
        """What names it in the file of results."""
        return f"{self.family} | {self.layout} | {self.recompute} | {self.choice} | p {self.dropout:g} | {self.dtype}"

    @property
    def values(self) -> list[tuple[str, object]]:
        """(axis, value), for pairs."""
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]

    @property
    def tempo(self) -> TempoConfig:
        return choose_tempo(self.family, self.choice)

    @property
    def is_refused(self) -> bool:
        """Whether Tempo itself must say no, at the start and in one sentence."""
        return self.choice == "inplace" and self.family == "Llama"


def choose_tempo(family: str, choice: str) -> TempoConfig:
    """The TempoConfig of a column of the grid."""
    if choice == "off":
        return TempoConfig.off()
    if choice == "auto":
        return TempoConfig()
    # The fused loss is a GPTModel's.
    loss = "fused" if family in ("GPT", "Llama") else "off"
    return TempoConfig(activation=choice, norm=choice, dropout="recompute", attention="flash", loss=loss)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Why a combination is no case. None is Tempo's: what Tempo refuses is a case, and asserted."""

    name: str
    reason: str
    applies: Callable[[Case], bool]


RULES = (
    Rule(
        "a",
        "sequence parallelism splits tokens over the tensor-parallel group, and Megatron refuses it with TP 1",
        lambda case: case.layout.sequence_parallel and case.layout.tp == 1,
    ),
    Rule(
        "b",
        "needs 8 processes; the grid runs on 1, 2 and 4",
        lambda case: case.layout.num_processes > WORLD_SIZE,
    ),
    Rule(
        "c",
        "Megatron's T5Model has no pipeline stages: its encoder and decoder stand in one process",
        lambda case: case.family == "T5" and case.layout.pp > 1,
    ),
    Rule(
        "d",
        "Megatron's BertLMHead has a norm of its own, which refuses sequence parallelism without Apex",
        lambda case: case.family == "BERT" and case.layout.sequence_parallel,
    ),
    Rule(
        "e",
        "stock Megatron never ends the backward of a recomputed MLP that has biases; with Tempo's activation it does",
        lambda case: case.choice == "off" and case.recompute == "mlp" and case.family != "Llama",
    ),
)


def find_rule(case: Case) -> Rule | None:
    """The first rule by which a combination is no case; None where it is one."""
    return next((rule for rule in RULES if rule.applies(case)), None)


def list_product() -> list[Case]:
    """Every combination, also those that cannot be."""
    axes = (FAMILIES, LAYOUTS, RECOMPUTE, CHOICES, DROPOUTS, DTYPES)
    return [Case(*values) for values in itertools.product(*axes)]  # type: ignore[arg-type]


def list_cases() -> list[Case]:
    """Every combination that can be."""
    return [case for case in list_product() if find_rule(case) is None]


def list_pairs(cases: Iterable[Case]) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Every pair of two axes' values that meets in one of the cases."""
    return {pair for case in cases for pair in _pairs_of(case)}


def _pairs_of(case: Case) -> list[tuple[tuple[str, object], tuple[str, object]]]:
    return list(itertools.combinations(case.values, 2))


def choose_pairwise() -> list[Case]:
    """A small subset of the cases in which every pair of values that can meet does; the same each time."""
    return _choose(lambda case: set(_pairs_of(case)))


def choose_sample() -> list[Case]:
    """A smaller one: every layout occurs, and every pair of the other axes' values."""
    anywhere = {case: dataclasses.replace(case, layout=ONE_PROCESS) for case in list_cases()}
    return _choose(lambda case: {case.layout, *_pairs_of(anywhere[case])})


def _choose(list_wanted: Callable[[Case], set[Any]]) -> list[Case]:
    """The same few cases each time that have all that `list_wanted` gives of any."""
    wanted = {case: list_wanted(case) for case in list_cases()}
    remaining, chosen = set().union(*wanted.values()), []
    while remaining:
        best = max(wanted, key=lambda case: len(wanted[case] & remaining))
        chosen.append(best)
        remaining -= wanted[best]
    return chosen

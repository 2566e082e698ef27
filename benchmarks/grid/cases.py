"""The grid's cases: its axes, what cannot be and why, and subsets in which every pair of values meets.

It has two parts. The first is every model, layout, recomputation and choice, the second context parallelism and packed
rows, with what `auto` chooses.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from grid.models import FAMILIES, RECOMPUTE, SEQUENCE_FAMILIES
from tempo_megatron import TempoConfig

WORLD_SIZES = (4, 8)
"""Processes of a pool: 8 for the layouts that need as many."""

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

    cp: int = 1
    comm_type: str = ""
    """Megatron's cp_comm_type; empty where cp is 1."""

    def __str__(self) -> str:
        parts = [f"TP {self.tp}" + (" + SP" if self.sequence_parallel else "")]
        parts += [f"CP {self.cp} {self.comm_type}"] if self.cp > 1 else []
        parts += [f"PP {self.pp}" + (", interleaved" if self.virtual > 1 else "")] if self.pp > 1 else []
        return ", ".join(parts)

    @property
    def num_processes(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def hierarchical_sizes(self) -> list[int] | None:
        """How many ranks exchange heads, and how many groups of them rows; None where not both are exchanged."""
        return [2, self.cp // 2] if self.comm_type == "a2a+p2p" else None

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
_SPLITS = ((1, False), (2, False), (2, True))
_COMM_TYPES = ("p2p", "all_gather", "a2a")
SEQUENCE_LAYOUTS = (
    *(Layout(*split) for split in _SPLITS),
    *(Layout(*split, cp=2, comm_type=comm_type) for split in _SPLITS for comm_type in _COMM_TYPES),
    *(Layout(*split, cp=4, comm_type=comm_type) for split in _SPLITS for comm_type in (*_COMM_TYPES, "a2a+p2p")),
    *(Layout(cp=8, comm_type=comm_type) for comm_type in (*_COMM_TYPES, "a2a+p2p")),
    Layout(pp=2),
    Layout(pp=2, cp=2, comm_type="p2p"),
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
    documents: str = ""
    """"packed" in one row, or "alone", each in a row of its own, as packed rows are held against; empty for samples of
    one length."""

    @property
    def key(self) -> str:
        """What names it in the file of results."""
        family = self.family + (f", {self.documents}" if self.documents else "")
        return f"{family} | {self.layout} | {self.recompute} | {self.choice} | p {self.dropout:g} | {self.dtype}"

    @property
    def values(self) -> list[tuple[str, object]]:
        """(axis, value), for pairs."""
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]

    @property
    def sequence_values(self) -> list[tuple[str, object]]:
        """(axis, value) of the second part, for pairs."""
        layout = self.layout
        split = {"tp": (layout.tp, layout.sequence_parallel), "pp": layout.pp, "cp": (layout.cp, layout.comm_type)}
        return [*split.items(), *((name, value) for name, value in self.values if name != "layout")]

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
    loss = "off" if family in ("BERT", "T5") else "fused"
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
        "needs 8 processes, which only layouts with context parallelism get",
        lambda case: case.layout.num_processes > WORLD_SIZES[case.layout.cp > 1],
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
SEQUENCE_RULES = (
    Rule(
        "f",
        "the first part has it, or, of latent attention and of multi-token prediction, only one stage runs here",
        lambda case: case.layout.pp > 1 and (not case.documents or case.family in ("MLA", "MTP")),
    ),
)


def find_rule(case: Case, rules: tuple[Rule, ...] = RULES) -> Rule | None:
    """The first rule of a part by which a combination is no case; None where it is one."""
    return next((rule for rule in rules if rule.applies(case)), None)


def list_product() -> list[Case]:
    """Every combination of the first part, also those that cannot be."""
    axes = (FAMILIES, LAYOUTS, RECOMPUTE, CHOICES, DROPOUTS, DTYPES)
    return [Case(*values) for values in itertools.product(*axes)]  # type: ignore[arg-type]


def list_sequence_product() -> list[Case]:
    """Every combination of the second part, also those that cannot be: each in bfloat16 without dropout, and in float32
    with dropout, which under tensor parallelism is drawn again by full recomputation. Stock's ends in an error with
    packed rows and multi-token prediction."""
    found = []
    for family, layout, documents in itertools.product(SEQUENCE_FAMILIES, SEQUENCE_LAYOUTS, ("", "packed")):
        found.append(Case(family, layout, "none", "auto", 0.0, "bf16", documents))
        recomputes = layout.tp > 1 and not (family == "MTP" and documents)
        found.append(Case(family, layout, "full" if recomputes else "none", "auto", 0.1, "fp32", documents))
    return found


def list_cases() -> list[Case]:
    """Every combination of the first part that can be."""
    return [case for case in list_product() if find_rule(case) is None]


def list_sequence_cases() -> list[Case]:
    """Every combination of the second part that can be; some are the first part's too."""
    return [case for case in list_sequence_product() if find_rule(case, SEQUENCE_RULES) is None]


def list_pairs(cases: Iterable[Case]) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Every pair of two axes' values that meets in one of the cases."""
    return {pair for case in cases for pair in _pairs_of(case)}


def _pairs_of(case: Case) -> list[tuple[tuple[str, object], tuple[str, object]]]:
    return list(itertools.combinations(case.values, 2))


def choose_pairwise() -> list[Case]:
    """A small subset of the first part in which every pair of values that can meet does; the same each time."""
    return _choose(list_cases(), lambda case: set(_pairs_of(case)))


def choose_sequences() -> list[Case]:
    """Such a subset of the second part."""
    return _choose(list_sequence_cases(), lambda case: set(itertools.combinations(case.sequence_values, 2)))


def choose_sample() -> list[Case]:
    """A smaller one: every layout of the first part occurs, and every pair of the other axes' values."""
    anywhere = {case: dataclasses.replace(case, layout=ONE_PROCESS) for case in list_cases()}
    return _choose(list(anywhere), lambda case: {case.layout, *_pairs_of(anywhere[case])})


def _choose(cases: list[Case], list_wanted: Callable[[Case], set[Any]]) -> list[Case]:
    """The same few of the cases each time that have all that `list_wanted` gives of any."""
    wanted = {case: list_wanted(case) for case in cases}
    remaining, chosen = set().union(*wanted.values()), []
    while remaining:
        best = max(wanted, key=lambda case: len(wanted[case] & remaining))
        chosen.append(best)
        remaining -= wanted[best]
    return chosen

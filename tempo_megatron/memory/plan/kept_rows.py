"""Measures what a layer keeps for backward with every choice of its operations' values, on a few real layers.

A layer has up to 288 choices, and the planner needs the bytes of each. So one model on tensors without memory gets
layers of different choices, and the ledger's rows of each are read. A row depends on few operations. Which ones follows
from the measurements: take the smallest sets of operations whose values determine the row's bytes in all layers so far.
Where these sets disagree about a choice, or have not seen its values, the choice is measured next. Once all choices
are predicted, a few more are measured as a check. If one of them differs from its prediction by a byte, the search goes
on; in the worst case every choice is measured.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tempo_kernels.offload import MIN_BYTES
from tempo_megatron.memory.kept.attribution import name_row, sum_rows
from tempo_megatron.memory.routing import assume_fullest
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk import STACKS_OF_FAMILIES, describe_parts, record_chunk
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS
from tempo_megatron.settings.operations import CHOICES, LEDGER_ROWS, find_offload_row
from tempo_megatron.slots.choose import find_refusal
from tempo_megatron.slots.layer_spec import keeps_copies

Values = tuple[str, ...]
"""The value of each of LAYER_OPERATIONS, never "auto"."""
Rows = Mapping[str, int]
"""Row of the ledger -> bytes; what of it is too small for offload is a row of its own."""
_ATTENTION, _LINEAR_QKV = (LAYER_OPERATIONS.index(name) for name in ("attention", "linear_qkv"))
# Ends the name of the part of a row whose storages no offload moves.
_SMALL = ", small"
# So many choices are measured together after the first batch.
_NUM_MORE = 4
_ONLY_WRITTEN = {"moe_permute": "repeat", "linear_fc1": "tile"}
"""Operation -> the value that no plan chooses by itself."""


@dataclasses.dataclass(frozen=True)
class KeptRows:
    """What a layer keeps with one kind of recomputation by Megatron."""

    rows: Mapping[Values, Rows]
    """Each choice that a layer can have -> its rows."""
    stack_bytes: int
    """What the layers of a stage keep together: with full recomputation the angles of rotary embeddings."""
    measured: frozenset[Values]
    """The choices that were measured; the others are predicted."""
    movable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Row of the ledger -> its name among OFFLOAD_ROWS, if it can go to the host."""

    def list_movable(self, values: Values) -> dict[str, int]:
        """One of OFFLOAD_ROWS -> the bytes that a layer with these values can send to the host by that name."""
        found: collections.Counter[str] = collections.Counter()
        for title, num_bytes in self.rows[values].items():
            if title in self.movable:
                found[self.movable[title]] += num_bytes
        return dict(found)

    def count(self, config: TempoConfig) -> int:
        """Bytes of a layer with the values of `config`.

        A projection that runs again saves nothing where stock attention keeps copies of q, k and v. The slots refuse
        both together, so this counts the projection as stock.
        """
        values = tuple(getattr(config, name) for name in LAYER_OPERATIONS)
        if values not in self.rows:
            values = tuple("off" if place == _LINEAR_QKV else value for place, value in enumerate(values))
        return sum(self.rows[values].values())


def list_values(run: Run) -> dict[str, Values]:
    """Operation -> the values among which a plan chooses, "off" first: those that a model can have, and that the
    estimate knows. Two are chosen only where they are written: tokens that are sent again, whose price takes a rate of
    the network, and the MLP in tiles, which keeps what a recomputed one does."""
    config = describe_parts(build_transformer_config(run.model, dtype=run.dtype), run)
    is_unknown = {"attention": run.latent_attention is not None, "linear_fc1": run.experts is not None}
    return {
        name: tuple(
            value
            for value in sorted(choices, key=lambda value: value != "off")
            if value == "off"
            or (
                value not in ("auto", _ONLY_WRITTEN.get(name))
                and not is_unknown.get(name)
                and find_refusal(name, value, config) is None
            )
        )
        for name, choices in CHOICES.items()
    }


def measure_rows(run: Run, recompute: Iterable[str]) -> KeptRows:
    """Measure what a layer of a run's model keeps on one rank, with this recomputation by Megatron.

    In a model of experts it is a layer with them.

    Raises ValueError where torch.distributed is already initialised.
    """
    return _measure_rows(_keep_layer(run, recompute))


def measure_stock_layer(run: Run) -> Rows:
    """Measure the rows of a stock layer of a run's model, without recomputation.

    Raises ValueError as `measure_rows`.
    """
    rows, _ = _measure_layers(_keep_layer(run, ()), [("off",) * len(LAYER_OPERATIONS)])
    found: collections.Counter[str] = collections.Counter()
    for title, num_bytes in rows[0].items():
        found[title.removesuffix(_SMALL)] += num_bytes
    return dict(found)


def _keep_layer(run: Run, recompute: Iterable[str]) -> Run:
    """A Run of the fields on which the bytes of a layer depend, so that runs with equal layers are equal."""
    # The tokens of the stage that has most: what is returned has neither stages nor a vocabulary.
    experts = assume_fullest(run).experts
    written: dict[str, Any] = {
        name: value for name, value in _ONLY_WRITTEN.items() if getattr(run.tempo, name) == value
    }
    return Run(
        model=dataclasses.replace(run.model, num_layers=1, vocab_size=1),
        tempo=dataclasses.replace(TempoConfig.off(), **written),
        experts=experts and dataclasses.replace(experts, layers=(True,)),
        latent_attention=run.latent_attention,
        tensor_parallel=run.tensor_parallel,
        sequence_parallel=run.sequence_parallel,
        micro_batch_size=run.micro_batch_size,
        dtype=run.dtype,
        recompute=tuple(sorted(recompute)),
        stock=run.stock,
        stock_attention=run.stock_attention,
        masked_softmax_fusion=run.masked_softmax_fusion,
    )


@functools.lru_cache(maxsize=64)
def _measure_rows(run: Run) -> KeptRows:
    values = list_values(run)
    for operation, written in _ONLY_WRITTEN.items():
        if getattr(run.tempo, operation) == written:
            values[operation] += (written,)
    choices = itertools.product(*(values[name] for name in LAYER_OPERATIONS))
    possible = [choice for choice in choices if not _keeps_copies(run, choice)]
    stack_bytes = 0

    def measure(batch: Sequence[Values]) -> list[Rows]:
        nonlocal stack_bytes
        found, stack_bytes = _measure_layers(run, batch)
        return found

    rows, measured = complete(possible, measure)
    (stack,) = STACKS_OF_FAMILIES[run.model.family]
    movable = {
        name_row(row, run.model.activation): name
        for row in LEDGER_ROWS
        if row.stack == stack and (name := find_offload_row(row)) is not None
    }
    return KeptRows(rows, stack_bytes, measured, movable)


def _keeps_copies(run: Run, choice: Values) -> bool:
    """Whether the slots refuse a choice: its stock attention keeps copies of what its projection would run again."""
    is_fit = choice[_ATTENTION] != "off" or choice[_LINEAR_QKV] == "off" or "core_attn" in run.recompute
    is_grouped = run.model.num_query_groups != run.model.num_attention_heads
    return not is_fit and keeps_copies(is_megatrons=run.stock != "transformer_engine", is_grouped=is_grouped)


def _measure_layers(run: Run, choices: Sequence[Values]) -> tuple[list[Rows], int]:
    """The rows of one layer of each choice, and the bytes that the layers keep together."""
    layers = {str(place): dict(zip(LAYER_OPERATIONS, choice, strict=True)) for place, choice in enumerate(choices)}
    model = dataclasses.replace(run.model, num_layers=len(choices))
    experts = run.experts and dataclasses.replace(run.experts, layers=(True,) * len(choices))
    tempo = dataclasses.replace(TempoConfig.off(), layers=layers)
    by_layer, rest = record_chunk(dataclasses.replace(run, model=model, experts=experts, tempo=tempo))
    (stack,) = STACKS_OF_FAMILIES[model.family]
    found: list[Rows] = []
    for place in range(len(choices)):
        rows: dict[str, int] = {}
        for is_small, suffix in ((False, ""), (True, _SMALL)):
            part = [storage for storage in by_layer[stack, place] if (storage.num_bytes < MIN_BYTES) == is_small]
            summed = sum_rows(part, (model.seq_length,), model.activation)
            rows |= {row.operation + suffix: row.num_bytes for row in summed}
        found.append(rows)
    # The rest is the mask, which belongs to the micro batch.
    return found, sum(storage.num_bytes for storage in rest if storage.operation == stack)


def complete(
    choices: Sequence[Values], measure: Callable[[Sequence[Values]], Sequence[Rows]]
) -> tuple[dict[Values, Rows], frozenset[Values]]:
    """Measure some choices and predict the others.

    Args:
        choices: all choices, values of the same operations.
        measure: returns the rows of each choice that it is given.

    Returns:
        The rows of every choice, and the choices that were measured.
    """
    known: dict[Values, Rows] = {}
    batch, is_check = _cover(choices, known, 2, len(choices)), False
    predicted: dict[Values, Rows] = {}
    while batch:
        found = dict(zip(batch, measure(batch), strict=True))
        known |= found
        if is_check and all(predicted[choice] == rows for choice, rows in found.items()):
            break
        predicted = _predict(choices, known)
        unknown = [choice for choice in choices if choice not in predicted]
        is_check = not unknown
        rest = unknown or [choice for choice in choices if choice not in known]
        batch = _cover(rest, known, 3, _NUM_MORE) or rest[:_NUM_MORE]
    return predicted | known, frozenset(known)


def _cover(choices: Sequence[Values], known: Collection[Values], strength: int, limit: int) -> list[Values]:
    """Choose greedily at most `limit` choices that together have every combination of values of any `strength`
    operations that no known choice has."""

    def list_together(choice: Values) -> Iterator[tuple[tuple[int, str], ...]]:
        return itertools.combinations(enumerate(choice), strength)

    missing = {each for choice in choices for each in list_together(choice)}
    missing -= {each for choice in known for each in list_together(choice)}
    found: list[Values] = []
    while missing and len(found) < limit:
        found.append(max(choices, key=lambda choice: sum(each in missing for each in list_together(choice))))
        missing -= {*list_together(found[-1])}
    return found


def _predict(choices: Sequence[Values], known: Mapping[Values, Rows]) -> dict[Values, Rows]:
    """The rows of those choices about which all of the smallest sets of operations agree."""
    predicted: dict[Values, dict[str, int] | None] = {choice: {} for choice in choices}
    for row in dict.fromkeys(name for rows in known.values() for name in rows):
        tables = _find_tables(row, known)
        for choice, rows in predicted.items():
            said = {table.get(tuple(choice[place] for place in places)) for places, table in tables}
            if len(said) > 1 or None in said:
                predicted[choice] = None
            elif rows is not None and (num_bytes := said.pop()):
                rows[row] = num_bytes
    return {choice: rows for choice, rows in predicted.items() if rows is not None}


def _find_tables(row: str, known: Mapping[Values, Rows]) -> list[tuple[tuple[int, ...], dict[Values, int]]]:
    """The smallest sets of operations that determine a row, as places in a choice, each with values -> bytes."""
    num_operations = len(next(iter(known)))
    for size in range(num_operations + 1):
        tables = []
        for places in itertools.combinations(range(num_operations), size):
            table: dict[Values, int] = {}
            if all(
                table.setdefault(tuple(choice[place] for place in places), rows.get(row, 0)) == rows.get(row, 0)
                for choice, rows in known.items()
            ):
                tables.append((places, table))
        if tables:
            return tables
    raise AssertionError("two measurements of one choice differ")

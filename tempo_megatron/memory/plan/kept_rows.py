"""Measures what a layer keeps for backward for every choice of its operations' values, from a few real layers.

A layer has up to 288 choices, and the planner needs the bytes of each. One model on tensors without memory has layers
of different choices, and the ledger of each is read. A row of it depends on few operations. Which ones follows from
what was measured: the smallest sets of operations whose values tell the row's bytes in every layer so far. A choice for
which such sets say different things, or have not seen the values, is measured next. At the end more choices are
measured than were needed; where one of them is not predicted to the byte, the search goes on with them. In the worst
case every choice is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from tempo_megatron.memory.kept.attribution import sum_rows
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk import STACKS_OF_FAMILIES, record_chunk
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS
from tempo_megatron.settings.operations import CHOICES
from tempo_megatron.slots.choose import find_refusal
from tempo_megatron.slots.layer_spec import keeps_copies

Values = tuple[str, ...]
"""Of LAYER_OPERATIONS, without "auto"."""
Rows = Mapping[str, int]
"""Row of the ledger -> bytes."""
_ATTENTION, _LINEAR_QKV = (LAYER_OPERATIONS.index(name) for name in ("attention", "linear_qkv"))
# Choices that are measured at once: to tell sets of operations apart, and to check the prediction.
_NUM_MORE = 4


@dataclasses.dataclass(frozen=True)
class KeptRows:
    """What one layer keeps with one recomputation by Megatron."""

    rows: Mapping[Values, Rows]
    """Of each choice that a layer can have."""
    stack_bytes: int
    """What the layers of a pipeline stage keep together, once: with full recomputation the angles of rotary embeddings.
    """
    measured: frozenset[Values]
    """The choices that were measured; the others are predicted."""

    def count(self, config: TempoConfig) -> int:
        """Bytes of a layer with the values of `config`.

        Stock attention that keeps copies of q, k and v cannot be beside a projection that runs again, which would save
        nothing: it counts as if that did not.
        """
        values = tuple(getattr(config, name) for name in LAYER_OPERATIONS)
        if values not in self.rows:
            values = tuple("off" if place == _LINEAR_QKV else value for place, value in enumerate(values))
        return sum(self.rows[values].values())


def list_values(run: Run) -> dict[str, Values]:
    """Operation -> the values that a model can have, stock first."""
    config = build_transformer_config(run.model, dtype=run.dtype)
    return {
        name: tuple(
            value
            for value in sorted(choices, key=lambda value: value != "off")
            if value != "auto" and find_refusal(name, value, config) is None
        )
        for name, choices in CHOICES.items()
    }


def measure_rows(run: Run, recompute: Iterable[str]) -> KeptRows:
    """The rows of a layer of a run's model on one of its ranks, with this recomputation by Megatron.

    Raises ValueError where torch.distributed is already initialised.
    """
    return _measure_rows(_keep_layer(run, recompute))


def measure_stock_layer(run: Run) -> Rows:
    """The rows of a stock layer without recomputation of a run's model.

    Raises ValueError as `measure_rows`.
    """
    rows, _ = _measure_layers(_keep_layer(run, ()), [("off",) * len(LAYER_OPERATIONS)])
    return rows[0]


def _keep_layer(run: Run, recompute: Iterable[str]) -> Run:
    """What of a run says what a layer keeps, so that runs whose layers are alike are equal."""
    return Run(
        model=dataclasses.replace(run.model, num_layers=1, vocab_size=1),
        tempo=TempoConfig.off(),
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
    choices = itertools.product(*(values[name] for name in LAYER_OPERATIONS))
    possible = [choice for choice in choices if not _keeps_copies(run, choice)]
    stack_bytes = 0

    def measure(batch: Sequence[Values]) -> list[Rows]:
        nonlocal stack_bytes
        found, stack_bytes = _measure_layers(run, batch)
        return found

    rows, measured = complete(possible, measure)
    with_copies = {choice: _add_second_output(run, choice, of_choice) for choice, of_choice in rows.items()}
    return KeptRows(with_copies, stack_bytes, measured)


def _keeps_copies(run: Run, choice: Values) -> bool:
    """Whether stock attention keeps copies of q, k and v beside a projection that runs again, which slots refuse."""
    is_fit = choice[_ATTENTION] != "off" or choice[_LINEAR_QKV] == "off" or "core_attn" in run.recompute
    is_grouped = run.model.num_query_groups != run.model.num_attention_heads
    return not is_fit and keeps_copies(is_megatrons=run.stock != "transformer_engine", is_grouped=is_grouped)


def _measure_layers(run: Run, choices: Sequence[Values]) -> tuple[list[Rows], int]:
    """The rows of one layer of each choice, and the bytes that they keep together."""
    layers = {str(place): dict(zip(LAYER_OPERATIONS, choice, strict=True)) for place, choice in enumerate(choices)}
    model = dataclasses.replace(run.model, num_layers=len(choices))
    by_layer, rest = record_chunk(
        dataclasses.replace(run, model=model, tempo=dataclasses.replace(run.tempo, layers=layers))
    )
    (stack,) = STACKS_OF_FAMILIES[model.family]
    found: list[Rows] = []
    for place in range(len(choices)):
        rows = sum_rows(by_layer[stack, place], (model.seq_length,), model.activation)
        found.append({row.operation: row.num_bytes for row in rows})
    # A micro batch has its mask whatever the layers keep.
    return found, sum(storage.num_bytes for storage in rest if storage.operation == stack)


def count_second_output(run: Run, choice: Values, recompute: Collection[str]) -> int:
    """What stock FlashAttention 2 keeps beyond fused attention: it computes [b, s, a, d], and Transformer Engine copies
    that to [s, b, a * d] for the linear, so that both stay."""
    is_there = (run.stock, run.stock_attention, choice[_ATTENTION]) == ("transformer_engine", "flash", "off")
    if not is_there or {"core_attn", "full"} & {*recompute}:
        return 0
    heads = run.model.num_attention_heads // run.tensor_parallel
    return run.model.seq_length * run.micro_batch_size * heads * run.model.kv_channels * run.dtype.itemsize


def _add_second_output(run: Run, choice: Values, rows: Rows) -> Rows:
    more = count_second_output(run, choice, run.recompute)
    return {**rows, "linear_proj": rows.get("linear_proj", 0) + more} if more else rows


def complete(
    choices: Sequence[Values], measure: Callable[[Sequence[Values]], Sequence[Rows]]
) -> tuple[dict[Values, Rows], frozenset[Values]]:
    """The rows of every choice, and which choices were measured for them.

    Args:
        choices: values of the same operations.
        measure: the rows of some choices.
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
    """Choices, as few as a greedy search finds and at most `limit`, that have all values of any `strength` operations
    together that no known choice has."""

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
    """The rows of the choices for which all of the smallest sets of operations say the same."""
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
    """The smallest sets of operations, as places in a choice, and values of them -> the row's bytes."""
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
    raise AssertionError("all operations together tell one choice from another")

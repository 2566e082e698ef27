"""Turns the storages that autograd holds into rows of the ledger: which operation keeps how much."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection, Iterable
from typing import Any

from tempo_megatron.memory.tape.scopes import SavedStorage
from tempo_megatron.settings.operations import ACTIVATION, LEDGER_ROWS, STACKS, LedgerRow

_ROWS = {(row.module, row.is_scores): row for row in LEDGER_ROWS}
_MODULES = {row.module for row in LEDGER_ROWS}
_LAYER = re.compile(rf"^({'|'.join(STACKS)})\.layers\.(\d+)")
# A SequentialMLP's.
_EXPERT = re.compile(r"\.local_experts\.\d+")


@dataclasses.dataclass(frozen=True)
class Row:
    """What one operation keeps: the storages that it saved first."""

    operation: str
    num_bytes: int
    place: int = len(LEDGER_ROWS)
    """Its place in the table; an operation that LEDGER_ROWS does not know comes last."""
    is_in_layer: bool = True
    """Whether every layer has it, or the model once."""
    is_scores: bool = False
    """Whether it grows with s**2."""
    host_bytes: int = 0
    """The part of `num_bytes` that is on the host."""


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Layers that keep the same, operation by operation."""

    layers: str
    """`0-11,20`, from 0 over the whole model; in a run with two stacks after the name of the stack."""
    num_layers: int
    rows: tuple[Row, ...]
    """Of one layer."""

    @property
    def layer_bytes(self) -> int:
        """One layer, s*s tensors included."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def host_bytes(self) -> int:
        """What of it is on the host."""
        return sum(row.host_bytes for row in self.rows)


def find_layer(operation: str) -> tuple[str, int] | None:
    """(stack, place in its list of layers) of an operation's name; None if it is in no layer."""
    found = _LAYER.match(operation)
    return None if found is None else (found[1], int(found[2]))


def divide_by_layer(
    saved: Iterable[SavedStorage], config: Any
) -> tuple[dict[tuple[str, int], list[SavedStorage]], list[SavedStorage]]:
    """Divide storages into those of each layer, by (stack, place in its list of layers), and those of no layer.

    config: the model's TransformerConfig.
    """
    by_layer: dict[tuple[str, int], list[SavedStorage]] = {}
    rest = []
    together = int(config.recompute_num_layers) if config.recompute_method == "uniform" else 1
    num_checkpoints = dict.fromkeys(STACKS, 0)
    for storage in saved:
        layer = find_layer(storage.operation)
        if storage.operation in STACKS and storage.shape[-1] == config.hidden_size:
            # The input of a recomputed layer, or of the first of several that are recomputed together.
            layer = storage.operation, num_checkpoints[storage.operation] * together
            num_checkpoints[storage.operation] += 1
        if layer is None:
            rest.append(storage)
        else:
            by_layer.setdefault(layer, []).append(storage)
    return by_layer, rest


def find_row(operation: str, shape: tuple[int, ...] = (), lengths: Collection[int] = ()) -> LedgerRow:
    """The ledger's row of an operation; its row of s*s tensors for a shape whose last two sizes are among `lengths`."""
    name = _EXPERT.sub("", _LAYER.sub(r"\1.layers.0", operation))
    while name not in _MODULES:
        name = name.rpartition(".")[0]
    # A sink is one score more in each row.
    is_scores = len(shape) > 1 and shape[-2] in lengths and (shape[-1] in lengths or shape[-1] - 1 in lengths)
    return _ROWS.get((name, is_scores)) or _ROWS[name, False]


def sum_rows(saved: Iterable[SavedStorage], lengths: Iterable[int], activation: str) -> tuple[Row, ...]:
    """The rows of the table, in its order.

    Args:
        saved: the storages, as `Scopes.list_saved` returns them.
        lengths: tokens per sample, for each stack.
        activation: the name of the MLP's activation.
    """
    totals, on_host = collections.Counter[LedgerRow](), collections.Counter[LedgerRow]()
    lengths = set(lengths)
    for storage in saved:
        row = find_row(storage.operation, storage.shape, lengths)
        totals[row] += storage.num_bytes
        on_host[row] += storage.num_bytes * storage.is_on_host
    has_two_stacks = len({row.stack for row in totals if row.stack}) > 1
    found = []
    for place, row in enumerate(LEDGER_ROWS):
        if totals[row]:  # an expert without tokens keeps empty tensors
            stack = f"{row.stack} " if has_two_stacks and row.stack else ""
            of_row = totals[row], place, row.is_in_layer, row.is_scores, on_host[row]
            found.append(Row(stack + name_row(row, activation), *of_row))
    return tuple(found)


def name_row(row: LedgerRow, activation: str) -> str:
    """The row's title; an activation is called by its name."""
    return row.title.removesuffix(ACTIVATION) + activation if row.title.endswith(ACTIVATION) else row.title


def format_size(num_bytes: int) -> str:
    """`625,314,820`, and from ten digits on `1.86 GiB`."""
    return f"{num_bytes:,}" if num_bytes < 10**9 else f"{num_bytes / 2**30:,.2f} GiB"


def format_host(kinds: Iterable[LayerKind], width: int) -> list[str]:
    """Lines with the bytes of one micro batch on the host, for each kind of layer row by row; none where none are."""
    kinds = [kind for kind in kinds if kind.host_bytes]
    if not kinds:
        return []
    lines = [f"{'on the host, of these':<{width}}{'bytes':>17}"]
    for kind in kinds:
        lines += [f"{row.operation:<{width}}{format_size(row.host_bytes):>17}" for row in kind.rows if row.host_bytes]
        lines.append(f"{f'each of layers {kind.layers}':<{width}}{format_size(kind.host_bytes):>17}")
    total = sum(kind.num_layers * kind.host_bytes for kind in kinds)
    return [*lines, f"{'all layers, each micro batch':<{width}}{format_size(total):>17}"]

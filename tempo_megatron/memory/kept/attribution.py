"""Turns the storages that autograd holds into rows of the ledger: which operation keeps how much."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tempo_megatron.memory.kept.recorder import SavedStorage, Scopes
from tempo_megatron.settings.operations import ACTIVATION, LEDGER_ROWS, MASK, OPERATIONS, STACKS, LedgerRow

_BDA = OPERATIONS["dropout"].slots
_ROWS = {(row.module, row.is_scores): row for row in LEDGER_ROWS}
_MODULES = {row.module for row in LEDGER_ROWS}
_LAYER = re.compile(rf"^({'|'.join(STACKS)})\.layers\.(\d+)")


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation: the storages that it was the first to save."""

    operation: str
    num_bytes: int
    num_storages: int
    place: int = len(LEDGER_ROWS)
    """Where it stands in the table; an operation that LEDGER_ROWS does not know stands last."""
    is_in_layer: bool = True
    """Whether each layer has it, or the model once."""
    is_scores: bool = False
    """Whether it grows with s**2."""


@contextlib.contextmanager
def attribute_all(recorder: Scopes, model: Any) -> Iterator[None]:
    """Give names to what is no module: bias-dropout-add functions and attention masks."""
    with contextlib.ExitStack() as undo:
        for stack in STACKS:
            block: Any = getattr(model, stack, None)
            if block is None:
                continue
            hook = block.register_forward_pre_hook(
                lambda _, args, keywords: _claim_masks(recorder, keywords), with_kwargs=True
            )
            undo.callback(hook.remove)
            for place, layer in enumerate(block.layers):
                for name in _BDA:
                    if not isinstance(get_function := getattr(layer, name, None), (torch.nn.Module, type(None))):
                        setattr(layer, name, _scope_bda(recorder, f"{stack}.layers.{place}.{name}", get_function))
                        undo.callback(setattr, layer, name, get_function)
        yield


def _claim_masks(recorder: Scopes, keywords: dict[str, Any]) -> None:
    for name in ("attention_mask", "context_mask"):
        if (mask := keywords.get(name)) is not None:
            recorder.claim(mask, MASK)


def _scope_bda(recorder: Scopes, operation: str, get_function: Any) -> Any:
    return lambda training, fused: recorder.scope(operation, get_function(training, fused))


def find_layer(operation: str) -> tuple[str, int] | None:
    """(stack, place in its list of layers) of a qualified name; None of what is in no layer."""
    found = _LAYER.match(operation)
    return None if found is None else (found[1], int(found[2]))


def divide_by_layer(
    saved: Iterable[SavedStorage], config: Any
) -> tuple[dict[tuple[str, int], list[SavedStorage]], list[SavedStorage]]:
    """The storages of each layer, by its stack and its place there, and those of no layer.

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


def find_row(operation: str, shape: tuple[int, ...] = (), lengths: Iterable[int] = ()) -> LedgerRow:
    """The row of a qualified name; of a tensor whose last two sizes are both among `lengths` that of s*s tensors."""
    name = _LAYER.sub(r"\1.layers.0", operation)
    while name not in _MODULES:
        name = name.rpartition(".")[0]
    is_scores = len(shape) > 1 and set(shape[-2:]) <= set(lengths)
    return _ROWS.get((name, is_scores)) or _ROWS[name, False]


def sum_rows(saved: Iterable[SavedStorage], lengths: Iterable[int], activation: str) -> tuple[Row, ...]:
    """The rows of the table, in its order.

    Args:
        saved: of `Recorder.list_saved`.
        lengths: tokens per sample, of each stack.
        activation: the name of the MLP's.
    """
    totals: dict[LedgerRow, list[int]] = {}
    lengths = set(lengths)
    for storage in saved:
        total = totals.setdefault(find_row(storage.operation, storage.shape, lengths), [0, 0])
        total[0] += storage.num_bytes
        total[1] += 1
    has_two_stacks = len({row.stack for row in totals if row.stack}) > 1
    return tuple(
        Row(
            (f"{row.stack} " if has_two_stacks and row.stack else "") + name_row(row, activation),
            totals[row][0],
            totals[row][1],
            place,
            is_in_layer=row.is_in_layer,
            is_scores=row.is_scores,
        )
        for place, row in enumerate(LEDGER_ROWS)
        if row in totals
    )


def name_row(row: LedgerRow, activation: str) -> str:
    """Its title, or that of the MLP's activation."""
    return activation if row.title == ACTIVATION else row.title

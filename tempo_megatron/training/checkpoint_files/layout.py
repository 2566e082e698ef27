"""Describes how tensor parallelism divides each parameter, as the model's own sharded_state_dict says it.

Nothing is matched by name: the modules themselves describe how they are split (gated fc1, grouped attention).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Box:
    """A block of a parameter: where it starts in one rank's tensor and in the whole one, and its size."""

    local_start: Shape
    start: Shape
    size: Shape

    def take_rows(self, first: int, last: int) -> Box | None:
        """The part in rows [first, last) of the rank's tensor; None where it has none of them."""
        begin, end = max(self.local_start[0], first), min(self.local_start[0] + self.size[0], last)
        if begin >= end:
            return None
        moved = begin - self.local_start[0]
        start = (self.start[0] + moved, *self.start[1:])
        return Box((begin, *self.local_start[1:]), start, (end - begin, *self.size[1:]))

    def index(self, *, from_row: int = 0) -> tuple[slice, ...]:
        """Where it is in the rank's tensor without the first `from_row` rows."""
        rows, *columns = (slice(at, at + n) for at, n in zip(self.local_start, self.size, strict=True))
        return (slice(rows.start - from_row, rows.stop - from_row), *columns)


def overlap(ours: Box, theirs: Box) -> tuple[Box, Box] | None:
    """What both hold of the whole parameter, where each has it; None where nothing."""
    pairs = list(zip(ours.start, ours.size, theirs.start, theirs.size, strict=True))
    start = tuple(max(a, c) for a, _, c, _ in pairs)
    size = tuple(min(a + b, c + d) - max(a, c) for a, b, c, d in pairs)
    if min(size) <= 0:
        return None

    def place(box: Box) -> Box:
        local = (at + first - a for at, first, a in zip(box.local_start, start, box.start, strict=True))
        return Box(tuple(local), start, size)

    return place(ours), place(theirs)


@dataclasses.dataclass(frozen=True)
class Cut:
    """One rank's tensor `local_shape` of a parameter of `shape`, made of `boxes`."""

    local_shape: Shape
    shape: Shape
    boxes: tuple[Box, ...]

    def pack(self) -> tuple[Any, ...]:
        """The same in tuples, which torch.load reads without running code."""
        return self.local_shape, self.shape, tuple(dataclasses.astuple(box) for box in self.boxes)

    @classmethod
    def unpack(cls, packed: tuple[Any, ...]) -> Cut:
        local_shape, shape, boxes = packed
        return cls(local_shape, shape, tuple(Box(*box) for box in boxes))


def find_cuts(model: Any) -> dict[str, Cut]:
    """Name -> Cut of the parameters of this rank, also where ZeRO-3 has partitioned them.

    A parameter that sharded_state_dict leaves out, or that is no block-wise part of a whole, is not in the result.
    """
    with _stand_ins(model) as names:
        entries = list(nested_values(model.sharded_state_dict()))
        cuts: dict[str, Cut] = {}
        for entry in entries:
            tensor = getattr(entry, "data", None)
            name = names.get(id(tensor))
            if tensor is None or name is None or name in cuts:
                continue
            if (cut := _describe(entry, tensor)) is not None:
                cuts[name] = cut
    return cuts


@contextlib.contextmanager
def _stand_ins(model: Any) -> Iterator[dict[int, str]]:
    """Tensors without memory, of every parameter's full shape, in the parameters' places; id -> name."""
    stand_ins, names = {}, {}
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
        stand_ins[id(parameter)] = stand_in = torch.nn.Parameter(empty, requires_grad=False)
        names[id(stand_in)] = name
    places = [
        (module, key, own) for module in model.modules() for key, own in module._parameters.items() if own is not None
    ]
    try:
        for module, key, own in places:
            module._parameters[key] = stand_ins[id(own)]
        yield names
    finally:
        for module, key, own in places:
            module._parameters[key] = own


def _describe(entry: Any, stand_in: Tensor) -> Cut | None:
    """The Cut that a ShardedTensor, or the factory of several, of `stand_in` says."""
    parts = list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]
    boxes, shapes = [], set()
    for part in parts:
        if part.data is not stand_in and part.data._base is not stand_in:
            return None  # a copy: nothing says where its elements come from
        skipped = part.prepend_axis_num  # the layers, where Megatron stores those of all in one tensor
        local_start, rest = [], part.data.storage_offset()
        for stride in stand_in.stride():
            local_start.append(rest // stride)
            rest %= stride
        boxes.append(Box(tuple(local_start), tuple(part.global_offset[skipped:]), tuple(part.data.shape)))
        shapes.add(tuple(part.global_shape[skipped:]))
    if len(shapes) != 1 or sum(math.prod(box.size) for box in boxes) != stand_in.numel():
        return None
    return Cut(tuple(stand_in.shape), shapes.pop(), tuple(boxes))

"""Describes what a rank holds: its part of each parameter, and where that part lies in its optimizer's flat tensors.

A Cut says how tensor parallelism divides a parameter. It is read from the model's own sharded_state_dict: Megatron's
modules know how they are split (gated fc1, grouped attention), so that nothing is matched by name. A Fragment says
which elements of that part ZeRO gave to this rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
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
        """Returns the part in rows [first, last) of the rank's tensor, or None if there is none."""
        begin, end = max(self.local_start[0], first), min(self.local_start[0] + self.size[0], last)
        if begin >= end:
            return None
        moved = begin - self.local_start[0]
        start = (self.start[0] + moved, *self.start[1:])
        return Box((begin, *self.local_start[1:]), start, (end - begin, *self.size[1:]))

    def index(self, *, from_row: int = 0) -> tuple[slice, ...]:
        """Returns the slices of the block in the rank's tensor without its first `from_row` rows."""
        rows, *columns = (slice(at, at + n) for at, n in zip(self.local_start, self.size, strict=True))
        return (slice(rows.start - from_row, rows.stop - from_row), *columns)


def overlap(ours: Box, theirs: Box) -> tuple[Box, Box] | None:
    """Returns the intersection of two blocks of a parameter, placed in each rank's tensor, or None if it is empty."""
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
        """Returns the same as tuples, which torch.load reads without running code."""
        return self.local_shape, self.shape, tuple(dataclasses.astuple(box) for box in self.boxes)

    @classmethod
    def unpack(cls, packed: tuple[Any, ...]) -> Cut:
        local_shape, shape, boxes = packed
        return cls(local_shape, shape, tuple(Box(*box) for box in boxes))


def get_cuts(model: Any) -> dict[str, Cut]:
    """Returns the Cut of each parameter of this rank by name, also under ZeRO-3.

    It leaves out a parameter that sharded_state_dict leaves out, or that is not made of blocks of a whole.
    """
    cuts: dict[str, Cut] = {}
    with _stand_ins(model) as names:
        for entry in nested_values(model.sharded_state_dict()):
            tensor = getattr(entry, "data", None)
            name = names.get(id(tensor))
            if tensor is not None and name is not None and name not in cuts and (cut := _describe(entry, tensor)):
                cuts[name] = cut
    return cuts


@contextlib.contextmanager
def _stand_ins(model: Any) -> Iterator[dict[int, str]]:
    """Puts a meta tensor of the full shape in place of every parameter; gives the names by the meta tensors' ids."""
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
    """Returns the Cut that Megatron's ShardedTensor of `stand_in`, or its factory of several, describes."""
    parts = list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]
    boxes, shapes = [], set()
    for part in parts:
        if part.data is not stand_in and part.data._base is not stand_in:
            return None  # a copy, which does not tell where its elements come from
        skipped = part.prepend_axis_num  # Megatron may prepend an axis that counts the layers
        local_start, rest = [], part.data.storage_offset()
        for stride in stand_in.stride():
            local_start.append(rest // stride)
            rest %= stride
        boxes.append(Box(tuple(local_start), tuple(part.global_offset[skipped:]), tuple(part.data.shape)))
        shapes.add(tuple(part.global_shape[skipped:]))
    if len(shapes) != 1 or sum(math.prod(box.size) for box in boxes) != stand_in.numel():
        return None
    return Cut(tuple(stand_in.shape), shapes.pop(), tuple(boxes))


# AdamW's states that are as large as the weights.
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Elements [first, last) of a flattened parameter. They begin at element `start` of flat tensor number `group`."""

    name: str
    group: int
    start: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first


@dataclasses.dataclass(frozen=True)
class Partition:
    """One rank's float32 master weights (`groups`, flat tensors), the fragments in them, and their optimizer."""

    groups: list[Tensor]
    fragments: tuple[Fragment, ...]
    optimizer: torch.optim.Optimizer

    def pack(self) -> list[tuple[Any, ...]]:
        """Returns the fragments as tuples, which torch.load reads without running code."""
        return [dataclasses.astuple(fragment) for fragment in self.fragments]


def get_partition(engine: Any) -> Partition:
    """Returns the Partition of a DeepSpeedEngine of any ZeRO stage; its tensors are the optimizer's own."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    fragments = []
    if stage == 0:
        groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        whole = [Fragment(names[id(group)], number, 0, 0, group.numel()) for number, group in enumerate(groups)]
        return Partition(groups, tuple(whole), optimizer)
    if stage == 3:
        rank = dist.get_rank(optimizer.dp_process_group)
        for name, parameter in engine.module.named_parameters():
            # Equal parts of each parameter, smaller or empty on the last ranks.
            number, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            first, last = rank * size, min((rank + 1) * size, parameter.ds_numel)
            if first < last:
                fragments.append(Fragment(name, number, start, first, last))
        return Partition(list(optimizer.fp32_partitioned_groups_flat), tuple(fragments), optimizer.optimizer)
    if hasattr(optimizer, "bf16_groups"):  # DeepSpeed's BF16_Optimizer
        parameters, groups, offsets = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, None
    else:
        parameters, groups = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
        offsets = getattr(optimizer, "round_robin_bit16_offsets", None)  # versions that pad between parameters
    for number, (group, members) in enumerate(zip(groups, parameters, strict=True)):
        begin = dist.get_rank(optimizer.real_dp_process_group[number]) * group.numel()
        starts = offsets[number] if offsets is not None else accumulate((p.numel() for p in members), initial=0)
        for parameter, start in zip(members, starts, strict=False):
            first, last = max(start, begin), min(start + parameter.numel(), begin + group.numel())
            if first < last:
                name = names[id(parameter)]
                fragments.append(Fragment(name, number, first - begin, first - start, last - start))
    return Partition(list(groups), tuple(fragments), optimizer.optimizer)

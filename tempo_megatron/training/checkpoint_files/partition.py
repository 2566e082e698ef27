"""Describes what one rank's optimizer holds: flat tensors, and which elements of which parameter lie where."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Of AdamW, beside "step": as large as the weights.
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Elements [first, last) of a flattened parameter, in the flat tensor number `group` from element `start` on."""

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
    """The float32 master weights of one rank, `groups`, what lies where in them, and the optimizer over them."""

    groups: list[Tensor]
    fragments: tuple[Fragment, ...]
    optimizer: torch.optim.Optimizer

    def pack(self) -> list[tuple[Any, ...]]:
        """The fragments in tuples, which torch.load reads without running code."""
        return [dataclasses.astuple(fragment) for fragment in self.fragments]


def find_partition(engine: Any) -> Partition:
    """The Partition of a DeepSpeedEngine of any ZeRO stage; its tensors are the optimizer's own."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    if stage == 0:
        groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        whole = [Fragment(names[id(group)], number, 0, 0, group.numel()) for number, group in enumerate(groups)]
        return Partition(groups, tuple(whole), optimizer)
    if stage == 3:
        divided = _find_fragments_of_stage_3(engine.module, optimizer)
        return Partition(list(optimizer.fp32_partitioned_groups_flat), tuple(divided), optimizer.optimizer)
    if hasattr(optimizer, "bf16_groups"):  # its BF16_Optimizer
        parameters, groups, offsets = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, None
    else:
        parameters, groups = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
        offsets = getattr(optimizer, "round_robin_bit16_offsets", None)  # of versions that pad between parameters
    fragments = []
    for number, (group, members) in enumerate(zip(groups, parameters, strict=True)):
        begin = dist.get_rank(optimizer.real_dp_process_group[number]) * group.numel()
        starts = offsets[number] if offsets is not None else _add_up(members)
        for parameter, start in zip(members, starts, strict=True):
            first, last = max(start, begin), min(start + parameter.numel(), begin + group.numel())
            if first < last:
                name = names[id(parameter)]
                fragments.append(Fragment(name, number, first - begin, first - start, last - start))
    return Partition(list(groups), tuple(fragments), optimizer.optimizer)


def _find_fragments_of_stage_3(module: torch.nn.Module, optimizer: Any) -> Iterator[Fragment]:
    """Every rank holds an equal part of each parameter, the last ones less or nothing."""
    rank = dist.get_rank(optimizer.dp_process_group)
    parameter: Any
    for name, parameter in module.named_parameters():
        group, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        first, last = rank * size, min((rank + 1) * size, parameter.ds_numel)
        if first < last:
            yield Fragment(name, group, start, first, last)


def _add_up(parameters: list[Tensor]) -> Iterator[int]:
    total = 0
    for parameter in parameters:
        yield total
        total += parameter.numel()

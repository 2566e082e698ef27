"""Bytes that stay in memory between an operation's forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gpu.implementations import Implementation
from gpu.operation import Operation
from tempo_kernels.recompute import drop


class Kept(NamedTuple):
    kept_bytes: int
    """Of the distinct storages that autograd holds or the next linear keeps, without parameters."""
    allocated_bytes: int | None
    """By how much the allocator's figure grew: kept_bytes and outputs that no linear keeps. None without a GPU."""
    peak_bytes: int | None
    """The most that it grew during forward and backward, gradients included."""


def measure(
    operation: Operation, implementation: Implementation, tensors: Sequence[Tensor], drops_output: bool
) -> Kept:
    """What `implementation` keeps; drops_output: its output goes after the next linear used it, as in `recompute`."""
    leaves = implementation.leaves(tensors)
    _run(operation, implementation, leaves, drops_output)  # whatever compiles, counts or fills a cache does so here
    is_cuda = leaves[0].is_cuda
    before = torch.cuda.memory_allocated(leaves[0].device) if is_cuda else 0
    storages, outputs = _run(operation, implementation, leaves, drops_output)
    allocated = torch.cuda.memory_allocated(leaves[0].device) - before if is_cuda else None
    kept_bytes = sum(storage.nbytes() for storage in storages.values())
    del storages, outputs
    return Kept(kept_bytes, allocated, _peak_bytes(operation, implementation, leaves) if is_cuda else None)


def _run(
    operation: Operation, implementation: Implementation, leaves: Sequence[Tensor], drops_output: bool
) -> tuple[dict[int, torch.UntypedStorage], tuple[Tensor, ...]]:
    """The distinct storages that are kept, and what holds the graph: the outputs, or a linear of the dropped one."""
    kept: dict[int, torch.UntypedStorage] = {}
    parameters = {leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.dim() == 1}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    inputs = _made_for_this_operation(leaves)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = implementation.outputs(inputs)
    del inputs
    if operation.kept_output is None:
        return kept, outputs
    y = outputs[operation.kept_output]
    if not drops_output:
        kept[y.untyped_storage().data_ptr()] = y.untyped_storage()
        return kept, outputs
    out = F.linear(y, y.new_ones(1, y.size(-1), requires_grad=True))
    drop(y, after=out)
    memory = StorageWeakRef(y.untyped_storage())
    del y, outputs
    assert memory.expired(), f"{operation.name}: the output is still held"
    return kept, (out,)


def _made_for_this_operation(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Activations that nobody else holds, so that the allocator shows which of them stay; parameters as they are."""
    return [leaf if leaf.dim() == 1 else leaf.clone() for leaf in leaves]


def _peak_bytes(operation: Operation, implementation: Implementation, leaves: Sequence[Tensor]) -> int:
    device = leaves[0].device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    outputs = implementation.outputs(_made_for_this_operation(leaves))
    torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs])
    return torch.cuda.max_memory_allocated(device) - before

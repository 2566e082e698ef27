"""Which kernels an operation runs, and how long each takes: for improving the worst ratio."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from gpu import implementations
from gpu.operation import Operation, Sizes

CALLS = 10


def tables(operation: Operation, sizes: Sizes, device: torch.device | str) -> Iterator[tuple[str, str]]:
    """(implementation, table of its kernels over some forward and backward passes)."""
    tensors = operation.tensors(sizes, device)
    baselines, _ = implementations.comparable(operation, sizes, device)
    for one in [*implementations.tempo(operation, sizes), implementations.eager(operation, sizes), *baselines]:
        leaves = one.leaves(tensors)
        grads = [torch.randn_like(output) for output in one.outputs(leaves)]
        is_cuda = leaves[0].is_cuda
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        # acc_events changes nothing in a single cycle; without it torch 2.10 to 2.12 warns, as if there were more.
        with profile(activities=activities, acc_events=True) as recorded:
            for _ in range(CALLS):
                torch.autograd.grad(one.outputs(leaves), leaves, grads)
            if is_cuda:
                torch.cuda.synchronize()
        order = "self_device_time_total" if is_cuda else "self_cpu_time_total"
        yield one.name, recorded.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=70)

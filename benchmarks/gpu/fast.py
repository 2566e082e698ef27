"""Is it fast? Each operation beside torch eager, torch.compile and Liger, attention beside torch's, the loss head.

Operations run forward and backward at 8192 tokens and h 4096 in bfloat16. Their milliseconds stand beside those of a
copy of the fewest bytes that both must move.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from gpu import rivals, timing
from gpu.operation import Operation, Sizes
from gpu.operations import OPERATIONS
from gpu.steps import Step

LARGE = Sizes(s=2048, b=4, h=4096, ffn=16384, gated_ffn=11008, p=0.1, dtype=torch.bfloat16)
TINY = Sizes(s=4, b=2, h=64, ffn=128, gated_ffn=48, p=0.1, dtype=torch.bfloat16)


def measure_operation(operation: Operation, clock: Any, device: str, sizes: Sizes) -> dict[str, Any]:
    """Times forward and backward of an operation's forms and of all others, in turn, beside a copy."""
    found, left_out = rivals.comparable(operation, sizes, device)
    compared = [*rivals.tempo(operation, sizes), rivals.eager(operation, sizes), *found]
    width, tensors = operation.width_of(sizes), operation.tensors(sizes, device)
    num_sets = timing.count_sets(sum(t.nbytes for t in tensors), device)
    sets = [tensors, *(operation.tensors(sizes, device) for _ in range(num_sets - 1))]
    ideal = {
        form.keeps: sum(t.num_bytes(sizes, width) for t in (form.forward, form.backward)) for form in operation.forms
    }
    copies = [timing.copy_pass(size, num_sets, device, f"copy {keeps}") for keeps, size in ideal.items()]
    measured = timing.measure([*copies, *(one.time(sets) for one in compared)], clock)
    ms = {name: each.ms for name, each in measured.items()}
    texts = []
    for keeps in ideal:
        others = ", ".join(f"{one.name} {ms[one.name] / ms[keeps]:.2f}" for one in compared if one.name not in ideal)
        texts.append(f"keeping {keeps} {ms[keeps]:.3f} ms, {ms[f'copy {keeps}'] / ms[keeps]:.2f} of copy, {others}")
    return {"answer": "; ".join(texts), "ms": ms, "left_out": left_out, "waits_for_gpu": sorted(clock.waits)}


def list_steps(device: str) -> Iterator[Step]:
    """Yields the steps of operations, most important first."""
    is_gpu = device == "cuda"
    clock: Any = timing.CudaClock() if is_gpu else timing.HostClock()
    for shape in rivals.ATTENTION if is_gpu else [rivals.AttentionShape(64, 2, 2, 32)]:
        run = functools.partial(rivals.measure_attention, clock, device, shape)
        yield Step(f"attention, s {shape.s}, d {shape.d}", "fast", 8.0, run)
    for operation in OPERATIONS:
        run = functools.partial(measure_operation, operation, clock, device, LARGE if is_gpu else TINY)
        yield Step(operation.name, "fast", 15.0, run)
    for head in rivals.HEADS if is_gpu else [rivals.HeadShape(16, 2, 32, 96)]:
        name = "log probabilities" if head.log_probs else "loss head"
        run = functools.partial(rivals.measure_head, clock, device, head)
        yield Step(f"{name}, v {head.v}", "fast", 15.0, run)

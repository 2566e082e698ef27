"""Measures the host's time for an operation's forward and backward on a GPU, in units of an empty autograd.Function.

A GPU waits for the host if a kernel of a few microseconds takes longer to launch than to run. This measures the launch
without a GPU (fake_gpu.py): tensors of 512 elements, real compiled kernels, Triton's real driver, and a libcuda that
does nothing.

The time includes checks, autograd's bookkeeping, allocations, Triton's choice of the compiled kernel, the reading of
its arguments in C, and torch's own small operations in between, which cost about as much on a CPU as their launches. It
does not include the CUDA runtime and driver (about 2 us per launch, which nobody can avoid), CUDA's allocator, and
waiting for the GPU.

The empty autograd.Function takes one tensor and returns an uninitialized one in forward and in backward. Every round
times each operation and the empty function in turn; the result is the median of the rounds' ratios.

    python benchmarks/launch_overhead.py --label after
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from fake_gpu import fake_gpu
from measurements import RESULTS, describe_cpu_run, record_measurement
from torch import Tensor

from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import swiglu
from tempo_kernels.linear_cross_entropy import linear_cross_entropy
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.squared_relu import squared_relu

CALLS_PER_ROUND = 20


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


def list_steps() -> dict[str, Callable[[], Any]]:
    """Lists one forward and backward of each operation, with the empty function first."""

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()

    x, weight, bias, residual = make(4, 2, 64), make(64), make(64), make(4, 2, 64)
    q, k, v = make(8, 1, 1, 64), make(8, 1, 1, 64), make(8, 1, 1, 64)  # described to forward, as most are
    vocabulary, labels = make(32, 64), torch.arange(8, dtype=torch.int64).view(2, 4)
    operations = {
        "empty": (lambda: _Empty.apply(x), (x,)),
        "layer_norm": (lambda: layer_norm(x, weight, bias), (x, weight, bias)),
        "layer_norm, keep input": (lambda: layer_norm(x, weight, bias, keep="input"), (x, weight, bias)),
        "rms_norm": (lambda: rms_norm(x, weight), (x, weight)),
        "gelu": (lambda: gelu(x, bias), (x, bias)),
        "gelu, keep input": (lambda: gelu(x, bias, keep="input"), (x, bias)),
        "swiglu": (lambda: swiglu(x), (x,)),
        "squared_relu": (lambda: squared_relu(x), (x,)),
        "bias_dropout_add": (
            lambda: bias_dropout_add(x, bias, residual, p=0.1, key=1 << 40),
            (x, bias, residual),
        ),
        "attention": (
            lambda: attention(q, k, v, causal=True, softmax_scale=0.125, dropout_p=0.1, dropout_key=1 << 40),
            (q, k, v),
        ),
        "linear_cross_entropy": (lambda: linear_cross_entropy(x, vocabulary, labels), (x, vocabulary)),
    }

    def make_step(run: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        grad = torch.ones_like(run())
        return lambda: torch.autograd.grad(run(), inputs, grad)

    return {name: make_step(*operation) for name, operation in operations.items()}


def time_step(step: Callable[[], Any]) -> float:
    """Returns the processor's seconds for one call, without time that other processes take."""
    start = time.thread_time()
    for _ in range(CALLS_PER_ROUND):
        step()
    return (time.thread_time() - start) / CALLS_PER_ROUND


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns units per operation, the unit in microseconds, and launches per forward and backward."""
    torch.set_num_threads(1)
    with fake_gpu() as count_launches:
        steps = list_steps()
        launches = {}
        for name, step in steps.items():
            step()
            before = count_launches()
            step()
            launches[name] = count_launches() - before
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(args.rounds):
            for name, step in steps.items():
                times[name].append(time_step(step))
    empty = times.pop("empty")
    del launches["empty"]
    return {
        "benchmark": "launch_overhead",
        "label": args.label,
        "units": {name: round(_find_median_ratio(found, empty), 2) for name, found in times.items()},
        "unit_us": round(statistics.median(empty) * 1e6, 1),
        "launches": launches,
        "dtype": "bf16",
        "p": 0.1,
        "load": round(os.getloadavg()[0], 1),
        **describe_cpu_run(),
    }


def _find_median_ratio(times: list[float], unit: list[float]) -> float:
    return statistics.median(found / one for found, one in zip(times, unit, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="", help="what is measured, for the record")
    record_measurement(parser, measure, RESULTS / "cpu" / "launch_overhead.jsonl", rounds=60)


if __name__ == "__main__":
    main()

"""Measures the rates of a GPU that the planner reckons with, and that files of configs/gpu have.

Each is the median of rounds, after a warm-up; the calls take turns over their operands, which together are larger than
a cache.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from tempo_megatron.memory.plan.gpu import Gpu, HostLink, find_chip

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROUNDS = 7
# Rows (tokens), columns and inner size of a layer's linears in units of the hidden size: qkv, projection, fc1, fc2.
_PRODUCTS = ((2, 3, 1), (2, 1, 1), (2, 4, 1), (2, 1, 4))
_COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_OPERAND_SETS = 3
_LINK_BYTES = 1 << 28


def measure_gpu(device: str, hidden_size: int, round_ms: float) -> Gpu:
    """The rates of the current device.

    Args:
        device: "cuda" or "cpu".
        hidden_size: h of the layer whose four linears' products are timed, on 2 h tokens.
        round_ms: how long a round is at least.
    """
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    title = f"{platform.machine()} CPU, {num_threads} thread{'s' if num_threads > 1 else ''}"
    return Gpu(
        title=torch.cuda.get_device_name() if device == "cuda" else title,
        calibrated=True,
        source=f"tempo-megatron bench --calibrate --hidden-size {hidden_size}, torch {torch.__version__}, "
        f"{time.strftime('%Y-%m-%d')}",
        matmul_flops_per_second={
            name: _measure_products(device, dtype, hidden_size, round_ms) for name, dtype in _DTYPES.items()
        },
        bytes_per_second=_measure_copies(device, round_ms),
        host_link=_measure_host_link(round_ms) if device == "cuda" else None,
        chip=find_chip() if device == "cuda" else None,
    )


def _measure_products(device: str, dtype: torch.dtype, hidden_size: int, round_ms: float) -> float:
    """FLOPs per second of one layer's four forward products together."""
    calls: list[Callable[[], Tensor]] = []
    flops = 0
    for rows, columns, inner in _PRODUCTS:
        m, n, k = rows * hidden_size, columns * hidden_size, inner * hidden_size
        flops += 2 * m * n * k
        x, w = (torch.randn(shape, device=device, dtype=torch.float32).to(dtype) for shape in ((m, k), (n, k)))
        calls.append(lambda x=x, w=w: x @ w.t())  # type: ignore[misc]
    return flops / _time(f"products of {dtype}", calls, round_ms)


def _measure_copies(device: str, round_ms: float) -> float:
    """Bytes per second, read and written, of a tensor times a number into another."""
    num_elements = _COPIED_BYTES[device] // 2
    sources = [torch.randn(num_elements, device=device, dtype=torch.bfloat16) for _ in range(_OPERAND_SETS)]
    out = torch.empty_like(sources[0])
    calls: list[Callable[[], Tensor]] = [lambda x=x: torch.mul(x, 0.5, out=out) for x in sources]  # type: ignore[misc]
    return 2 * 2 * num_elements * _OPERAND_SETS / _time("memory", calls, round_ms)


def _measure_host_link(round_ms: float) -> HostLink:
    """Bytes per second of copies between pinned memory and the GPU, each direction alone, while other GPUs rest.

    How many GPUs share an uplink cannot be seen from one GPU: the file says 1, and its source says so.
    """
    pinned = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cuda")
    to_host = _time("copies to the host", [lambda: pinned.copy_(on_gpu, non_blocking=True)], round_ms)
    to_gpu = _time("copies to the GPU", [lambda: on_gpu.copy_(pinned, non_blocking=True)], round_ms)
    return HostLink(
        title="measured",
        to_host_bytes_per_second=_LINK_BYTES / to_host,
        to_gpu_bytes_per_second=_LINK_BYTES / to_gpu,
        gpus_per_uplink=1,
        source="pinned memory, one GPU copying; set gpus_per_uplink to the GPUs behind one switch (nvidia-smi topo -m)",
    )


def _time(what: str, calls: Sequence[Callable[[], Tensor]], round_ms: float) -> float:
    """Seconds that all calls take one after the other: the median of rounds, each with a warm-up of its own."""
    if sys.stderr.isatty():
        print(f"measuring {what}", file=sys.stderr, flush=True)
    timer = Timer("for call in calls: call()", globals={"calls": calls}, num_threads=torch.get_num_threads())
    repeats = max(1, round(round_ms / 1e3 / max(timer.timeit(1).median, 1e-6)))
    return statistics.median(timer.timeit(repeats).median for _ in range(_ROUNDS))

"""Moves what layers keep for backward to pinned host memory and back before the backward needs it: `Offload` finds it,
`Engine` moves it in the right order, on a `CudaDevice` or, for tests and on a CPU, a `ThreadDevice`."""

from tempo_kernels.offload.device import CudaDevice, Device, Direction, ThreadDevice
from tempo_kernels.offload.engine import Engine
from tempo_kernels.offload.layers import INPUT, MIN_BYTES, Moves, Offload, move_all, move_nothing
from tempo_kernels.offload.pool import count_ranks_of_host, get_free_host_bytes

__all__ = [
    "INPUT", "MIN_BYTES", "CudaDevice", "Device", "Direction", "Engine", "Moves", "Offload", "ThreadDevice",
    "count_ranks_of_host", "get_free_host_bytes", "move_all", "move_nothing",
]  # fmt: skip

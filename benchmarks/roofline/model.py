"""From instructions to time: how many programs share a multiprocessor, and what of a copy's bandwidth a pass reaches.

Three things can bound a pass. The longer of the last two does not hide wholly behind the first, nor that behind it:
(memory**N + max(issue, latency)**N)**(1/N).

memory   Its bytes at the bandwidth of a large copy, and what the last round loses: programs come in rounds of as many
         as run at once, and where the last has few, a program's own time is longer than the copying of their bytes.
issue    A scheduler of a multiprocessor issues one instruction of a warp per cycle; a pipe narrower than a warp takes
         several cycles for each. What a program does before and behind its loop counts too.
latency  The rounds, each as long as a program alone: it starts, waits for its parameters and first tile, and on every
         way through its loop for barriers and, unless copies run ahead of it, for memory.

Added to that are launches behind the pass, the partial sums that it writes and they read, at the bandwidth of a copy,
and, where the last program of a strip adds the partial sums up itself, the time that it alone takes: for what follows
one after another, and its reads from the L2 cache at a single multiprocessor's rate.

What is chosen and not measured is in Chosen. The model is evaluated for three choices, and the slow and the fast one
are the error bar of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from roofline.launches import Launch
from roofline.machine_code import Body

L2_BYTES_PER_CYCLE = 64  # of one multiprocessor
WARP, SCHEDULERS = 32, 4
REGISTERS, PROGRAMS, RESERVED_SHARED_BYTES = 65536, 32, 1024


class Chosen(NamedTuple):
    """What no document says for certain."""

    overlap: float
    """N."""
    latency_cycles: float
    """From a load to its data from memory. Idle, an H100 takes 480 cycles (Luo et al., arXiv 2402.13499); QuACK's
    authors reckon with 400 ns, which is 730."""
    barrier_cycles: float
    start_cycles: float
    """Until a program's first instruction has its arguments."""
    launch_us: float
    """From the end of a kernel to the start of the next on the same stream."""
    last_us: float
    """What follows one after another in the last program of a strip: a barrier and a fence, an atomic addition and a
    first read that each go to the L2 cache and back, and the last store."""


CENTRAL = Chosen(3.3, 730, 30, 500, 2.6, 1.0)
SLOW = Chosen(2.0, 1000, 60, 1000, 4.0, 2.0)
FAST = Chosen(8.0, 480, 20, 300, 1.5, 0.5)


class Architecture(NamedTuple):
    """What the CUDA programming guide says of a compute capability, per multiprocessor."""

    warps: int
    shared_bytes: int
    cycles: dict[str, float]
    """For one instruction of a warp, by pipe; where nothing is said, 1."""
    product_flops: int
    """Dense 16-bit multiply-adds count as two, per cycle."""


ARCHITECTURES = {
    80: Architecture(64, 164 << 10, {"fma": 2, "imad": 2, "alu": 2, "xu": 8, "memory": 4}, 2048),
    90: Architecture(64, 228 << 10, {"imad": 2, "alu": 2, "xu": 8, "memory": 4}, 4096),
    100: Architecture(64, 228 << 10, {"imad": 2, "alu": 2, "xu": 8, "memory": 4}, 8192),
}


class Device(NamedTuple):
    capability: int
    multiprocessors: int
    clock_hz: float
    """The one at which the data sheet's dense 16-bit FLOP/s are reckoned: 989.4e12 on an H100 SXM."""
    copy_bytes_per_s: float
    """Of a large copy, read and write together: nine tenths of the data sheet's 3.35, 4.8 and 8 TB/s of an H100 SXM, an
    H200 and a B200. QuACK's authors measured that share on an H100 (figures.POINTWISE); on a GH200 BabelStream copies
    2.98 TB/s (issue 194 of UoB-HPC/BabelStream). Of an A100 80GB's 2.04 TB/s a read has 88 % (NVIDIA's forum, 339083),
    and 1.7 TB/s allows for writes. Nobody's measurement stands behind the H200, the B200 and that allowance."""


DEVICES = {
    "A100": Device(80, 108, 1.41e9, 1.7e12),
    "H100": Device(90, 132, 1.83e9, 3.0e12),
    "H200": Device(90, 132, 1.83e9, 4.3e12),
    "B200": Device(100, 148, 1.85e9, 7.2e12),
}


class Occupancy(NamedTuple):
    programs: int
    """That share a multiprocessor."""
    limit: str
    register_share: float
    """Of the register file that those programs hold."""


class Time(NamedTuple):
    """Seconds of a pass by what takes them, and their sum as the module's docstring joins them."""

    memory: float
    issue: float
    latency: float
    tail: float
    total: float

    @property
    def bound(self) -> str:
        """What takes longest of the pass itself."""
        return max(("memory", "issue", "latency"), key=lambda name: getattr(self, name))


def find_occupancy(registers: int, num_warps: int, shared_bytes: int, capability: int) -> Occupancy:
    """Registers are given out to a warp in units of 256, shared memory with 1 KiB for the system."""
    architecture = ARCHITECTURES[capability]
    per_program = -(-max(registers, 1) // 8) * 8 * WARP * num_warps
    limits = {
        "registers": REGISTERS // per_program,
        "warps": architecture.warps // num_warps,
        "shared memory": architecture.shared_bytes // (shared_bytes + RESERVED_SHARED_BYTES),
        "programs": PROGRAMS,
    }
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limit], limit, per_program * limits[limit] / REGISTERS)


def find_cycles(body: Body, capability: int) -> tuple[float, str]:
    """Cycles of one scheduler for one warp on one way through the body, and what they go to: a pipe, or issuing."""
    cycles = ARCHITECTURES[capability].cycles
    by_pipe = {pipe: number * cycles.get(pipe, 1.0) for pipe, number in body.by_pipe.items() if pipe != "tensor"}
    by_pipe = {"issue": float(body.issued), **by_pipe}
    busiest = max(by_pipe, key=lambda name: by_pipe[name])
    return by_pipe[busiest], busiest


def find_elements(launch: Launch, body: Body, num_elements: int, bytes_each: int) -> float:
    """How many elements a thread computes on one way through the body.

    Outside of a loop that is the tensor over the threads; in one, what it stores, or loads where it stores nothing.
    """
    if not body.is_loop:
        return num_elements / (launch.num_programs * launch.num_warps * WARP)
    return (body.stored_bytes or body.loaded_bytes) / bytes_each


def find_time(one: Mapping[str, Any], device: Device, chosen: Chosen) -> Time:
    """Of the pass that a record of static_roofline.py describes."""
    clock, programs, slots = device.clock_hz, one["programs"], device.multiprocessors * one["programs_per_sm"]
    busy = (one["around"] + one["trips"] * one["cycles"]) * one["warps"] / SCHEDULERS
    waits = one["trips"] * (one["waits"] * chosen.latency_cycles + one["barriers"] * chosen.barrier_cycles)
    program_s = (chosen.start_cycles + chosen.latency_cycles + busy + waits) / clock
    rounds = math.ceil(programs / slots)
    copy_s = one["num_bytes"] / device.copy_bytes_per_s
    last_s = copy_s * (1 - (rounds - 1) * slots / programs)
    memory_s = copy_s + (max(0.0, program_s - last_s) if rounds > 1 else 0.0)
    issue_s, latency_s = programs * busy / (device.multiprocessors * clock), rounds * program_s
    joined = (memory_s**chosen.overlap + max(issue_s, latency_s) ** chosen.overlap) ** (1 / chosen.overlap)
    tail_s = one["tail_launches"] * chosen.launch_us * 1e-6 + one["tail_bytes"] / device.copy_bytes_per_s
    if one["last_bytes"]:
        tail_s += chosen.last_us * 1e-6 + one["last_bytes"] / (L2_BYTES_PER_CYCLE * clock)
    return Time(memory_s, issue_s, latency_s, tail_s, joined + tail_s)


def find_share_of_copy(one: Mapping[str, Any], device: Device, chosen: Chosen = CENTRAL) -> float:
    """The time of a copy of the bytes that the pass must move, as a share of the pass's."""
    return one["num_bytes"] / device.copy_bytes_per_s / find_time(one, device, chosen).total

"""From instructions to time: how many programs share a multiprocessor, and what share of its copy bandwidth is left.

A scheduler of a multiprocessor issues one instruction of a warp per cycle; a pipe narrower than a warp takes several
cycles for each. A pass lasts as long as its memory traffic or its busiest pipe, whichever is longer, and somewhat more
where both are near: (memory**N + issue**N)**(1/N). N is chosen, not measured.

Added to that are launches behind the pass, the partial sums that it writes and they read, at the bandwidth of a copy,
and, where the last program of a strip adds the partial sums up itself, the time that it alone takes: LAST_US for what
follows one after another, and its reads from the L2 cache at a single multiprocessor's rate. LAST_US is reckoned, not
measured: a barrier and a fence (about 700 cycles), an atomic addition and a first read that each go to the L2 cache and
back (about 600 and 300), and the last store.
"""

from __future__ import annotations

from typing import NamedTuple

from roofline.launches import Launch
from roofline.machine_code import Body

OVERLAP = 3.3
LAUNCH_US = 2.6
LAST_US = 1.0
L2_BYTES_PER_CYCLE = 64  # of one multiprocessor
WARP, SCHEDULERS = 32, 4
REGISTERS, PROGRAMS, RESERVED_SHARED_BYTES = 65536, 32, 1024


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
    copy_bytes_per_s: float
    """Of a large copy, read and write together."""


DEVICES = {
    "A100": Device(80, 108, 1.41e9, 1.7e12),
    "H100": Device(90, 132, 1.755e9, 3.0e12),
    "H200": Device(90, 132, 1.755e9, 4.3e12),
    "B200": Device(100, 148, 1.85e9, 7.2e12),
}


class Occupancy(NamedTuple):
    programs: int
    """That share a multiprocessor."""
    limit: str
    register_share: float
    """Of the register file that those programs hold."""


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


def find_share_of_copy(
    cycles_per_element: float,
    num_elements: int,
    num_bytes: int,
    device: Device,
    launches: int = 0,
    tail_bytes: int = 0,
    last_bytes: int = 0,
) -> float:
    """The time of a copy of num_bytes as a share of this pass's, with so many launches more behind it, and the last
    program's reading of last_bytes."""
    lanes = device.multiprocessors * SCHEDULERS * WARP
    issue_s = cycles_per_element * num_elements / (lanes * device.clock_hz)
    memory_s = num_bytes / device.copy_bytes_per_s
    pass_s = (memory_s**OVERLAP + issue_s**OVERLAP) ** (1 / OVERLAP)
    tail_s = launches * LAUNCH_US * 1e-6 + tail_bytes / device.copy_bytes_per_s
    if last_bytes:
        tail_s += LAST_US * 1e-6 + last_bytes / (L2_BYTES_PER_CYCLE * device.clock_hz)
    return memory_s / (pass_s + tail_s)

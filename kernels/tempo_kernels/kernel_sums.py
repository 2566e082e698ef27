"""Sums over rows inside the kernel that computes the rows: the program that finishes last adds up all partial sums.

A separate reduction and rounding after backward would cost two more launches. Instead every program writes the sums
over its own rows to its row of `partial` and then increments a counter. The last program of a strip of columns finds
all rows of partial in the L2 cache, adds them up in the order of the rows, whichever program it is, and rounds once:
the same bits every time. A strip is narrow, so that many programs finish at once and none reads more than a few KiB.

A kernel whose programs each have whole rows has no strips: all its programs end at about the same time, and the last
would add up everything alone. There a second launch adds up strips (`plan_sums`). Programs of the first that waited for
the others would spare it, but CUDA does not promise that those they wait for ever start.

The counter's atomic addition releases this program's row and acquires the others'; the barrier before it makes the
program's other threads store first. The last program resets the counter to 0 for the next launch. Kernels on one stream
run one after the other, so counters are per stream. Replays of a CUDA graph may run on any stream, so a captured launch
gets counters of its own, which the graph zeroes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.kernel_launch import Plan, count_multiprocessors, launch

STRIP_COLUMNS = 128
NUM_COUNTERS = 4096
ROWS_AT_ONCE = 8

Sums = tuple[Tensor | None, Tensor | None, Tensor | None]
"""partial, counters and the sums themselves, as the kernels take them."""

_counters: dict[tuple[torch.device, int], Tensor] = {}


@triton.jit
def store_sums(partial_ptr, sums, chunk, column, num_columns):
    """Stores sums [n] in row `chunk` of partial."""
    tl.store(partial_ptr + chunk.to(tl.int64) * num_columns + column, sums, mask=column < num_columns)


@triton.jit
def is_last(counter_ptr, num_chunks):
    """Whether this is the last of num_chunks programs to call this; if so, everything that the others stored before is
    visible."""
    tl.debug_barrier()
    found = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_chunks - 1
    if found:
        tl.store(counter_ptr, 0)
    return found


@triton.jit
def add_up(
    partial_ptr, out_ptr, column, num_chunks, stride, num_columns, BLOCK_ROWS: tl.constexpr = ROWS_AT_ONCE
):  # fmt: skip
    """Sums some columns [n] of partial, whose rows lie `stride` elements apart, to `out`."""
    inside = column < num_columns
    row = tl.arange(0, BLOCK_ROWS)
    total = tl.zeros((BLOCK_ROWS, column.shape[0]), dtype=tl.float32)
    for first in range(0, num_chunks, BLOCK_ROWS):
        place = (first + row).to(tl.int64)[:, None] * stride + column[None, :]
        mask = (first + row < num_chunks)[:, None] & inside[None, :]
        # .cg reads from the L2 cache: a multiprocessor's L1 may hold an older row.
        total += tl.load(partial_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(out_ptr + column, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_chunks"])
def _sums_kernel(partial_ptr, sums_ptr, num_chunks, num_columns, SUMS_ROWS: tl.constexpr, SUMS_COLUMNS: tl.constexpr):
    """One program adds up the rows of one strip of partial [sums, num_chunks, num_columns]."""
    index = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * SUMS_COLUMNS + tl.arange(0, SUMS_COLUMNS)
    partial_ptr += index * num_chunks * num_columns
    add_up(partial_ptr, sums_ptr + index * num_columns, column, num_chunks, num_columns, num_columns, SUMS_ROWS)


def find_counters(device: torch.device, number: int) -> Tensor:
    """Returns at least `number` int32 that are 0 when the next kernel on the current stream begins."""
    is_cuda = device.type == "cuda"
    if number > NUM_COUNTERS or (is_cuda and torch.cuda.is_current_stream_capturing()):
        return torch.zeros(number, dtype=torch.int32, device=device)
    key = device, torch._C._cuda_getCurrentRawStream(device.index) if is_cuda else 0
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
    return found


class BackwardPlan(NamedTuple):
    """Plans a kernel whose programs each own a chunk: some tiles below one another in a strip of columns."""

    num_chunks: int
    num_strips: int
    sums_rows: bool
    launch: Plan

    def allocate_sums(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> Sums:
        """Allocates what the kernel needs to sum rows: partial, counters, and the sums [num_columns] that it writes."""
        if not self.sums_rows:
            return None, None, None
        partial = torch.empty(self.num_chunks, num_columns, dtype=torch.float32, device=device)
        return partial, find_counters(device, self.num_strips), torch.empty(num_columns, dtype=dtype, device=device)


def plan_chunks(
    row_blocks: int,
    num_strips: int,
    tiles_per_program: int,
    sums_rows: bool,
    varying: Sequence[str] = (),
    **arguments: Any,
) -> BackwardPlan:
    """Plans row_blocks tiles below one another in each of num_strips strips; the arguments are `Plan`'s."""
    num_chunks = -(-row_blocks // tiles_per_program)
    named = arguments | {"tiles_per_program": tiles_per_program, "HAS_GRAD_BIAS": sums_rows}
    return BackwardPlan(num_chunks, num_strips, sums_rows, Plan((num_chunks * num_strips,), varying, **named))


def choose_tiles_per_program(
    row_blocks: int, strips: int, programs_per_multiprocessor: int, device: torch.device
) -> int:
    """Returns how many tiles below one another a program takes so that all programs run at once."""
    num_programs = count_multiprocessors(device) * programs_per_multiprocessor
    return max(1, -(-row_blocks // max(1, num_programs // max(1, strips))))


def plan_sums(shape: tuple[int, int, int], tile: int, num_warps: int, device: torch.device) -> Plan:
    """Plans `launch_sums` of a partial of this shape [sums, rows, h], with programs that read `tile` numbers at once:
    as narrow strips, between 32 and STRIP_COLUMNS wide, as give half of the multiprocessors one."""
    num_sums, num_chunks, num_columns = shape
    most = max(1, count_multiprocessors(device) // 2)
    columns = min(STRIP_COLUMNS, max(32, triton.next_power_of_2(-(-num_sums * num_columns // most))))
    return Plan(
        (-(-num_columns // columns), num_sums),
        num_chunks=num_chunks,
        num_columns=num_columns,
        SUMS_ROWS=tile // columns,
        SUMS_COLUMNS=columns,
        num_warps=num_warps,
        enable_fp_fusion=True,
    )


def launch_sums(plan: Plan, partial: Tensor, sums: Tensor) -> None:
    """Adds up the rows of partial [sums, rows, h] to sums [sums, h], in a fixed order, and rounds once."""
    launch(_sums_kernel, plan, (partial, sums))

"""Draws dropout masks: checks their places, and chooses what draws them.

On a CPU compiled words take a quarter of the time of others. They have the same bits, so switching to them after
DRAWS_BEFORE_COMPILING calls changes no result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.opaque import run_or_simulate
from tempo_kernels.philox import cpu, eager
from tempo_kernels.philox.eager import LANES, WORD, check_place, threshold

DRAWS_BEFORE_COMPILING = 1 << 28
"""Calls of Philox that, not compiled, take about as much longer as the compiler takes."""

DRAWS = (cpu.draw_bits, eager.draw_bits)
"""What draws on a CPU and elsewhere before it is compiled, by which a program that counts memory knows it."""

_drawn = 0


def drop_mask(
    key: int, p: float, *, sample: Tensor, head: Tensor, row: Tensor, num_columns: int, first_column: int = 0
) -> Tensor:
    """Returns True where dropout drops.

    Args:
        key: 64 bits, one per seed, layer and site.
        p: in [0, 1).
        sample, head, row: int64 tensors of global indices, in [0, 2**48), [0, 2**16) and [0, 2**32),
            that broadcast against each other to a shape [...].
        num_columns, first_column: columns first_column ... first_column + num_columns - 1 are drawn.

    Returns:
        bool [..., num_columns].

    Raises ValueError for a probability or, on a CPU, an index outside of its range. Indices on a GPU are not checked,
    because that would wait for it.
    """
    places = {"sample": sample, "head": head, "row": row}
    return keep_bits(key, p, **places, num_columns=num_columns, first_column=first_column) == 0


def keep_bits(
    key: int, p: float, *, sample: Tensor, head: Tensor, row: Tensor, num_columns: int, first_column: int = 0
) -> Tensor:
    """Returns int32 [..., num_columns] for `drop_`: 0 where dropout drops, all bits set elsewhere; see `drop_mask`."""
    global _drawn
    k0, k1, limit = key & WORD, key >> 32, threshold(p)
    _check_indices(sample, head, row)
    c1, c2, c3 = torch.broadcast_tensors(row, head + ((sample >> 32) << 16), sample & WORD)
    shape = c1.shape
    first_group, skipped = divmod(first_column, LANES)
    end = -(-(first_column + num_columns) // LANES)
    group = torch.arange(first_group, end, dtype=torch.int64, device=row.device)
    c1, c2, c3 = (c.reshape(-1).contiguous() for c in (c1, c2, c3))
    _drawn += group.numel() * c1.numel()
    is_elsewhere, bits = group.device.type != "cpu" or torch.compiler.is_compiling(), None
    if _drawn >= DRAWS_BEFORE_COMPILING and not is_elsewhere:
        bits = cpu.draw_bits_compiled(group, c1, c2, c3, k0, k1, limit)
    if bits is None:
        bits = run_or_simulate(DRAWS[is_elsewhere], group, c1, c2, c3, k0=k0, k1=k1, limit=limit)
    # View each int64 as two int32: torch runs on little-endian machines only, so the lower half comes first.
    return bits.view(*shape, group.numel() * LANES // 2).view(torch.int32)[..., skipped : skipped + num_columns]


def foresee(num_repeats: int) -> None:
    """Announces that all draws so far will be repeated `num_repeats` times, as after the first step of a run. If
    compiling pays for itself by the end of the run, it begins now. No mask changes."""
    global _drawn
    _drawn += num_repeats * _drawn


def _check_indices(sample: Tensor, head: Tensor, row: Tensor) -> None:
    # Check only numbers that are available: reading a GPU's would wait for it, and a tracer's have no values.
    is_known = row.device.type == "cpu" and type(row) is Tensor and not torch.compiler.is_compiling()
    if not is_known or 0 in (sample.numel(), head.numel(), row.numel()):
        return
    ends = [(int(low), int(high)) for low, high in (index.aminmax() for index in (sample, head, row))]
    (first_sample, last_sample), (first_head, last_head), (first_row, last_row) = ends
    check_place(
        first_sample=first_sample,
        num_samples=last_sample - first_sample + 1,
        first_head=first_head,
        num_heads=last_head - first_head + 1,
        first_row=first_row,
        num_rows=last_row - first_row + 1,
    )

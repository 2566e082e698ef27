"""Defines `drop_mask` and `keep_bits`: checks the places of a mask, and chooses what draws it."""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.opaque import run_or_simulate
from tempo_kernels.philox import cpu, eager
from tempo_kernels.philox.eager import LANES, WORD, check_place, threshold

DRAWS = (cpu.draw_bits, eager.draw_bits)
"""What draws on a CPU and elsewhere, by which a program that counts memory knows it."""


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
    k0, k1, limit = key & WORD, key >> 32, threshold(p)
    _check_indices(sample, head, row)
    c1, c2, c3 = torch.broadcast_tensors(row, head + ((sample >> 32) << 16), sample & WORD)
    shape = c1.shape
    first_group, skipped = divmod(first_column, LANES)
    end = -(-(first_column + num_columns) // LANES)
    group = torch.arange(first_group, end, dtype=torch.int64, device=row.device)
    c1, c2, c3 = (c.reshape(-1).contiguous() for c in (c1, c2, c3))
    is_elsewhere = group.device.type != "cpu" or torch.compiler.is_compiling()
    bits = run_or_simulate(DRAWS[is_elsewhere], group, c1, c2, c3, k0=k0, k1=k1, limit=limit)
    # View each int64 as two int32: torch runs on little-endian machines only, so the lower half comes first.
    return bits.view(*shape, group.numel() * LANES // 2).view(torch.int32)[..., skipped : skipped + num_columns]


def _check_indices(sample: Tensor, head: Tensor, row: Tensor) -> None:
    # Check only numbers that are available: reading a GPU's would wait for it, and a tracer's have no values.
    is_known = row.device.type == "cpu" and type(row) is Tensor and not torch.compiler.is_compiling()
    if not is_known or 0 in (sample.numel(), head.numel(), row.numel()):
        return
    places: dict[str, int] = {}
    for name, index in (("sample", sample), ("head", head), ("row", row)):
        first, last = map(int, index.aminmax())
        places |= {f"first_{name}": first, f"num_{name}s": last - first + 1}
    check_place(**places)

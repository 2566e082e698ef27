"""Holds what the norms' backends exchange: a norm with its parameters, and what each form keeps for backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

RESERVE_SHARE = 64
"""A norm in place has a reserve of one column for every so many channels."""


class Norm(NamedTuple):
    """One LayerNorm or RMSNorm."""

    weight: Tensor
    """[h]; gamma is 1 + weight where it is zero-centred."""
    bias: Tensor | None
    """[h]; a LayerNorm has one, an RMSNorm has none."""
    eps: float
    subtracts_mean: bool
    zero_centered: bool

    @property
    def sums_dtype(self) -> torch.dtype:
        """The dtype to which the gradients of weight and bias are rounded together: the wider of the two."""
        weight, bias = self.weight.dtype, (self.weight if self.bias is None else self.bias).dtype
        return bias if bias.itemsize > weight.itemsize else weight

    def compute_affine(self, x_dtype: torch.dtype) -> Tensor:
        """Returns gamma and, if there is a bias, beta, [1 or 2, h] in the dtype of a norm's arithmetic on x_dtype."""
        gamma = self.weight.detach().to(torch.promote_types(x_dtype, torch.float32))
        gamma = gamma + 1.0 if self.zero_centered else gamma
        return torch.stack([gamma] if self.bias is None else [gamma, self.bias.detach().to(gamma.dtype)])


class Kept(NamedTuple):
    """What keep="inplace" keeps with y; each backend has its own form of `lost` and `lost_xhat`."""

    rstd: Tensor
    """[rows], of the dtype that the norm computes in."""
    affine: Tensor
    """gamma and beta as forward used them, [2 or 1, h]: the parameters may have changed since."""
    lost: Tensor
    """The indices of the lost channels, int64. On a GPU int32 [get_reserve_size]: as many as there is room for, and -1
    behind them."""
    lost_xhat: Tensor
    """Their normalised x, [rows, number of columns], of y's dtype."""


class Statistics(NamedTuple):
    """What keep="recompute" keeps with x, [rows] each; an RMSNorm has no mean."""

    rstd: Tensor
    mean: Tensor | None = None


def get_reserve_size(hidden_size: int) -> int:
    """Returns for how many lost channels of a norm a GPU has room."""
    return max(1, hidden_size // RESERVE_SHARE)


def allocate_output(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Allocates y [..., h] and rstd [rows]."""
    y = torch.empty(x.shape, dtype=get_output_dtype(x.dtype, norm.weight.dtype), device=x.device)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return y, torch.empty(math.prod(x.shape[:-1]), dtype=dtype, device=x.device)


def allocate_kept(x: Tensor, norm: Norm, num_lost: int, dtype: torch.dtype) -> tuple[Tensor, Kept]:
    """Allocates y, and what keep="inplace" keeps with it: columns for num_lost channels, and their indices in dtype."""
    y, rstd = allocate_output(x, norm)
    affine = rstd.new_empty(1 if norm.bias is None else 2, x.size(-1))
    return y, Kept(rstd, affine, rstd.new_empty(num_lost, dtype=dtype), y.new_empty(rstd.numel(), num_lost))


def get_output_dtype(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> torch.dtype:
    """Returns x's dtype, or for a float32 x (a float32 residual) weight's, which the linear that follows has."""
    return weight_dtype if x_dtype == torch.float32 else x_dtype


def view_rows(x: Tensor) -> Tensor:
    """Returns x as [rows, h], a view if x is contiguous."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.size(-1))


def describe_row(num_columns: int, zero_centered: bool) -> dict[str, int]:
    """Returns the arguments of all kernels that read whole tensors; LOST_COLUMNS are read at a time."""
    reserve = get_reserve_size(num_columns)
    columns = min(64, 1 << (reserve - 1).bit_length())
    return {"NUM_COLUMNS": num_columns, "RESERVE": reserve, "LOST_COLUMNS": columns, "ZERO_CENTERED": zero_centered}


class Blocks(NamedTuple):
    """How the kernels divide a tensor [rows, h]."""

    forward_row_bytes: int = 32768
    backward_row_bytes: int = 16384
    """The bytes of x up to which a program has whole rows in its registers."""
    row_columns: int = 4096
    """Of a long row's block, where one program reads the row in a loop."""
    elements: int = 2048
    """Of a tile of short rows, or of a strip of long ones."""
    strip_columns: int = 512
    forward_programs: int = 2048
    backward_warps: int = 16
    """Of all programs that run on a multiprocessor at once, at 128 registers a thread."""
    multiprocessors: int | None = None
    """Those of the GPU if None."""

    def divide(
        self, num_rows: int, num_columns: int, is_long: bool, programs: int, counts_warps: bool = False
    ) -> tuple[tuple[int, int], dict[str, int]]:
        """Returns the grid (row tiles, strips) of about so many programs, or, with counts_warps, warps; and the
        arguments of a tile."""
        columns = self.strip_columns if is_long else 1 << max(0, num_columns - 1).bit_length()
        rows = max(1, self.elements // columns)  # short rows share a tile, so that all threads have work
        num_warps = min(16, max(1, rows * columns // 256))
        num_strips, num_tiles = -(-num_columns // columns), -(-num_rows // rows)
        num_programs = max(1, programs // (num_strips * (num_warps if counts_warps else 1)))
        tiles_per_program = -(-num_tiles // num_programs)
        tile = {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns, "num_warps": num_warps, "enable_fp_fusion": True}
        return (-(-num_tiles // tiles_per_program), num_strips), tile

    def loop(self) -> dict[str, int]:
        """Returns the arguments of a program that reads a row in a loop."""
        return {"BLOCK_COLUMNS": self.row_columns, "num_warps": 8, "enable_fp_fusion": True}

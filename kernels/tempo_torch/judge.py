"""Measures how far two runs of a model are apart, row by row, in parts of the largest element."""

from __future__ import annotations

import torch
from torch import Tensor

Values = dict[str, Tensor | None]
"""Outputs and gradients of one run by name; None for a gradient that there is not."""


def measure(values: Values) -> dict[str, Tensor]:
    """Returns the largest finite element of each row of each tensor; no gradient is a 0."""
    return {name: _get_largest(value) for name, value in values.items()}


def compute_difference(stock: Tensor | None, ours: Tensor | None, size: Tensor) -> Tensor:
    """Returns of each row the largest difference where stock's number is one; `size` is what stock measures."""
    if stock is None or ours is None:
        other = _get_largest(ours if stock is None else stock)
        return other if other.shape == size.shape else other.amax().expand(size.shape)
    first, second = _split(stock), _split(ours)
    if first.shape != second.shape:
        return torch.full_like(size, float("inf"))
    return torch.where(first.isfinite(), first - second, 0.0).abs().amax(1).cpu()


def get_eps(x: Tensor | None) -> float:
    """Returns the relative distance of neighbouring numbers, as products see them."""
    dtype = torch.float32 if x is None else x.dtype
    is_coarse = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return 2.0**-10 if is_coarse else torch.finfo(dtype).eps


def _split(value: Tensor) -> Tensor:
    """Views a tensor as rows, one for each sample where it may have samples."""
    value = value.detach() if value.dtype == torch.float64 else value.detach().float()
    return value.flatten(1) if value.dim() > 2 and value.size(0) <= 64 else value.reshape(1, -1)


def _get_largest(value: Tensor | None) -> Tensor:
    return torch.zeros(1) if value is None else _split(value).nan_to_num(0.0, 0.0, 0.0).abs().amax(1).cpu()

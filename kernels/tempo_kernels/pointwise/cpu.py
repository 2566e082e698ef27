"""An activation of x + bias as in eager.py, fast on a CPU, where the cost is passes over memory and not arithmetic.

Each function walks over chunks that stay in the processor's cache, in buffers allocated once per call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tempo_kernels.pointwise.activations import ACTIVATIONS
from tempo_kernels.pointwise.eager import find_sum_dtype, smallest_at_least, sum_rows

_CHUNK_PER_THREAD = 1 << 18
_MAX_CHUNK = 1 << 22
# A chunk fills whole bytes of bits, and whole vector registers: torch computes what is left over with other roundings.
_CHUNK_STEP = 128

# Eight bytes of 0 or 1 in a little-endian word: the product has them in its top byte, the first in the highest bit.
_COLLECT_BITS = -0x7FBFDFEFF7FBFDFF


def forward(x: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None) -> Tensor:
    """As in eager.py."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    for rows, total in _add_in_chunks(x, bias, activation):
        _write_value(total, activation, y.view(-1, _count_columns(bias))[rows])
    return y


def forward_with_bits(x: Tensor, bias: Tensor | None, activation: str, threshold: float) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    bits = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)
    threshold = smallest_at_least(threshold, find_sum_dtype(x, bias, activation))
    flags = torch.empty(_count_rows(x, bias) * _count_columns(bias), dtype=torch.int8, device=x.device)
    for rows, total in _add_in_chunks(x, bias, activation):
        _write_value(total, activation, y.view(-1, _count_columns(bias))[rows])
        _pack(total, threshold, flags, bits[rows.start * _count_columns(bias) // 8 :])
    return y, bits


def backward(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows_grad_y, rows_grad_x = (t.view(-1, _count_columns(bias)) for t in (grad_y.contiguous(), grad_x))
    for rows, total in _add_in_chunks(x, bias, activation):
        rows_grad_x[rows] = ACTIVATIONS[activation].grad_x(rows_grad_y[rows].to(total.dtype), total)
    return grad_x, sum_rows(grad_x) if has_grad_bias else None


def choose_chunk_size(numel: int) -> int:
    """Elements in a chunk: 1 MiB of float32 for each thread."""
    size = min(_CHUNK_PER_THREAD * torch.get_num_threads(), _MAX_CHUNK, max(numel, 1))
    return size + -size % _CHUNK_STEP


def _add_in_chunks(x: Tensor, bias: Tensor | None, activation: str) -> Iterator[tuple[slice, Tensor]]:
    """(rows, x + bias of these rows [rows, f], in one buffer for all) for consecutive chunks; f is 1 without a bias."""
    rows_x, num_rows = x.contiguous().view(-1, _count_columns(bias)), _count_rows(x, bias)
    if x.numel() == 0:
        return
    dtype = find_sum_dtype(x, bias, activation)
    sums = torch.empty((0 if bias is None else num_rows, _count_columns(bias)), dtype=dtype, device=x.device)
    for start in range(0, rows_x.shape[0], num_rows):
        total = rows_x[start : start + num_rows]
        if bias is not None:
            total = _add(total, bias, out=sums[: total.shape[0]])
        yield slice(start, start + total.shape[0]), total


def _count_columns(bias: Tensor | None) -> int:
    return 1 if bias is None else max(bias.numel(), 1)


def _count_rows(x: Tensor, bias: Tensor | None) -> int:
    """Rows of whole bytes of bits."""
    step = _CHUNK_STEP // math.gcd(_CHUNK_STEP, _count_columns(bias))
    return -(-choose_chunk_size(x.numel()) // (_count_columns(bias) * step)) * step


def _add(x: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """x + bias, rounded to the dtype of out only."""
    return torch.add(x, bias, out=out) if x.dtype == out.dtype else out.copy_(x).add_(bias)


def _write_value(total: Tensor, activation: str, out: Tensor) -> None:
    if total.dtype == out.dtype:
        ACTIVATIONS[activation].value(total, out=out)
    else:
        out.copy_(ACTIVATIONS[activation].value(total))


def _pack(total: Tensor, threshold: float, flags: Tensor, bits: Tensor) -> None:
    """Writes the bits total >= threshold to the first bytes of bits."""
    length = total.numel()
    padded = length + -length % 8
    torch.ge(total, threshold, out=flags[:length].view(total.shape))
    flags[length:padded] = 0
    words = flags[:padded].view(torch.int64).mul_(_COLLECT_BITS).bitwise_right_shift_(56)
    bits[: padded // 8].view(torch.int8).copy_(words)

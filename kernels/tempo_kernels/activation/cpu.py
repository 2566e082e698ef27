"""Computes an activation of x + bias on a CPU, where the cost is passes over memory; eager.py is the specification.

Without a bias, torch's own function takes the whole tensor. With a bias the work goes by chunks that stay in the outer
cache: the sum is written into the result, which torch's function then overwrites, or into a buffer if it has another
dtype. torch's functions are faster than Inductor's code for them, except for the gradient of the tanh form of GELU:
from COMPILED_ELEMENTS on that is one compiled pass, which adds the bias too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tempo_kernels.activation.activations import ACTIVATIONS
from tempo_kernels.activation.eager import find_sum_dtype, smallest_at_least, sum_rows
from tempo_kernels.compiled import Compiled, pays_for

COMPILED_ELEMENTS = 1 << 20
"""Elements of a tensor from which on one compilation, which takes seconds, is worth its time."""

_CHUNK_PER_THREAD = 1 << 20
_MAX_CHUNK = 1 << 22
# A chunk fills whole bytes of bits, and whole vector registers: torch rounds the remainder of a loop differently.
_CHUNK_STEP = 128

# Packs four bytes of 0 or 1 in a little-endian word: multiplying by this puts them into the lower half of the top byte,
# the first in the highest bit. 64-bit products, for eight bytes at once, take longer.
_COLLECT_BITS = 0x08040201


def forward(x: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None) -> Tensor:
    """As in eager.py."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if bias is None:
        # In one contiguous piece, because torch rounds the remainder of a loop differently.
        return ACTIVATIONS[activation].value(x.contiguous(), out=y)
    for total, y_rows in _add_in_chunks(x, bias, activation, y):
        _write_value(total, activation, y_rows)
    return y


def forward_with_bits(x: Tensor, bias: Tensor | None, activation: str, threshold: float) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    threshold = smallest_at_least(threshold, find_sum_dtype(x, bias, activation))
    flags = torch.empty(x.numel() + -x.numel() % 8, dtype=torch.int8, device=x.device)
    flags[x.numel() :] = 0
    for total, y_rows, flag_rows in _add_in_chunks(x, bias, activation, y, flags[: x.numel()]):
        # The comparison is written in the operands' dtype: for any other, torch goes through a buffer and is slower.
        flag_rows.copy_(torch.ge(total, threshold, out=torch.empty_like(total)))
        _write_value(total, activation, y_rows)
    return y, _pack(flags)


def backward(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py."""
    differentiate = ACTIVATIONS[activation].grad_x
    grad_y = grad_y.contiguous()
    if bias is None:
        grad_x = differentiate(grad_y, x.contiguous())
        return grad_x, sum_rows(grad_x) if has_grad_bias else None
    if activation in _COMPILED and pays_for(x, COMPILED_ELEMENTS, x.numel() // max(x.size(-1), 1), x.size(-1)):
        operands = (t.contiguous().view(-1, x.size(-1)) for t in (grad_y, x))
        grad_x = _COMPILED[activation](*operands, bias.contiguous()).view(x.shape)
        return grad_x, sum_rows(grad_x) if has_grad_bias else None
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for total, rows_grad_x, rows_grad_y in _add_in_chunks(x, bias, activation, grad_x, grad_y):
        if total.dtype == x.dtype:
            differentiate(rows_grad_y, total, out=rows_grad_x)
        else:
            rows_grad_x.copy_(differentiate(rows_grad_y.to(total.dtype), total, out=total))
    return grad_x, sum_rows(grad_x) if has_grad_bias else None


def _compile_backward(activation: str) -> Compiled:
    """Compiles (grad_y, x [n, f], bias [f]) -> grad_y f'(x + bias) in x's dtype."""

    def backward(grad_y: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        return ACTIVATIONS[activation].grad_x(grad_y.float(), x.float() + bias).to(x.dtype)

    return Compiled(backward)


_COMPILED = {"gelu_tanh": _compile_backward("gelu_tanh")}


def choose_chunk_size(numel: int) -> int:
    """Returns the elements in a chunk: 4 MiB of float32 for each thread."""
    size = min(_CHUNK_PER_THREAD * torch.get_num_threads(), _MAX_CHUNK, max(numel, 1))
    return size + -size % _CHUNK_STEP


def _add_in_chunks(
    x: Tensor, bias: Tensor | None, activation: str, out: Tensor, *others: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Yields (x + bias [rows, f], the same rows of out, and of others...) for consecutive chunks; without a bias f is
    1. The sum lies in out's own memory if it has out's dtype, else in one buffer for all chunks."""
    columns, num_rows = _count_columns(bias), _count_rows(x, bias)
    if x.numel() == 0:
        return
    dtype = find_sum_dtype(x, bias, activation)
    bias = None if bias is None else bias.to(dtype)  # once, instead of with every chunk
    sums = None if dtype == out.dtype else torch.empty((num_rows, columns), dtype=dtype, device=x.device)
    tensors = (t.view(-1, columns).split(num_rows) for t in (x.contiguous(), out, *others))
    for rows_x, rows_out, *rows in zip(*tensors, strict=True):
        total = rows_x
        if bias is not None:
            total = _add(rows_x, bias, out=rows_out if sums is None else sums[: rows_x.size(0)])
        yield total, rows_out, *rows


def _count_columns(bias: Tensor | None) -> int:
    return 1 if bias is None else max(bias.numel(), 1)


def _count_rows(x: Tensor, bias: Tensor | None) -> int:
    """Returns how many rows of x + bias fill whole vector registers."""
    step = _CHUNK_STEP // math.gcd(_CHUNK_STEP, _count_columns(bias))
    return -(-choose_chunk_size(x.numel()) // (_count_columns(bias) * step)) * step


def _add(x: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """Computes x + bias, rounded once, to the dtype of out."""
    return torch.add(x, bias, out=out) if x.dtype == out.dtype else out.copy_(x).add_(bias)


def _write_value(total: Tensor, activation: str, out: Tensor) -> None:
    if total.dtype == out.dtype:
        ACTIVATIONS[activation].value(total, out=out)
    else:
        out.copy_(ACTIVATIONS[activation].value(total, out=total))


def _pack(flags: Tensor) -> Tensor:
    """Packs eight flags to a byte; overwrites the flags."""
    products = flags.view(torch.int32).mul_(_COLLECT_BITS).view(torch.uint8).view(-1, 8)
    return torch.add(products[:, 7], products[:, 3], alpha=16)

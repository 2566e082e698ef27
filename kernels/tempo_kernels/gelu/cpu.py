"""GELU of eager.py, fast on a CPU, where the cost is passes over memory and not arithmetic.

Each function walks over chunks that stay in the processor's cache, in buffers allocated once per call. The derivative
of a 16-bit y, which has 65,536 values, is read from a table that the formula filled. From COMPILED_ELEMENTS on, the
backward is one compiled pass instead.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tempo_kernels.compiled import Compiled, pays_for
from tempo_kernels.gelu.eager import sum_dtype, sum_of_rows
from tempo_kernels.gelu.inverse import INVERSES, Y_MAX, Inverse, derivative_float64, evaluate, smallest_at_least

COMPILED_ELEMENTS = (1 << 20) + 1
"""Elements of a tensor above which one compilation, which takes seconds, is worth its time."""

_CHUNK_PER_THREAD = 1 << 18
_MAX_CHUNK = 1 << 22
# A chunk fills whole bytes of bits, and whole vector registers: torch computes what is left over with other roundings.
_CHUNK_STEP = 128

# Eight bytes of 0 or 1 in a little-endian word: the product has them in its top byte, the first in the highest bit.
_COLLECT_BITS = -0x7FBFDFEFF7FBFDFF

_tables: dict[tuple[torch.dtype, str], Tensor] = {}


def forward(
    x: Tensor, bias: Tensor | None, approximate: str, has_bits: bool = True, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    bits = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device) if has_bits else None
    threshold = smallest_at_least(INVERSES[approximate].x_min, sum_dtype(x, bias, approximate))
    num_flags = 0 if bits is None else _rows_per_chunk(x, bias) * _width(bias)
    flags = torch.empty(num_flags, dtype=torch.int8, device=x.device)
    for rows, total in _sums(x, bias, approximate):
        rows_y = y.view(-1, _width(bias))[rows]
        if total.dtype == y.dtype:
            torch.ops.aten.gelu.out(total, approximate=approximate, out=rows_y)
        else:
            rows_y.copy_(F.gelu(total, approximate=approximate))
        if bits is not None:
            _pack(total, threshold, flags, bits[rows.start * _width(bias) // 8 :])
    return y, bits


def backward(
    grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py."""
    if pays_for(y, COMPILED_ELEMENTS):
        grad_x = _compiled_backward(grad_y, y, bits, approximate)
    else:
        grad_x = _backward_in_chunks(grad_y, y, bits, approximate)
    return grad_x, sum_of_rows(grad_x) if has_grad_bias else None


def _compiled_backward(grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str) -> Tensor:
    signs = torch.tensor(_SIGNS, dtype=torch.int64, device=y.device)
    sign = signs.index_select(0, bits.int()).view(torch.int8)[: y.numel()]
    return _GRADIENTS[approximate](grad_y.reshape(-1), y.view(-1), sign).view(y.shape)


def _gradient(inverse: Inverse) -> Compiled:
    """grad_y, y, sign [n] -> grad_y GELU'(x(y)) of y's dtype."""

    def gradient(grad_y: Tensor, y: Tensor, sign: Tensor) -> Tensor:
        above = y.float() - inverse.y_min  # exact near the minimum, where it matters
        root = (above - inverse.y_min_low).clamp(0.0, Y_MAX - inverse.y_min).sqrt() * sign
        return (evaluate(inverse, root) * grad_y.float()).to(y.dtype)

    return Compiled(gradient)


_GRADIENTS = {approximate: _gradient(inverse) for approximate, inverse in INVERSES.items()}


def _backward_in_chunks(grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str) -> Tensor:
    grad_x = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    flat_grad_y, flat_y, flat_grad_x = grad_y.reshape(-1), y.reshape(-1), grad_x.view(-1)
    size = _chunk_size(y.numel())
    buffers = torch.empty((3, size), dtype=torch.float32, device=y.device)
    is_tabulated = y.dtype.itemsize == 2 and y.device.type == "cpu"
    words = torch.tensor(_PAGES if is_tabulated else _SIGNS, dtype=torch.int64, device=y.device)
    for start in range(0, y.numel(), size):
        chunk_y, chunk_bits = flat_y[start : start + size], bits[start // 8 : (start + size + 7) // 8]
        length = chunk_y.numel()
        branch = words.index_select(0, chunk_bits.int()).view(torch.int8)[:length]
        if y.dtype == torch.float64:
            derivative = derivative_float64(chunk_y, branch > 0, approximate)
        elif is_tabulated:
            derivative = _look_up(chunk_y, branch, approximate, buffers[:, :length])
        else:
            derivative = _derivative(chunk_y.float(), branch, INVERSES[approximate], buffers[:, :length])
        torch.mul(derivative, flat_grad_y[start : start + size], out=flat_grad_x[start : start + size])
    return grad_x


def backward_from_input(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, approximate: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows_grad_y, rows_grad_x = (t.view(-1, _width(bias)) for t in (grad_y.contiguous(), grad_x))
    for rows, total in _sums(x, bias, approximate):
        grad = torch.ops.aten.gelu_backward(rows_grad_y[rows].to(total.dtype), total, approximate=approximate)
        rows_grad_x[rows] = grad
    return grad_x, sum_of_rows(grad_x) if has_grad_bias else None


def _sums(x: Tensor, bias: Tensor | None, approximate: str) -> Iterator[tuple[slice, Tensor]]:
    """(rows, x + bias of these rows [rows, f], in one buffer for all) for consecutive chunks; f is 1 without a bias."""
    rows_x, num_rows = x.contiguous().view(-1, _width(bias)), _rows_per_chunk(x, bias)
    if x.numel() == 0:
        return
    dtype = sum_dtype(x, bias, approximate)
    sums = torch.empty((0 if bias is None else num_rows, _width(bias)), dtype=dtype, device=x.device)
    for start in range(0, rows_x.shape[0], num_rows):
        total = rows_x[start : start + num_rows]
        if bias is not None:
            total = _add(total, bias, out=sums[: total.shape[0]])
        yield slice(start, start + total.shape[0]), total


def _width(bias: Tensor | None) -> int:
    return 1 if bias is None else max(bias.numel(), 1)


def _rows_per_chunk(x: Tensor, bias: Tensor | None) -> int:
    """Whole bytes of bits in each chunk."""
    step = _CHUNK_STEP // math.gcd(_CHUNK_STEP, _width(bias))
    return -(-_chunk_size(x.numel()) // (_width(bias) * step)) * step


def _add(x: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """x + bias, rounded to the dtype of out only."""
    return torch.add(x, bias, out=out) if x.dtype == out.dtype else out.copy_(x).add_(bias)


def _derivative(y: Tensor, sign: Tensor, inverse: Inverse, buffers: Tensor) -> Tensor:
    """GELU'(x(y)) in float32 by the formula of inverse.py; sign is 1 right of the minimum, -1 left of it."""
    root, numerator, denominator = buffers
    torch.sub(y, inverse.y_min, out=root)  # exact near the minimum, where it matters
    root.clamp_(inverse.y_min_low, Y_MAX - inverse.y_min).sub_(inverse.y_min_low).sqrt_().mul_(sign)
    _polynomial(inverse.numerator, root, out=numerator)
    _polynomial(inverse.denominator, root, out=denominator)
    numerator.div_(denominator).mul_(root)
    return numerator.mul_(root.add_(inverse.root_zero))


def _polynomial(coefficients: tuple[float, ...], x: Tensor, out: Tensor) -> None:
    scalars = x.new_tensor(coefficients)
    torch.add(scalars[1], x, alpha=coefficients[0], out=out)
    for scalar in scalars[2:]:
        torch.addcmul(scalar, out, x, out=out)


def _look_up(y: Tensor, page: Tensor, approximate: str, buffers: Tensor) -> Tensor:
    """GELU'(x(y)) of a 16-bit y; page is 3 right of the minimum and 1 left of it."""
    table = _table(y.dtype, approximate)
    index = buffers[0].view(torch.int32).copy_(y.view(torch.int16)).add_(page, alpha=32768)
    return torch.index_select(table, 0, index, out=buffers[1])


def _table(dtype: torch.dtype, approximate: str) -> Tensor:
    """[131072] float32: GELU' of every value of a 16-bit dtype in the order of its int16 pattern, left branch first."""
    if (dtype, approximate) not in _tables:
        pattern = torch.arange(-32768, 32768, dtype=torch.int32, device="cpu").to(torch.int16)
        y, sign = pattern.view(dtype).float(), torch.tensor([[-1], [1]], dtype=torch.int8, device="cpu")
        # Each half is a view of its buffers.
        buffers = torch.empty((2, 3, 65536), dtype=torch.float32, device="cpu")
        table = torch.cat([_derivative(y, s, INVERSES[approximate], b) for s, b in zip(sign, buffers, strict=True)])
        if type(table) is not Tensor:
            return table  # a fake tensor must not outlive its mode
        _tables[dtype, approximate] = table
    return _tables[dtype, approximate]


def _pack(total: Tensor, threshold: float, flags: Tensor, bits: Tensor) -> None:
    """Writes the bits total >= threshold to the first bytes of bits."""
    length = total.numel()
    padded = length + -length % 8
    torch.ge(total, threshold, out=flags[:length].view(total.shape))
    flags[length:padded] = 0
    words = flags[:padded].view(torch.int64).mul_(_COLLECT_BITS).bitwise_right_shift_(56)
    bits[: padded // 8].view(torch.int8).copy_(words)


def _words(left: int, right: int) -> list[int]:
    """For every byte of bits, eight int8 in a 64-bit word: right where a bit is set, left where it is not."""
    rows = ([right if byte >> place & 1 else left for place in range(7, -1, -1)] for byte in range(256))
    return [int.from_bytes(bytes(value & 255 for value in row), sys.byteorder, signed=True) for row in rows]


_SIGNS = _words(-1, 1)
_PAGES = _words(1, 3)


def _chunk_size(numel: int) -> int:
    """Elements in a chunk: 1 MiB of float32 for each thread."""
    size = min(_CHUNK_PER_THREAD * torch.get_num_threads(), _MAX_CHUNK, max(numel, 1))
    return size + -size % _CHUNK_STEP

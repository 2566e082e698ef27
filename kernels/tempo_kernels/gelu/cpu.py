"""Computes GELU's gradient from its output on a CPU, where the cost is passes over memory; eager.py specifies it.

Backward walks over chunks that stay in the processor's cache, in buffers allocated once per call. A 16-bit y has 65,536
values, so its derivative is looked up in a table that the formula filled. Tensors of COMPILED_ELEMENTS and more take
one compiled pass instead. Where nothing can be compiled, a float32 y of such a size is looked up by its distance to
the minimum in 15 significant bits, which takes less time than the formula in plain torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from tempo_kernels.activation import choose_chunk_size, sum_rows
from tempo_kernels.compiled import Compiled, pays_for
from tempo_kernels.gelu.inverse import INVERSES, Y_MAX, Inverse, derivative_float64, evaluate, interpolate_float64

COMPILED_ELEMENTS = 1 << 20
"""Elements of a tensor from which on one compilation, which takes seconds, is worth its time."""

TABULATED_ELEMENTS = 1 << 20
"""Elements of a float32 tensor from which on, where nothing can be compiled, a table of 2 MiB is worth its 0.1 s."""

# In the table of float32, a cell is the octave and 14 more bits of d = y - minimum + _OFFSET, cut off at _CEILING. The
# offset makes the finest cells 2**-26 wide, the spacing of float32 about the minimum: there each y has its own cell.
_OFFSET, _CEILING = 2.0**-12, 8.0
_CELL_BITS = 14
_CELLS = 1 << _CELL_BITS
_FIRST_OCTAVE, _LAST_OCTAVE = 127 - 12, 127 + 3  # by their exponents' bits
_FIRST_CELL, _LAST_CELL = _FIRST_OCTAVE * _CELLS, _LAST_OCTAVE * _CELLS
# Each branch has an octave more on either side, of NaN, for a y that is NaN; the last one begins with _CEILING's cell.
_BRANCH_OCTAVES = _LAST_OCTAVE - _FIRST_OCTAVE + 2

_tables: dict[tuple[torch.dtype, str], Tensor] = {}


def backward(
    grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py."""
    if pays_for(y, COMPILED_ELEMENTS):
        grad_x = _differentiate_compiled(grad_y, y, bits, approximate)
    else:
        grad_x = _differentiate_in_chunks(grad_y, y, bits, approximate)
    return grad_x, sum_rows(grad_x) if has_grad_bias else None


def _differentiate_compiled(grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str) -> Tensor:
    # Signs of 16 bits: Inductor loads vectors of int8 through the stack, which takes longer than all the arithmetic.
    # float16 goes with float16 because Inductor warns where float16 meets bfloat16.
    dtype = torch.float16 if y.dtype == torch.float16 else torch.bfloat16
    sign = _load_signs(dtype).index_select(0, bits.int()).view(dtype)[: y.numel()]
    grad_x: Tensor = _compile_gradient(approximate)(grad_y.reshape(-1), y.view(-1), sign)
    return grad_x.view(y.shape)


@functools.cache
def _load_signs(dtype: torch.dtype) -> Tensor:
    """Returns [256]: for every byte of bits, eight 16-bit numbers, 1 where a bit is set and -1 where it is not. The
    eight are packed into one complex128: torch gathers elements in a third of the time of rows of eight."""
    words = torch.tensor(_SIGNS, dtype=torch.int64, device="cpu")
    return words.view(torch.int8).to(dtype).view(torch.complex128)


@functools.cache
def _compile_gradient(approximate: str) -> Compiled:
    """Compiles (grad_y, y, sign [n]) -> grad_y GELU'(x(y)) in y's dtype."""

    # Otherwise the formula's numbers become arguments of the graph and are read for every element. This runs on first
    # use only, because it imports the compiler.
    load: Callable[[], Inverse] = torch.compiler.assume_constant_result(lambda: INVERSES[approximate])

    def gradient(grad_y: Tensor, y: Tensor, sign: Tensor) -> Tensor:
        numbers = load()
        above = y.float() - numbers.y_min  # exact near the minimum, where it matters
        root = (above - numbers.y_min_low).clamp(0.0, Y_MAX - numbers.y_min).sqrt() * sign
        return (evaluate(numbers, root) * grad_y.float()).to(y.dtype)

    return Compiled(gradient)


def _differentiate_in_chunks(grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str) -> Tensor:
    grad_x = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    flat_grad_y, flat_y, flat_grad_x = grad_y.reshape(-1), y.reshape(-1), grad_x.view(-1)
    size = choose_chunk_size(y.numel())
    buffers = torch.empty((3, size), dtype=torch.float32, device=y.device)
    is_tabulated = y.dtype.itemsize == 2 and y.device.type == "cpu"
    is_located = y.dtype == torch.float32 and y.device.type == "cpu" and y.numel() >= TABULATED_ELEMENTS
    lists = _PAGES if is_tabulated else _OCTAVES if is_located else _SIGNS
    words = torch.tensor(lists, dtype=torch.int64, device=y.device)
    for start in range(0, y.numel(), size):
        chunk_y, chunk_bits = flat_y[start : start + size], bits[start // 8 : (start + size + 7) // 8]
        length = chunk_y.numel()
        branch = words.index_select(0, chunk_bits.int()).view(torch.int8)[:length]
        if y.dtype == torch.float64:
            derivative = derivative_float64(chunk_y, branch > 0, approximate)
        elif is_tabulated:
            derivative = _look_up(chunk_y, branch, approximate, buffers[:, :length])
        elif is_located:
            derivative = _look_up_float32(chunk_y, branch, approximate, buffers[:, :length])
        else:
            derivative = _evaluate_slope(chunk_y.float(), branch, INVERSES[approximate], buffers[:, :length])
        torch.mul(derivative, flat_grad_y[start : start + size], out=flat_grad_x[start : start + size])
    return grad_x


def _evaluate_slope(y: Tensor, sign: Tensor, inverse: Inverse, buffers: Tensor) -> Tensor:
    """Evaluates GELU'(x(y)) in float32 by the formula of inverse.py; sign is 1 right of the minimum, -1 left of it."""
    root, numerator, denominator = buffers
    torch.sub(y, inverse.y_min, out=root)  # exact near the minimum, where it matters
    numerator.copy_(sign)  # a product of two dtypes would make a buffer for it
    root.clamp_(inverse.y_min_low, Y_MAX - inverse.y_min).sub_(inverse.y_min_low).sqrt_().mul_(numerator)
    _evaluate_polynomial(inverse.numerator, root, out=numerator)
    _evaluate_polynomial(inverse.denominator, root, out=denominator)
    slope: Tensor = numerator.div_(denominator).mul_(root)
    return slope.mul_(root.add_(inverse.root_zero))


def _evaluate_polynomial(coefficients: tuple[float, ...], x: Tensor, out: Tensor) -> None:
    scalars = x.new_tensor(coefficients)
    torch.add(scalars[1], x, alpha=coefficients[0], out=out)
    for scalar in scalars[2:]:
        torch.addcmul(scalar, out, x, out=out)


def _look_up(y: Tensor, page: Tensor, approximate: str, buffers: Tensor) -> Tensor:
    """Looks up GELU'(x(y)) of a 16-bit y; page is 3 right of the minimum and 1 left of it."""
    table = _load_table(y.dtype, approximate)
    # A pattern in [-2**15, 2**15) plus 2**15 page: 0 to 65,535 left of the minimum, from 65,536 on right of it.
    index = buffers[0].view(torch.int32).copy_(y.view(torch.int16)).add_(page, alpha=32768)
    return torch.index_select(table, 0, index, out=buffers[1])


def _look_up_float32(y: Tensor, octave: Tensor, approximate: str, buffers: Tensor) -> Tensor:
    """As _look_up; `octave` brings the first octave behind the NaN of the branch on which x lies."""
    table, cell = _load_table(y.dtype, approximate), buffers[0].view(torch.int32)
    torch.sub(y, INVERSES[approximate].y_min - _OFFSET, out=buffers[0]).clamp_(_OFFSET, _CEILING)
    # A NaN's bits are above those of _CEILING, or negative.
    cell.bitwise_right_shift_(23 - _CELL_BITS).clamp_(_FIRST_CELL - 1, _LAST_CELL + 1).add_(octave, alpha=_CELLS)
    return torch.index_select(table, 0, cell, out=buffers[1])


def make_tables() -> None:
    """Makes the tables of every dtype and form now instead of at the first use of each."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for approximate in INVERSES:
            _load_table(dtype, approximate)


def _load_table(dtype: torch.dtype, approximate: str) -> Tensor:
    """Returns GELU' by the index of _look_up, for float32 of _look_up_float32, the left branch first."""
    if (dtype, approximate) not in _tables:
        table = _fill_table_float32(approximate) if dtype == torch.float32 else _fill_table(dtype, approximate)
        if type(table) is not Tensor:
            return table  # a fake tensor must not outlive its mode
        _tables[dtype, approximate] = table
    return _tables[dtype, approximate]


def _fill_table(dtype: torch.dtype, approximate: str) -> Tensor:
    """Fills float32 [131072] with GELU' of every value of a 16-bit dtype by its int16 pattern."""
    pattern = torch.arange(-32768, 32768, dtype=torch.int32, device="cpu").to(torch.int16)
    y, sign = pattern.view(dtype).float(), torch.tensor([[-1], [1]], dtype=torch.int8, device="cpu")
    # _evaluate_slope returns a view of its buffers, so each half needs buffers of its own.
    buffers = torch.empty((2, 3, 65536), dtype=torch.float32, device="cpu")
    return torch.cat([_evaluate_slope(y, s, INVERSES[approximate], b) for s, b in zip(sign, buffers, strict=True)])


def _fill_table_float32(approximate: str) -> Tensor:
    """Fills float32 [2 branches of _BRANCH_OCTAVES * _CELLS] with GELU' in the middle of the float32 y of each cell."""
    cells = torch.arange(_FIRST_CELL, _LAST_CELL + 2, dtype=torch.int32, device="cpu")
    edges = cells.bitwise_left_shift_(23 - _CELL_BITS).view(torch.float32).double()
    middle = (edges[:-1] + edges[1:] - 2.0**-26) / 2  # its y end a step before the next edge
    root = (middle - _OFFSET - INVERSES[approximate].y_min_low).clamp_(min=0.0).sqrt_()
    table = torch.full((2, _BRANCH_OCTAVES * _CELLS), torch.nan, dtype=torch.float32, device="cpu")
    for branch, sign in zip(table, (-1.0, 1.0), strict=True):
        branch[_CELLS : _CELLS + root.numel()] = interpolate_float64(sign * root, approximate)
    return table.view(-1)


def _list_words(left: int, right: int) -> list[int]:
    """Lists, for every byte of bits, eight int8 in a 64-bit word: `right` for a set bit, `left` for an unset one."""
    rows = ([right if byte >> place & 1 else left for place in range(7, -1, -1)] for byte in range(256))
    return [int.from_bytes(bytes(value & 255 for value in row), sys.byteorder, signed=True) for row in rows]


_SIGNS = _list_words(-1, 1)
_PAGES = _list_words(1, 3)
_OCTAVES = _list_words(1 - _FIRST_OCTAVE, 1 - _FIRST_OCTAVE + _BRANCH_OCTAVES)

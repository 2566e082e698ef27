"""Computes activations on a CPU, where the cost is passes over memory; eager.py is the specification.

From COMPILED_ELEMENTS on, derivatives and gated units are one compiled pass each, except where a 16-bit number has to
be rounded on the way, which Inductor leaves out. The rest goes by chunks that stay in the cache, through torch's own
functions.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tempo_kernels.activation.activations import ACTIVATIONS
from tempo_kernels.activation.eager import (
    compute_slope,
    differentiate_gated,
    differentiate_output,
    get_smallest_at_least,
    get_sum_dtype,
    sum_rows,
)
from tempo_kernels.activation.inverse import INVERSES, Inverse, compute_slope_by
from tempo_kernels.compiled import Compiled, pays_for, split_columns
from tempo_kernels.opaque import is_recorded

COMPILED_ELEMENTS = 1 << 20
"""Elements of a tensor from which on one compilation, which takes seconds, is worth its time."""
CHUNK_ELEMENTS = 1 << 18
"""Elements of a chunk for each thread: 1 MiB of float32."""
# A chunk fills whole bytes of bits, and whole vector registers: torch rounds the remainder of a loop differently.
_CHUNK_STEP = 128

# Packs four bytes of 0 or 1 in a little-endian word: multiplying by this puts them into the lower half of the top byte,
# the first in the highest bit. 64-bit products, for eight bytes at once, take longer.
_COLLECT_BITS = 0x08040201

_sign_words: dict[torch.device, Tensor] = {}


def forward(
    x: Tensor, bias: Tensor | None, activation: str, form: str, out: Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS, compiled_elements: int = COMPILED_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As in eager.py."""
    row, is_gated = ACTIVATIONS[activation], form == "gated"
    shape = (*x.shape[:-1], x.size(-1) // 2) if is_gated else x.shape
    if is_gated and _pays_to_compile(x, 2, compiled_elements):
        found = _compile_gated_forward(activation)(*_split(x, bias, 2))
        # Not a view to autograd, which would refuse to change a view in place.
        y: Tensor = torch.ops.aten._unsafe_view(found, shape)
        return y if out is None else out.copy_(y), None
    y = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    x_min = row.x_min if form == "inplace" else None
    if bias is None and not is_gated and x_min is None:
        # In one contiguous piece, because torch rounds the remainder of a loop differently.
        return row.value(x.contiguous(), out=y), None
    flags = None
    if x_min is not None:
        threshold = get_smallest_at_least(x_min, get_sum_dtype(x, bias, activation, form))
        flags = torch.empty(x.numel() + -x.numel() % 8, dtype=torch.int8, device=x.device)
        flags[x.numel() :] = 0
    others = [] if flags is None else [flags[: x.numel()]]
    for total, rows_y, *rows_flags in _add_in_chunks(x, bias, activation, form, chunk_elements, y, *others):
        if rows_flags:
            # Written in the operands' dtype: for any other, torch goes through a buffer and is slower.
            rows_flags[0].copy_(torch.ge(total, threshold, out=torch.empty_like(total)))
        if is_gated:
            gate, up = total.chunk(2, -1)
            rows_y.copy_(row.value(gate).mul_(up))
        elif total.dtype == y.dtype:
            row.value(total, out=rows_y)
        else:
            rows_y.copy_(row.value(total, out=total))
    if flags is None:
        return y, None
    products = flags.view(torch.int32).mul_(_COLLECT_BITS).view(torch.uint8).view(-1, 8)
    return y, torch.add(products[:, 7], products[:, 3], alpha=16)


def backward(
    grad_y: Tensor, kept: Tensor, bias: Tensor | None, bits: Tensor | None, activation: str, form: str,
    has_grad_bias: bool, chunk_elements: int = CHUNK_ELEMENTS, compiled_elements: int = COMPILED_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As in eager.py."""
    grad_y = grad_y.contiguous()
    if form == "inplace":
        flat = (grad_y.view(-1), kept.view(-1), bits)
        grad_x = _backward_inplace(*flat, activation, chunk_elements, compiled_elements).view(kept.shape)
    else:
        grad_x = _backward_from_input(grad_y, kept, bias, activation, form, chunk_elements, compiled_elements)
    return grad_x, sum_rows(grad_x) if has_grad_bias else None


def _backward_from_input(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, form: str, chunk_elements: int,
    compiled_elements: int,
) -> Tensor:  # fmt: skip
    is_gated, differentiate = form == "gated", ACTIVATIONS[activation].grad_x
    is_wide = get_sum_dtype(x, bias, activation, form) == torch.float32
    if is_wide and _pays_to_compile(x, 1 + is_gated, compiled_elements):
        [rows_grad_y] = split_columns(grad_y.size(-1), grad_y.view(-1, grad_y.size(-1)))
        found: Tensor = _compile_backward(activation, is_gated)(rows_grad_y, *_split(x, bias, 1 + is_gated))
        return found.view(x.shape)
    if bias is None and not is_gated:
        return differentiate(grad_y, x.contiguous())
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for total, rows_grad_x, rows_grad_y in _add_in_chunks(x, bias, activation, form, chunk_elements, grad_x, grad_y):
        rows_grad_y = rows_grad_y.to(total.dtype)
        if is_gated:
            gate, up = total.chunk(2, -1)
            halves = differentiate_gated(rows_grad_y, gate, up, activation)
            for half, place in zip(halves, rows_grad_x.chunk(2, -1), strict=True):
                place.copy_(half)
        elif total.dtype == x.dtype:
            differentiate(rows_grad_y, total, out=rows_grad_x)
        else:
            rows_grad_x.copy_(differentiate(rows_grad_y, total, out=total))
    return grad_x


def _backward_inplace(
    grad_y: Tensor, y: Tensor, bits: Tensor | None, activation: str, chunk_elements: int, compiled_elements: int
) -> Tensor:
    # Inductor would not round a 16-bit root before it is multiplied.
    if (bits is not None or y.dtype == torch.float32) and pays_for(y, compiled_elements):
        # Signs of 16 bits: Inductor loads vectors of int8 through the stack, which takes longer than all the
        # arithmetic. float16 goes with float16 because Inductor warns where float16 meets bfloat16.
        dtype = torch.float16 if y.dtype == torch.float16 else torch.bfloat16
        signs = [] if bits is None else [_unpack_signs(bits, y.numel()).to(dtype)]
        found: Tensor = _compile_inplace_backward(activation)(grad_y, y, *signs)
        return found
    grad_x, size = torch.empty_like(y), _choose_chunk_size(chunk_elements)
    for start in range(0, y.numel(), size):
        chunk = slice(start, start + size)
        sign = None
        if bits is not None:
            sign = _unpack_signs(bits[start // 8 : (start + size) // 8], y[chunk].numel()).to(torch.float32)
        torch.mul(compute_slope(y[chunk], sign, activation), grad_y[chunk], out=grad_x[chunk])
    return grad_x


def make_tables() -> None:
    """Makes the table of signs now instead of at its first use."""
    _load_sign_words(torch.device("cpu"))


def _unpack_signs(bits: Tensor, numel: int) -> Tensor:
    """Returns int8 [numel]: 1 where a bit is set and -1 where it is not."""
    return _load_sign_words(bits.device).index_select(0, bits.int()).view(torch.int8)[:numel]


def _load_sign_words(device: torch.device) -> Tensor:
    """Returns, for every byte of bits, the eight signs as one 64-bit word: torch gathers words fastest."""
    if device in _sign_words:
        return _sign_words[device]
    words = torch.tensor(_SIGN_WORDS, dtype=torch.int64, device=device)
    if type(words) is Tensor:  # a fake tensor must not outlive its mode
        _sign_words[device] = words
    return words


_SIGN_WORDS = [
    int.from_bytes(bytes(1 if byte >> place & 1 else 255 for place in range(7, -1, -1)), sys.byteorder, signed=True)
    for byte in range(256)
]


@functools.cache
def _compile_inplace_backward(activation: str) -> Compiled:
    """Compiles (grad_y, y, sign [n]) -> grad_y f'(x(y)) in y's dtype; without an x_min there is no sign."""
    # Otherwise the formula's numbers become arguments of the graph and are read for every element. This runs on first
    # use only, because it imports the compiler.
    load: Callable[[], Inverse] = torch.compiler.assume_constant_result(lambda: INVERSES[activation])

    def backward(grad_y: Tensor, y: Tensor, *sign: Tensor) -> Tensor:
        if not sign:
            return differentiate_output(grad_y, y, None, activation)
        return (compute_slope_by(load(), y, *sign) * grad_y.float()).to(y.dtype)

    return Compiled(backward)


def _choose_chunk_size(chunk_elements: int) -> int:
    size = chunk_elements * torch.get_num_threads()
    return size + -size % _CHUNK_STEP


def _add_in_chunks(
    x: Tensor, bias: Tensor | None, activation: str, form: str, chunk_elements: int, out: Tensor, *others: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Yields (x + bias [rows, width], the same rows of out, and of others...) for consecutive chunks; width is 1 where
    neither a bias nor a gate needs columns. The sum, which may be overwritten, lies in out's own memory where out has
    its shape and dtype, else in one buffer for all chunks; where nothing is added or cast, it is x itself."""
    if x.numel() == 0:
        return
    width = x.size(-1) if form == "gated" or bias is not None else 1
    num_rows, step = x.numel() // width, _CHUNK_STEP // math.gcd(_CHUNK_STEP, width)
    chunk_rows = num_rows if is_recorded() else -(-_choose_chunk_size(chunk_elements) // (width * step)) * step
    dtype = get_sum_dtype(x, bias, activation, form)
    bias = None if bias is None else bias.to(dtype)  # once, instead of with every chunk
    is_in_out = out.dtype == dtype and out.numel() == x.numel()
    sums = None if is_in_out else torch.empty((min(chunk_rows, num_rows), width), dtype=dtype, device=x.device)
    tensors = (t.view(num_rows, -1).split(chunk_rows) for t in (x.contiguous(), out, *others))
    for rows_x, rows_out, *rows in zip(*tensors, strict=True):
        total = rows_out if sums is None else sums[: rows_x.size(0)]
        if bias is None:
            total = rows_x if rows_x.dtype == dtype else total.copy_(rows_x)
        elif rows_x.dtype == dtype:
            torch.add(rows_x, bias, out=total)
        else:
            total.copy_(rows_x).add_(bias)
        yield total, rows_out, *rows


def _pays_to_compile(x: Tensor, parts: int, compiled_elements: int) -> bool:
    return pays_for(x, compiled_elements, x.numel() // max(x.size(-1), 1), x.size(-1) // parts) if x.dim() else False


def _split(x: Tensor, bias: Tensor | None, parts: int) -> list[Tensor]:
    """Returns x viewed as [n, parts, groups, lanes], gate then up, and the bias without n."""
    if bias is None:  # adding -0 leaves every number as it is; adding 0 would turn -0 into 0
        bias = torch.full(x.shape[-1:], -0.0, dtype=x.dtype)
    width = x.size(-1) // parts
    return split_columns(width, x.contiguous().view(-1, parts, width), bias.contiguous().view(parts, width))


@functools.cache
def _compile_gated_forward(activation: str) -> Compiled:
    def forward(x: Tensor, bias: Tensor) -> Tensor:
        gate, up = (x.float() + bias).unbind(1)
        return (ACTIVATIONS[activation].value(gate) * up).to(x.dtype)

    return Compiled(forward, has_lanes=True)


@functools.cache
def _compile_backward(activation: str, is_gated: bool) -> Compiled:
    def backward(grad_y: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        total = x.float() + bias
        if not is_gated:
            return ACTIVATIONS[activation].grad_x(grad_y.float(), total.squeeze(1)).to(x.dtype)
        # Round before joining: Inductor does not vectorise the opposite order.
        gate, up = total.unbind(1)
        halves = differentiate_gated(grad_y.float(), gate, up, activation)
        return torch.stack([half.to(x.dtype) for half in halves], 1)

    return Compiled(backward, has_lanes=True)

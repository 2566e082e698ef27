"""Specifies activations of x + bias, gated ones too, in plain torch, differentiated from their input or their output.

    y = f(x + bias)                                    grad_x = grad_y f'(x + bias)
    gate, up = halves of x + bias,  y = f(gate) up     grad_gate = grad_y up f'(gate),  grad_up = grad_y f(gate)
    in place: y and the bits x + bias >= x_min         grad_x = grad_y f'(x(y))

If the activation's row of the table says so, x + bias is rounded to the dtype of x, as in the operation that it
replaces; otherwise, and in gated units, the sum stays in float32 (float64 for float64). f and f' compute in the dtype
of that sum, f'(x(y)) at least in float32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tempo_kernels.activation.activations import ACTIVATIONS

_PLACES = (7, 6, 5, 4, 3, 2, 1, 0)


def forward(
    x: Tensor, bias: Tensor | None, activation: str, form: str, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns y, contiguous, written to `out` if given, and in place, where the activation has an x_min, the bits
    x + bias >= x_min, eight to a byte, the first in the highest bit.

    Args:
        activation: a name in ACTIVATIONS.
        form: "recompute" or "inplace" for y = f(x + bias), "gated" for y = f(gate) up [..., f] of x [..., 2f].
    """
    total, row = add_bias(x, bias, activation, form), ACTIVATIONS[activation]
    if form == "gated":
        gate, up = (half.contiguous() for half in total.chunk(2, -1))
        y = row.value(gate) * up
    else:
        y = row.value(total)
    y = y.to(x.dtype) if out is None else out.copy_(y)
    if form != "inplace" or row.x_min is None:
        return y, None
    flags = (total.flatten() >= get_smallest_at_least(row.x_min, total.dtype)).to(torch.uint8)
    eights = F.pad(flags, (0, -x.numel() % 8)).view(-1, 8)
    return y, (eights << eights.new_tensor(_PLACES)).sum(1, dtype=torch.uint8)


def backward(
    grad_y: Tensor, kept: Tensor, bias: Tensor | None, bits: Tensor | None, activation: str, form: str,
    has_grad_bias: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns grad_x, contiguous, and its sum over all dimensions but the last in float32. What was kept is x, which
    the bias is added to, or in place y, and perhaps its bits."""
    if form == "inplace":
        sign = None
        if bits is not None:
            flags = (bits.unsqueeze(1) >> bits.new_tensor(_PLACES) & 1).flatten()[: kept.numel()].view(kept.shape)
            sign = torch.where(flags.bool(), 1.0, -1.0).to(torch.float32)
        grad_x = differentiate_output(grad_y.contiguous(), kept, sign, activation)
    else:
        total = add_bias(kept, bias, activation, form)
        grad_y = grad_y.contiguous().to(total.dtype)
        if form == "gated":
            gate, up = (half.contiguous() for half in total.chunk(2, -1))
            grad_x = torch.cat(differentiate_gated(grad_y, gate, up, activation), -1)
        else:
            grad_x = ACTIVATIONS[activation].grad_x(grad_y, total)
        grad_x = grad_x.to(kept.dtype)
    return grad_x, sum_rows(grad_x) if has_grad_bias else None


def allocate_output(x: Tensor, bias: Tensor | None, activation: str, form: str) -> list[Tensor]:
    """Allocates y and, if there are some, its bits."""
    shape = (*x.shape[:-1], x.size(-1) // 2) if form == "gated" else x.shape
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    has_bits = form == "inplace" and ACTIVATIONS[activation].x_min is not None
    return [y, torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)] if has_bits else [y]


def differentiate_gated(grad_y: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Returns grad_gate and grad_up."""
    return ACTIVATIONS[activation].grad_x(grad_y * up, gate), grad_y * ACTIVATIONS[activation].value(gate)


def differentiate_output(grad_y: Tensor, y: Tensor, sign: Tensor | None, activation: str) -> Tensor:
    """Returns grad_y f'(x(y)) in y's dtype; sign is 1 where x >= x_min and -1 elsewhere."""
    return (compute_slope(y, sign, activation) * grad_y).to(y.dtype)


def compute_slope(y: Tensor, sign: Tensor | None, activation: str) -> Tensor:
    """Computes f'(x(y)), at least in float32 where there is a sign."""
    slope_of_output = ACTIVATIONS[activation].slope_of_output
    assert slope_of_output is not None
    return slope_of_output(y, sign)


def add_bias(x: Tensor, bias: Tensor | None, activation: str, form: str) -> Tensor:
    """Returns x + bias, contiguous, in the dtype in which the activation takes it."""
    total = x.contiguous().to(get_sum_dtype(x, bias, activation, form))
    return total if bias is None else total + bias


def get_sum_dtype(x: Tensor, bias: Tensor | None, activation: str, form: str) -> torch.dtype:
    """Returns the dtype in which the activation takes x + bias."""
    rounds = form != "gated" and (bias is None or ACTIVATIONS[activation].rounds_sum)
    return x.dtype if rounds else torch.promote_types(x.dtype, torch.float32)


def sum_rows(grad: Tensor) -> Tensor:
    """Sums over all dimensions but the last, to [f] in float32; torch would round the sum of a 16-bit type."""
    # unsqueeze: sum over an empty tuple of dimensions would sum over all of them.
    total = grad.unsqueeze(0).sum(tuple(range(grad.dim())))
    return total.to(torch.promote_types(grad.dtype, torch.float32))


def get_smallest_at_least(value: float, dtype: torch.dtype) -> float:
    """Returns the smallest number of dtype that is >= value, for a value in the dtype's normal range."""
    spacing = torch.finfo(dtype).eps * 2.0 ** (math.frexp(value)[1] - 1)
    return math.ceil(value / spacing) * spacing

"""What the tests of activations share: each operation beside what it replaces, and inputs.

A new activation is a row of ACTIVATIONS, a new gated unit one of GATED.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tempo_kernels.activation import activate
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, reglu, swiglu
from tempo_kernels.silu import silu
from tempo_kernels.squared_relu import squared_relu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(0,), (1,), (9,), (4, 0, 8), (0, 3), (3, 0), (3, 1, 5), (65, 33)]

Function = Callable[..., Tensor]


def of_rounded_sum(function: Function) -> Function:
    """What torch computes in two steps."""
    return lambda x, bias=None: function(x if bias is None else x + bias)


def of_float32_sum(function: Function) -> Function:
    """What Megatron's fused kernels compute."""

    def compute(x: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return function(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return function(x.to(dtype) + bias.to(dtype)).to(x.dtype)

    return compute


def gated(function: Function) -> Function:
    """What Megatron's MLP computes without fusion."""

    def compute(x: Tensor, bias: Tensor | None = None) -> Tensor:
        gate, up = torch.chunk(x if bias is None else x + bias, 2, dim=-1)
        return function(gate) * up

    return compute


# The name in the table of pointwise: (ours, which keeps its input, what it replaces).
ACTIVATIONS: dict[str, tuple[Function, Function]] = {
    "gelu": (lambda x, bias=None: gelu(x, bias, keep="recompute"), of_rounded_sum(F.gelu)),
    "gelu_tanh": (
        lambda x, bias=None: gelu(x, bias, "tanh", keep="recompute"),
        of_float32_sum(lambda x: F.gelu(x, approximate="tanh")),
    ),
    "squared_relu": (
        lambda x, bias=None: squared_relu(x, bias, keep="recompute"),
        of_rounded_sum(lambda x: F.relu(x).square()),
    ),
    "silu": (silu, of_rounded_sum(F.silu)),
    "mish": (lambda x, bias=None: activate(x, bias, "mish"), of_rounded_sum(F.mish)),
    "relu": (lambda x, bias=None: activate(x, bias, "relu"), of_rounded_sum(F.relu)),
}


GATED: dict[str, tuple[Function, Function]] = {
    "swiglu": (swiglu, gated(F.silu)),
    "geglu": (geglu, gated(F.gelu)),
    "geglu tanh": (lambda x, bias=None: geglu(x, bias, "tanh"), gated(lambda x: F.gelu(x, approximate="tanh"))),
    "reglu": (reglu, gated(F.relu)),
}
KEEPS_OUTPUT = "squared_relu in place"
OPERATIONS = {**ACTIVATIONS, **GATED, KEEPS_OUTPUT: (squared_relu, ACTIVATIONS["squared_relu"][1])}
# Of which the gradient is not as exact as torch's.
IN_PLACE = {"gelu in place": (gelu, ACTIVATIONS["gelu"][1])}


def over_the_range(rows: int = 150, columns: int = 200, is_gated: bool = False) -> Tensor:
    """[-8, 8], float64, in rows; for gated units gates, beside random ups."""
    x = torch.linspace(-8, 8, rows * columns, dtype=torch.float64).view(rows, columns)
    return torch.cat([x, torch.randn(rows, columns)], dim=1) if is_gated else x


def every_number(dtype: torch.dtype) -> Tensor:
    """Every 16-bit number whose square is in the normal range, and as many negative ones."""
    numbers = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    limits = torch.finfo(dtype)
    return numbers[(numbers.double() ** 2 >= limits.tiny) & (numbers.double() ** 2 <= limits.max)]


def strided(device: str = "cpu") -> list[Tensor]:
    """x [12, 26], bias [26] and grad [12, 26], none of them contiguous."""
    x, bias, grad = (torch.randn(shape, device=device) for shape in ((26, 24), (52,), (26,)))
    return [x.t()[::2], bias[::2], grad.expand(12, 26)]


def misaligned(shape: tuple[int, ...], device: str) -> Tensor:
    """Random bfloat16 numbers two bytes off an address that is a multiple of 16."""
    return torch.randn(torch.Size(shape).numel() + 1, device=device).bfloat16()[1:].view(shape)

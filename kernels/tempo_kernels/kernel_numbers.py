"""Arithmetic that the kernels of several rooms share, and the dtypes that they take."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_dtype(operation: str, x: Tensor, name: str = "x is", remedy: str = "cast it") -> None:
    """Raises ValueError for a dtype that the kernels do not compute."""
    if x.dtype not in DTYPES:
        raise ValueError(f"{operation}: {name} {x.dtype}; expected float32, float16 or bfloat16 on a GPU; {remedy}")


@triton.jit
def clamp(x, LIMIT: tl.constexpr):
    """Clamps x to [-LIMIT, LIMIT]; NaN stays NaN."""
    x = tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)


IS_COMPILED = tl.constexpr(isinstance(clamp, triton.JITFunction))  # Triton's interpreter knows no assembler


@triton.jit
def invert(v):
    """Computes 1 / v of a normal float32 up to 2**126 in absolute value or an infinite one, and 0 beyond, in one
    instruction instead of a division's nine. Its relative error is at most 2**-23 (PTX, rcp.approx.ftz), against 2**-22
    of a full division."""
    if IS_COMPILED:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [v], tl.float32, True, 1)
    return 1.0 / v

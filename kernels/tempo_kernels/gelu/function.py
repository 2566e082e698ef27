"""gelu: checks, the backend, and the autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.gelu import eager

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """GELU of x + bias.

    Args:
        x: [..., f], float32, bfloat16, float16 or float64, any strides.
        bias: [f] of x's dtype, or None.
        approximate: "none" for the erf form, "tanh" for the tanh form.

    Returns:
        y [..., f] of x's dtype, contiguous. The erf form is torch's F.gelu(x + bias), bit for bit. The tanh form is
        F.gelu of the float32 sum, rounded once: within 5e-7 of Megatron's fused bias_gelu in float32.

    Keeps for backward: y itself (one storage with what the next linear keeps, hence free) and one bit per element.
    Error: next to the minimum that of an exact inverse, which misses GELU' by up to 5.1e-5 (float32), 7.1e-3 (float16)
        and 1.6e-2 (bfloat16) if y is correctly rounded, and by 1.5e-4 in float32 as torch rounds it; elsewhere 2.8e-5.
    Raises: ValueError for a dtype, shape or form that does not fit; RuntimeError on a second derivative.
    """
    if x.dtype not in _DTYPES:
        raise ValueError(f"gelu: x is {x.dtype}; float32, bfloat16, float16 or float64 is wanted; cast it")
    if approximate not in ("none", "tanh"):
        raise ValueError(f'gelu: approximate is {approximate!r}; "none" (erf) or "tanh" is wanted')
    if bias is not None:
        if bias.dim() != 1 or bias.shape != x.shape[-1:]:
            raise ValueError(
                f"gelu: bias has shape {list(bias.shape)} and x {list(x.shape)}; "
                "a bias as long as x's last dimension is wanted; reshape or shard it as x"
            )
        if bias.dtype != x.dtype:
            raise ValueError(f"gelu: bias is {bias.dtype} and x {x.dtype}; cast bias to {x.dtype}")
    return _GELU.apply(x, bias, approximate)


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        y, bits = eager.forward(x, bias, approximate)
        ctx.save_for_backward(y, bits)
        ctx.approximate = approximate
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        y, bits = ctx.saved_tensors
        grad_x, grad_bias = _GELUBackward.apply(grad_y, y, bits, ctx.approximate, ctx.needs_input_grad[1])
        return grad_x, grad_bias, None


class _GELUBackward(torch.autograd.Function):
    """The first derivative, a function of its own so that a second one, through y or grad_y, ends in a clear error."""

    @staticmethod
    def forward(
        ctx: Any, grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str, has_grad_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        grad_x = eager.backward(grad_y, y, bits, approximate)
        if not has_grad_bias:
            return grad_x, None
        return grad_x, grad_x.sum_to_size(y.shape[-1:])  # torch adds 16-bit types up in float32

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError('gelu is not twice differentiable; set tempo.gelu to "off"')

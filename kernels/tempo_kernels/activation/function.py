"""Defines operations y = f(x + bias) that keep x and bias for backward, and not y."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.activation import cpu
from tempo_kernels.activation.activations import ACTIVATIONS
from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only, takes_plain_tensors
from tempo_kernels.opaque import opaque, run_or_simulate
from tempo_kernels.saved import allow_refill

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@takes_plain_tensors
def activate(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Computes f(x + bias) for an activation f of ACTIVATIONS.

    Args:
        x: [..., f], float32, bfloat16, float16 or float64 (on a GPU not float64), any strides.
        bias: [f] of x's dtype, or None.
        activation: a name in ACTIVATIONS; "gelu" is the erf form.

    Returns:
        y [..., f] of x's dtype, contiguous. On a CPU it is torch's activation of x + bias, bit for bit, except that
        "gelu_tanh" adds x and bias in float32 and rounds once.

    Keeps for backward: x and bias, not y; `recompute.drop` can recompute y.
    Error: grad_x's is at most twice torch's own plus one ulp of the largest gradient.
    Raises: ValueError for an activation, dtype or shape that does not fit; RuntimeError on a second derivative.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activate: activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    check_tensors(activation, x, bias)
    return ACTIVATE.apply(activation, x, bias, activation)


def check_tensors(operation: str, x: Tensor, bias: Tensor | None) -> None:
    """Raises ValueError if x has an unsupported dtype, or bias does not fit x."""
    if x.dtype not in _DTYPES:
        raise ValueError(f"{operation}: x is {x.dtype}; expected float32, bfloat16, float16 or float64; cast it")
    if bias is not None and (bias.dim() != 1 or bias.shape != x.shape[-1:] or bias.dtype != x.dtype):
        raise ValueError(
            f"{operation}: bias is {bias.dtype} of shape {list(bias.shape)} and x {x.dtype} of shape {list(x.shape)}; "
            "expected a bias of x's dtype, as long as x's last dimension; cast or shard it as x"
        )


def forward_with_bits(x: Tensor, bias: Tensor | None, activation: str, threshold: float) -> list[Tensor]:
    """Returns [y, bits]: y = f(x + bias) and the bits x + bias >= threshold, eight to a byte, first in the highest bit.

    For use inside an opaque function.
    """
    return list(choose_backend(x, cpu).forward_with_bits(x, bias, activation, threshold))


def shape_gradients(grad_y: Tensor, kept: Tensor, *others: Any) -> list[Tensor]:
    """Returns empty tensors in the shapes of `list_gradients`' results; the last of `others` is has_grad_bias."""
    grad_x, has_grad_bias = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device), others[-1]
    return [grad_x, grad_x.new_empty(kept.shape[-1:])] if has_grad_bias else [grad_x]


def list_gradients(grad_x: Tensor, grad_bias: Tensor | None) -> list[Tensor]:
    """Lists grad_x and, if there is one, grad_bias in grad_x's dtype."""
    if grad_bias is None:
        return [grad_x]
    return [grad_x, grad_bias if grad_bias.dtype == grad_x.dtype else grad_bias.to(grad_x.dtype)]


class OperationOfInput:
    """The operation y = f(x + bias) for the functions f of one folder, differentiated from x and bias.

    Args:
        name: the folder's name in torch.ops.tempo_kernels.
        cpu: the folder's cpu.py. Like the kernel.py beside it, it defines forward(x, bias, activation, out=None) -> y
            and backward(grad_y, x, bias, activation, has_grad_bias) -> (grad_x, grad_bias or None).
        columns_per_output: how many columns of x make one column of y.
    """

    def __init__(self, name: str, cpu: ModuleType, columns_per_output: int = 1) -> None:
        def shape_output(x: Tensor, bias: Tensor | None, activation: str) -> list[Tensor]:
            shape = (*x.shape[:-1], x.size(-1) // columns_per_output) if columns_per_output > 1 else x.shape
            return [torch.empty(shape, dtype=x.dtype, device=x.device)]

        @opaque(f"{name}(Tensor x, Tensor? bias, str activation) -> Tensor[]", shape_output)
        def forward(x: Tensor, bias: Tensor | None, activation: str) -> list[Tensor]:
            return [choose_backend(x, cpu).forward(x, bias, activation)]

        @opaque(
            f"{name}_backward(Tensor grad_y, Tensor x, Tensor? bias, str activation, bool has_grad_bias) -> Tensor[]",
            shape_gradients,
        )
        def backward(
            grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
        ) -> list[Tensor]:
            return list_gradients(*choose_backend(x, cpu).backward(grad_y, x, bias, activation, has_grad_bias))

        def refill(x: Tensor, bias: Tensor | None, activation: str, out: Tensor) -> None:
            choose_backend(x, cpu).forward(x, bias, activation, out)

        self._forward, self._backward, self._refill = forward, backward, refill

    def apply(self, operation: str, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """Returns y, differentiable; errors name it `operation`."""
        y: Tensor = _OfInput.apply(x, bias, activation, self, operation)
        return y

    def compute(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """Returns y."""
        return self._forward(x, bias, activation)[0]

    def differentiate(
        self, grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns grad_x and, with has_grad_bias, grad_bias."""
        grad_x, *grad_bias = self._backward(grad_y, x, bias, activation, has_grad_bias)
        return grad_x, grad_bias[0] if grad_bias else None

    def refill(self, x: Tensor, bias: Tensor | None, activation: str, out: Tensor) -> None:
        """Writes the same y, bit for bit, to out."""
        with torch.no_grad():
            run_or_simulate(self._refill, x, bias, activation, out)


class _OfInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, activation: str, room: OperationOfInput, operation: str
    ) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.activation, ctx.room, ctx.operation = activation, room, operation
        y = room.compute(x, bias, activation)
        allow_refill(ctx, y, _refill)
        return y

    @staticmethod
    @first_derivative_only(lambda ctx: ctx.operation, "activation")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        return *ctx.room.differentiate(grad_y, x, bias, ctx.activation, ctx.needs_input_grad[1]), None, None, None


def _refill(ctx: Any, out: Tensor) -> None:
    ctx.room.refill(*ctx.saved_tensors, ctx.activation, out)


ACTIVATE = OperationOfInput("activate", cpu)
"""The operation of this room, on which others may build."""

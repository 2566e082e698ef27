"""Activation modules of torch and of transformers, by what they compute."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tempo_kernels.activation import ACTIVATIONS, activate
from tempo_kernels.recompute import recompute
from tempo_torch.replace import Replaced

IN_PLACE = [name for name, activation in ACTIVATIONS.items() if activation.slope_of_output is not None]
"""The activations that can keep their output."""
# These are not elementwise, or torch differentiates them from their output already.
_NO_ACTIVATIONS = (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.ReLU, nn.Tanh, nn.Sigmoid)


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


class ReplacedActivation(Replaced):
    """An activation of Tempo.

    Keeps for backward: with keep "recompute" its input, and linears that are Tempo's drop the output; with "inplace"
    the output and, for GELU, a bit per element.
    """

    function: str
    keep: str

    def forward(self, x: Tensor) -> Tensor:
        """f(x)."""
        if not torch.is_grad_enabled() or not x.requires_grad:
            return super().forward(x)  # type: ignore[misc,no-any-return]
        return apply_activation(x, self.function, self.keep)


def apply_activation(x: Tensor, function: str, keep: str) -> Tensor:
    """Applies the activation `function` to x [..., f]."""
    if function == "quick_gelu":
        return quick_gelu(x) if torch.compiler.is_compiling() else recompute(quick_gelu, x)
    return activate(x, None, function, keep=keep)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    # torch differentiates relu from its output.
    **{name: activation.value for name, activation in ACTIVATIONS.items() if name != "relu"},
}
"""The activations that a module may have to become Tempo's."""


def name_function(function: Callable[[Tensor], Tensor]) -> str | None:
    """Returns the name of the activation that a function computes, by its values, since models write the same one in
    many ways; None where it is none that Tempo has."""
    x = torch.tensor([*range(-40, 41), 200, -200], dtype=torch.float64, device="cpu") / 8
    try:
        with torch.random.fork_rng(devices=[]):
            y = function(x)
        return next((name for name, known in FUNCTIONS.items() if torch.allclose(y, known(x), 1e-8, 1e-10)), None)
    except Exception:  # a foreign function may raise anything
        return None


def is_activation(module: nn.Module) -> bool:
    """Whether a module is an elementwise activation that keeps its input in torch, known to Tempo or not."""
    if isinstance(module, _NO_ACTIVATIONS):
        return False
    activations: Any = sys.modules.get("transformers.activations")
    home = type(module).__module__
    return home == "torch.nn.modules.activation" or (activations is not None and home == activations.__name__)

"""The layers of the kernel package, by the names under which transformers registers what they replace.

A layer without parameters of its own has a forward only: `kernelize` gives it to the stock module, whose parameters it
reads. `GatedMLP` replaces a whole module, so `GatedMLPLayout` has the parameters.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tempo_kernels.gelu import gelu
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.silu import silu
from tempo_torch.linear import drop_input
from tempo_torch.norm import choose_keep

_keep: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def _get_keep(norm: nn.Module) -> str:
    """Returns what `choose_keep` says of a norm in its first forward; a compiled graph keeps the input."""
    if torch.compiler.is_compiling():
        return "recompute"
    if norm not in _keep:
        _keep[norm] = choose_keep(norm)
    return _keep[norm]


class RMSNorm(nn.Module):
    """RMSNorm. Keeps its output, which the next linear keeps anyway, and 4 bytes a row; stock keeps x and more."""

    can_torch_compile = True
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """y [..., h] of hidden_states [..., h], in its dtype: rounded once, where the stock forward rounds twice."""
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return rms_norm(hidden_states, self.weight, eps, keep=_get_keep(self))


class LayerNorm(nn.Module):
    """nn.LayerNorm over the last dimension. Keeps its output, which the next linear keeps anyway, and 4 bytes a row."""

    can_torch_compile = True
    weight: Tensor
    bias: Tensor
    eps: float
    normalized_shape: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        """y [..., h] of input [..., h]."""
        if len(self.normalized_shape) != 1 or self.weight is None or input.dtype != self.weight.dtype:
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return layer_norm(input, self.weight, self.bias, self.eps, keep=_get_keep(self))


class GeLU(nn.Module):
    """GELU, the erf form. Keeps its output, which the next linear keeps anyway, and a bit an element."""

    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        """gelu(input) [..., f]."""
        return gelu(input)


class GeluTanh(nn.Module):
    """GELU, the tanh form: also for NewGELU and FastGELU. Keeps as `GeLU` does."""

    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        """gelu(input) [..., f]."""
        return gelu(input, approximate="tanh")


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), as LlamaMLP and its many copies. Keeps gate(x) and up(x); stock keeps silu(gate(x))
    and the product, too. They are made again in backward."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """y [..., h] of x [..., h]."""
        product = silu(self.gate_proj(x)) * self.up_proj(x)
        y: Tensor = self.down_proj(product)
        drop_input(product, y)
        return y


class GatedMLPLayout(nn.Module):
    """The parameters of `GatedMLP`, by the names of LlamaMLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ValueError(
                f'hidden_act is "{config.hidden_act}"; GatedMLP has "silu" only; leave the MLP out of the mapping'
            )
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

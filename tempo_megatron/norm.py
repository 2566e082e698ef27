"""The norms of Megatron's layer and block: TempoLayerNorm, and torch's own with sequence parallelism for stock runs."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from tempo_kernels.norm import layer_norm


class TorchLayerNorm(torch.nn.Module):
    """torch's LayerNorm in Megatron's norm slot, sequence parallelism and zero-centred gamma included.

    Megatron's own wrapper around torch's LayerNorm refuses sequence parallelism; without Apex or Transformer Engine
    this one stands in its place in stock runs, and it is what `norm="off"` means there.

    Args:
        config: Megatron's; `sequence_parallel` and `layernorm_zero_centered_gamma` are honoured.
        hidden_size: size of the last dimension.
        eps: added to the variance.

    Keeps for backward: its input, mean and rstd (torch's own function).
    """

    returns_residual = False

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
        **_: Any,
    ) -> None:
        super().__init__()
        if config.normalization != "LayerNorm":
            raise ValueError(f"normalization is {config.normalization}; {type(self).__name__} is for LayerNorm only")
        self.config = config
        self.hidden_size = (hidden_size,)
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.reset_parameters()
        self.sequence_parallel = config.sequence_parallel
        # Each rank of a sequence-parallel group sees a part of the tokens: both gradients have to be summed over it.
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """weight 1 (0 where gamma is zero-centred), bias 0."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """y of x's shape and dtype."""
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return F.layer_norm(x, self.hidden_size, weight, self.bias, self.eps)


class TempoLayerNorm(TorchLayerNorm):
    """LayerNorm in Megatron's norm slot that keeps its output instead of its input.

    Parameters, their names, flags and checkpoint keys are those of Megatron's norms.

    Keeps for backward: y (shared with the next linear), rstd (4 bytes per token), and the normalised input of
        channels whose gamma is too small beside beta; see `tempo_kernels.norm.layer_norm`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """y of x's shape and dtype, in memory of its own."""
        return layer_norm(x, self.weight, self.bias, self.eps, zero_centered=self.zero_centered_gamma)

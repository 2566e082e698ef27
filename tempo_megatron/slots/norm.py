"""The norms of Megatron's layer and block: Tempo's, and torch's own with sequence parallelism for stock runs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from tempo_kernels.norm import layer_norm, rms_norm

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class TorchNorm(torch.nn.Module):
    """torch's LayerNorm or RMSNorm in Megatron's norm slot, sequence parallelism and zero-centred gamma included.

    Megatron's own wrapper around torch's norms refuses both. Without Apex and Transformer Engine, stock runs use this
    class instead: it is what `norm="off"` means there.

    Args:
        config: Megatron's; `normalization`, `sequence_parallel` and `layernorm_zero_centered_gamma` are honoured.
        hidden_size: size of the last dimension.
        eps: added to the variance.

    Keeps for backward: its input, mean and rstd (torch's own function).
    """

    returns_residual = False
    bias: torch.nn.Parameter | None

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
        if config.normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization is {config.normalization}; expected {' or '.join(NORMALIZATIONS)}")
        self.config = config
        self.hidden_size = (hidden_size,)
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        has_bias = config.normalization == "LayerNorm"
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype)) if has_bias else None
        self.reset_parameters()
        self.sequence_parallel = config.sequence_parallel
        # Each rank of a sequence-parallel group sees part of the tokens, so Megatron must sum these gradients.
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """weight 1 (0 where gamma is zero-centred), bias 0."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """y of x's shape and dtype."""
        gamma = self.weight + 1 if self.zero_centered_gamma else self.weight
        if self.bias is None:
            return F.rms_norm(x, self.hidden_size, gamma, self.eps)
        return F.layer_norm(x, self.hidden_size, gamma, self.bias, self.eps)


class TempoNorm(TorchNorm):
    """LayerNorm or RMSNorm in Megatron's norm slot that keeps its output instead of its input.

    Parameters, their names, flags and checkpoint keys are those of Megatron's norms.

    Keeps for backward: y (shared with the next linear), rstd (4 bytes per token), and the normalised input of
        channels whose gamma is too small for their beta; see `tempo_kernels.norm.layer_norm`.
    """

    keep: ClassVar[str] = "inplace"

    def forward(self, x: Tensor) -> Tensor:
        """y of x's shape and dtype (of weight's, where x is a float32 residual), in memory of its own."""
        # A head's row is so short that its statistics would be up to 1 / 32 of it.
        keep = "recompute statistics" if self.keep == "recompute" and x.dim() == 4 else self.keep
        settings = {"zero_centered": self.zero_centered_gamma, "keep": keep}
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, **settings)
        return layer_norm(x, self.weight, self.bias, self.eps, **settings)


class TempoRecomputeNorm(TempoNorm):
    """TempoNorm that keeps its input, rstd and, as a LayerNorm, the mean: exact for any gamma. If a
    TempoColumnParallelLinear follows, it drops the output after use; before any other linear the output stays too, as
    in stock. Of queries and keys [s, b, heads, d] it keeps the input alone."""

    keep = "recompute"

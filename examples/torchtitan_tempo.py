"""Overrides of torchtitan: norms and gated MLPs, dense and of experts, that keep less for backward.

    PYTHONPATH=examples torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b \\
        --override.imports torchtitan_tempo.norm,torchtitan_tempo.feed_forward,torchtitan_tempo.experts

Parameters have stock's names, so checkpoints fit both ways. Where tensors are DTensors, as under tensor parallelism, a
module runs as stock does. torchtitan's models have no dropout, and its loss makes logits in chunks: both stay stock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.nn_modules import RMSNorm

from tempo_kernels.norm import rms_norm
from tempo_kernels.silu import silu
from tempo_torch.linear import drop_input
from tempo_torch.norm import choose_keep


class TempoRMSNorm(RMSNorm):
    """RMSNorm that keeps its output, which the next linear keeps anyway, in place of its input."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    keep: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        """y [..., h] of x [..., h]."""
        if torch.compiler.is_compiling() or isinstance(x, DTensor) or x.dtype != self.weight.dtype:
            return super().forward(x)  # type: ignore[no-any-return]
        if self.keep is None:
            self.keep = choose_keep(self)
        return rms_norm(x, self.weight, self.eps, keep=self.keep)


class TempoFeedForward(FeedForward):
    """w2(silu(w1(x)) * w3(x)) that keeps w1(x) and w3(x) only: the rest is made again in backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        """y [..., h] of x [..., h]."""
        gate, up = self.w1(x), self.w3(x)
        if torch.compiler.is_compiling() or isinstance(gate, DTensor):
            return self.w2(torch.nn.functional.silu(gate) * up)  # type: ignore[no-any-return]
        product = silu(gate) * up
        y: Tensor = self.w2(product)
        drop_input(product, y)
        return y


class TempoGroupedExperts(GroupedExperts):
    """Experts that keep what their first two products make, as `TempoFeedForward` does."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """y [r, h] of the tokens x [r, h] of each expert, one expert's behind the other's."""
        if torch.compiler.is_compiling():
            return super().forward(x, num_tokens_per_expert)  # type: ignore[no-any-return]
        weights = (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        local = (each.to_local() if isinstance(each, DTensor) else each for each in weights)
        first, third, second = (each.bfloat16().transpose(-2, -1) for each in local)
        ends, tokens = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32), x.bfloat16()
        gate = self._grouped_mm(A=tokens, B_t=first, offs=ends)
        product = silu(gate) * self._grouped_mm(A=tokens, B_t=third, offs=ends)
        y: Tensor = self._grouped_mm(A=product, B_t=second, offs=ends)
        drop_input(product, y)
        return y.type_as(x)


@override(target=RMSNorm.Config, description="RMSNorm that keeps its output")
def norm(config: RMSNorm.Config) -> Any:
    return derive(config, TempoRMSNorm.Config)


@override(target=FeedForward.Config, exact=True, description="gated MLP that keeps what its first linears make")
def feed_forward(config: FeedForward.Config) -> Any:
    return derive(config, TempoFeedForward.Config)


@override(target=GroupedExperts.Config, exact=True, description="experts that keep what their first products make")
def experts(config: GroupedExperts.Config) -> Any:
    return derive(config, TempoGroupedExperts.Config)

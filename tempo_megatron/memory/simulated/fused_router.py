"""Stands in for Transformer Engine's kernels of a router (--moe-router-fusion), on fake tensors.

References are to Transformer Engine at d0067d0d, transformer_engine/pytorch/router.py; kernels compute in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor


@contextlib.contextmanager
def fuse_routing() -> Iterator[None]:
    """Routers that are told to fuse (TransformerConfig.moe_router_fusion) find kernels inside."""
    names: dict[str, Any] = {
        "HAVE_TE": True,
        "fused_topk_with_score_function": _choose,
        "fused_compute_score_for_moe_aux_loss": _score,
        "fused_moe_aux_loss": _find_loss,
    }
    before = {name: getattr(moe_utils, name, None) for name in names}
    moe_utils.__dict__.update(names)
    try:
        yield
    finally:
        moe_utils.__dict__.update(before)


def _choose(logits: Tensor, **_: Any) -> Any:
    return _Choice.apply(logits)


def _score(logits: Tensor, topk: int, score_function: str) -> Any:
    return _Scores.apply(logits)


def _find_loss(probs: Tensor, tokens_per_expert: Tensor, **_: Any) -> Any:
    return _Loss.apply(probs, tokens_per_expert)


class _Choice(torch.autograd.Function):
    """FusedTopkScoreFunction: the probabilities and the map of chosen experts, which it keeps beside scores."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.empty_like(logits, dtype=torch.bool)
        ctx.mark_non_differentiable(chosen)
        ctx.save_for_backward(chosen, torch.empty_like(logits, dtype=torch.float32))
        return torch.empty_like(logits), chosen

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        return torch.empty_like(grad)


class _Scores(torch.autograd.Function):
    """FusedComputeScoresForMoEAuxLoss: a map and float32 scores, of which it keeps a like tensor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(torch.empty_like(logits, dtype=torch.float32))
        ctx.dtype = logits.dtype
        chosen = torch.empty_like(logits, dtype=torch.bool)
        ctx.mark_non_differentiable(chosen)
        return chosen, torch.empty_like(logits, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad, dtype=ctx.dtype)


class _Loss(torch.autograd.Function):
    """FusedAuxLoss: a number, of which it keeps a constant and how many tokens each expert has."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, tokens_per_expert: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = probabilities.shape, probabilities.dtype
        ctx.save_for_backward(probabilities.new_empty((), dtype=torch.float32), tokens_per_expert)
        return probabilities.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty(ctx.shape, dtype=ctx.dtype), None

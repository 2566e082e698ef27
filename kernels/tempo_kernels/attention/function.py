"""attention: checks and the autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tempo_kernels.attention import eager
from tempo_kernels.philox import effective_probability


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    softmax_scale: float,
    dropout_p: float = 0.0,
    dropout_key: int = 0,
    first_sample: int = 0,
    first_head: int = 0,
) -> Tensor:
    """softmax(softmax_scale * q k^T) v with dropout on the probabilities, in Megatron's layout.

    Args:
        q: [sq, b, a, d], floating point; any strides, the last dimension's stride 1 is fastest.
        k, v: [sk, b, g, d] of q's dtype, where g divides a (grouped-query attention).
        causal: query i sees keys up to i + sk - sq; needs sq <= sk.
        mask: bool [b or 1, a or 1, sq or 1, sk], True where a key is hidden; a row whose keys are all hidden
            attends to all of them equally, as in Megatron.
        softmax_scale: multiplies the scores.
        dropout_p: in [0, 1); realised within 2**-16.
        dropout_key: 64 bits, one per seed and layer (`tempo_kernels.philox.derive_key`).
        first_sample, first_head: global indices of q[:, 0] and q[:, :, 0].

    Returns:
        [sq, b, a, d], contiguous.

    Keeps for backward: q, k, v, and a logsumexp of 4 bytes per query and head (8 for float64); also `mask` where
        one is given, which is the caller's tensor.
    Error: products in the inputs' dtype, softmax in float32; at most twice the unfused torch computation's own error.
    Raises: ValueError for shapes, dtypes or a probability that do not fit; RuntimeError on a second derivative.
    """
    _check(q, k, v, causal, mask)
    effective_probability(dropout_p)
    settings = eager.Settings(causal, softmax_scale, dropout_p, dropout_key, first_sample, first_head)
    return _Attention.apply(q, k, v, mask, settings)


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dimensions; [s, b, heads, d] is wanted for each"
        )
    if not q.is_floating_point() or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; one floating-point dtype is wanted; cast them")
    if k.shape != v.shape or k.size(1) != q.size(1) or k.size(3) != q.size(3) or k.size(2) < 1 or q.size(2) % k.size(2):
        raise ValueError(
            f"q, k, v have shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)}; [sq, b, a, d] and twice "
            "[sk, b, g, d] with g a divisor of a are wanted"
        )
    if k.size(0) == 0 and q.size(0) > 0:
        raise ValueError("k and v are empty; at least one key is wanted")
    if causal and q.size(0) > k.size(0):
        raise ValueError(
            f"causal attention of {q.size(0)} queries over {k.size(0)} keys: the first queries would see no key; "
            "give at least as many keys or causal=False"
        )
    if mask is not None:
        wanted = [(q.size(1), 1), (q.size(2), 1), (q.size(0), 1), (k.size(0),)]
        if (
            mask.dtype != torch.bool
            or mask.dim() != 4
            or any(n not in w for n, w in zip(mask.shape, wanted, strict=True))
        ):
            raise ValueError(
                f"mask is {mask.dtype} of shape {list(mask.shape)}; bool, True where hidden, broadcastable to "
                f"{[q.size(1), q.size(2), q.size(0), k.size(0)]} with all keys is wanted"
            )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: eager.Settings) -> Tensor:
        out, logsumexp = eager.forward(q, k, v, mask, settings)
        ctx.save_for_backward(q, k, v, logsumexp, mask)
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, logsumexp, mask = ctx.saved_tensors
        grads = eager.backward(grad_out, q, k, v, logsumexp, mask, ctx.settings)
        return *grads, None, None

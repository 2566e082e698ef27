"""Defines `attention`: chooses the backend and holds the autograd.Function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.attention import cpu, cpu_flash, documents
from tempo_kernels.attention.checks import check_settings, check_tensors
from tempo_kernels.attention.documents import Documents, check_documents
from tempo_kernels.attention.settings import OPERANDS, Inputs, Kept, Settings
from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only
from tempo_kernels.opaque import call_untraced, is_traced, opaque, separate, without_autocast
from tempo_kernels.transforms import takes_plain_tensors

PREFERS_SDPA = True
"""Whether torch's scaled_dot_product_attention runs instead of our kernels, where it can. Which of them is faster has
not been measured yet."""


_DOCUMENTS = "Tensor? cu_seqlens, Tensor? cu_seqlens_k, Tensor? document_samples"


@takes_plain_tensors
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    softmax_scale: float,
    dropout_p: float = 0.0,
    dropout_key: int | Tensor = 0,
    first_sample: int | Tensor = 0,
    first_head: int = 0,
    first_row: int = 0,
    first_column: int | None = None,
    window_size: tuple[int, int] | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    document_samples: Tensor | None = None,
    form: str = "flash",
) -> Tensor:
    """softmax(softmax_scale * q k^T) v with dropout on the probabilities, in Megatron's layout.

    Args:
        q: [sq, b, a, d], floating point; any strides, the last dimension's stride 1 is fastest.
        k, v: [sk, b, g, d] and [sk, b, g, dv] of q's dtype, where g divides a (grouped-query attention).
        causal: query i sees keys up to i + sk - sq; needs sq <= sk, unless first_column is given.
        mask: bool [b or 1, a or 1, sq or 1, sk], True where a key is hidden; a row whose keys are all hidden
            attends to all of them equally, as in Megatron.
        softmax_scale: multiplies the scores; positive.
        dropout_p: in [0, 1); realised within 2**-16.
        dropout_key: 64 bits, one per seed and layer (`tempo_kernels.philox.derive_key`).
        first_sample, first_head, first_row: global indices of q[:, 0], q[:, :, 0] and q[0], where q is a part.
        first_column: global index of k[0], where k and v are a part of the keys, as under context parallelism. causal
            and window_size then go by position: query i is at first_row + i, key j at first_column + j. None where the
            keys begin at 0 and the last query is at the last key.
        window_size: (left, right): query i sees keys i + sk - sq - left to i + sk - sq + right; -1 is no limit.
        key_lengths: int [b], how many keys a sample has; those behind them are not read, and their gradients are 0.
            A number outside of [0, sk] is refused on a CPU; on a GPU, which is not waited for, it counts as nearest.
        cu_seqlens: int32 [n + 1], where a packed row's n documents begin and end: document i is q[cu_seqlens[i] :
            cu_seqlens[i + 1]], and sees its own keys only; causal and window_size count within it. b is 1. Tokens of no
            document get 0 and pass no gradient on. Neither mask, key_lengths nor first_column may be given beside it.
        cu_seqlens_k: int32 [n + 1], the same of k and v, where it differs.
        document_samples: int64 [n], the global index of each document's sample: its mask of dropout is then that of the
            document in a row of its own. None: the mask is that of the packed row, sample first_sample.
        form: "flash" keeps no [sq, sk] tensor. "softmax" keeps the softmax's output and draws the dropout's again.

    dropout_key and first_sample may each be a 0-dim int64 tensor on q's device (the key's 64 bits as a signed number),
    which must not change between a forward and its backward.

    Returns:
        [sq, b, a, dv], contiguous. A query that sees no key, by position, window_size and key_lengths, gets 0 and
        passes no gradient on.

    Under autocast nothing is cast: the inputs' dtype is that of the products, in forward and in backward.

    Keeps for backward: q, k, v, and a logsumexp of 4 bytes per query and head (8 for float64). On a GPU, and on a CPU
        in 16 bits without dropout, it also keeps the output, which the next linear keeps anyway. form="softmax" keeps a
        [b, a, sq, sk] tensor of q's dtype in place of logsumexp and output. Masks, lengths, boundaries and samples,
        where given, are kept as the caller's tensors.
    Error: products in the inputs' dtype, softmax in float32; at most twice the unfused torch computation's own error.
        On a GPU, a 16-bit out is rounded before a row's sum of out * grad_out is taken, as in FlashAttention. Where a
        softmax is saturated (a single key is seen, or one score is far above the others), gradients of scores that
        should be about 0 are therefore one rounding of a product.
    Raises: ValueError for shapes, dtypes or a probability that do not fit, and on a GPU for cu_seqlens, which has no
        kernel yet, and with dropout for a first_column that is not a multiple of 8; RuntimeError on a second
        derivative.
    """
    draw = (dropout_p, dropout_key, first_sample, first_head)
    settings = Settings(causal, softmax_scale, *draw, window_size, first_row, first_column)
    inputs = Inputs(q, k, v, mask, key_lengths)
    packed, is_packed = Documents(cu_seqlens, cu_seqlens_k, document_samples), cu_seqlens is not None
    check_tensors(inputs, settings, is_packed)
    check_settings(q, settings, form)
    check_documents(packed, inputs, settings)
    backend = find_backend(q, k, v, causal, mask, dropout_p, window_size, key_lengths, first_column, form, is_packed)
    if backend == "triton" and is_packed:
        raise ValueError('attention: cu_seqlens is given, which has no kernel on a GPU; give form="softmax"')
    if backend == "sdpa":
        return _run_sdpa(q, k, v, causal, softmax_scale)
    tensors = (q, *separate(k, v), mask, key_lengths, *packed)
    out: Tensor = _Attention.apply(settings, form == "softmax", *tensors)
    return out


def find_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    window_size: tuple[int, int] | None = None,
    key_lengths: Tensor | None = None,
    first_column: int | None = None,
    form: str = "flash",
    is_packed: bool = False,
) -> str:
    """Names the backend of this call: "sdpa" (torch's flash attention), "triton" (our kernels) or "torch"."""
    if not q.is_cuda or form == "softmax":
        return "torch"
    if dropout_p:
        return "triton"
    is_plain = mask is None and key_lengths is None and window_size in (None, (-1, -1), (-1, 0))
    is_plain &= (causal or window_size != (-1, 0)) and first_column is None and not is_packed
    # torch aligns a causal mask to the first key, and its kernels return the output in q's memory order. Where q is
    # dense or has one sample, that is our order too, and the next linear keeps the output without a copy.
    fits = (not causal or q.size(0) == k.size(0)) and (q.size(1) == 1 or q.is_contiguous()) and q.numel() > 0
    fits &= q.dtype in (torch.float16, torch.bfloat16) and q.size(3) % 8 == 0
    fits &= q.size(3) == v.size(3) <= 256
    if PREFERS_SDPA and is_plain and fits and torch.backends.cuda.flash_sdp_enabled() and torch.cuda.is_available():
        return "sdpa" if torch.cuda.get_device_capability(q.device) >= (8, 0) else "triton"
    return "triton"


def describe(device_type: str, form: str = "flash") -> str:
    """Describes the backend of a "cuda" or "cpu" device for a banner; `find_backend` names that of one call."""
    if device_type != "cuda" or form == "softmax":
        return "plain torch"
    if not PREFERS_SDPA:
        return "triton"
    return "triton, or torch's flash attention for a 16-bit dtype with neither dropout nor a mask"


def _run_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float) -> Tensor:
    # [b, heads, s, d]
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    with without_autocast(q.device.type):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=q.size(1) != k.size(1)
        )
    return out.permute(2, 0, 1, 3).contiguous()


def _make_empty_results(*operands: Any) -> list[Tensor]:
    q, k, v = operands[:3]
    out = torch.empty(*q.shape[:-1], v.size(-1), dtype=q.dtype, device=q.device)
    statistics = q.new_empty(q.size(1), q.size(2), q.size(0), dtype=torch.promote_types(q.dtype, torch.float32))
    return [out, q.new_empty(*statistics.shape, k.size(0)) if operands[-1] else statistics]


@opaque(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key_lengths, {_DOCUMENTS}, {OPERANDS}, "
    "bool is_softmax) -> Tensor[]",
    _make_empty_results,
)
def _forward(*operands: Any) -> list[Tensor]:
    """Calls `_compute` with an operator's flat operands."""
    return list(_compute(*_read_operands(operands)))


def _compute(inputs: Inputs, packed: Documents, settings: Settings, is_softmax: bool) -> tuple[Tensor, Tensor]:
    """Returns out and the logsumexp, or with is_softmax out and the probabilities."""
    q, k = inputs.q, inputs.k
    kept = q.new_zeros(q.size(1), q.size(2), q.size(0), k.size(0)) if is_softmax else None
    if packed.cu_seqlens is not None:
        out, logsumexp = documents.forward(inputs, packed, settings, kept)
    elif is_softmax:
        out, logsumexp = cpu.forward(inputs, settings, kept)
    else:
        out, logsumexp = choose_backend(q, cpu).forward(inputs, settings)
    return out, logsumexp if kept is None else kept


def _make_empty_gradients(*operands: Any) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in operands[3:6]]


@opaque(
    "attention_backward(Tensor grad_out, Tensor? out, Tensor kept, Tensor q, Tensor k, Tensor v, Tensor? mask, "
    f"Tensor? key_lengths, {_DOCUMENTS}, {OPERANDS}, bool is_softmax) -> Tensor[]",
    _make_empty_gradients,
)
def _backward(grad_out: Tensor, out: Tensor | None, kept: Tensor, *operands: Any) -> list[Tensor]:
    """Calls `_differentiate` with an operator's flat operands."""
    return list(_differentiate(grad_out, out, kept, *_read_operands(operands)))


def _differentiate(
    grad_out: Tensor,
    out: Tensor | None,
    kept: Tensor,
    inputs: Inputs,
    packed: Documents,
    settings: Settings,
    is_softmax: bool,
) -> tuple[Tensor, ...]:
    """Returns grad_q, grad_k and grad_v from what forward kept."""
    results = Kept(None, None, kept) if is_softmax else Kept(out, kept)
    if packed.cu_seqlens is not None:
        return documents.backward(grad_out, inputs, packed, results, settings)
    backend = cpu if is_softmax else choose_backend(inputs.q, cpu)
    grads: tuple[Tensor, ...] = backend.backward(grad_out, inputs, results, settings)
    return grads


def _read_operands(operands: tuple[Any, ...]) -> tuple[Inputs, Documents, Settings, bool]:
    num_tensors = len(Inputs._fields + Documents._fields)
    return *_read_tensors(operands[:num_tensors]), Settings.of(*operands[num_tensors:-1]), operands[-1]


def _read_tensors(tensors: Sequence[Any]) -> tuple[Inputs, Documents]:
    num_inputs = len(Inputs._fields)
    return Inputs(*tensors[:num_inputs]), Documents(*tensors[num_inputs:])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Settings, is_softmax: bool, *tensors: Any) -> Tensor:
        inputs, packed = _read_tensors(tensors)
        ctx.settings, numbers = settings.split()
        ctx.is_softmax = is_softmax
        if is_traced(inputs.q):
            out, kept = _forward(*tensors, *settings.operands, is_softmax)
        else:
            out, kept = call_untraced(_compute, inputs.q, inputs, packed, settings, is_softmax)
        # The softmax form and the CPU's blocks compute whole rows again: only the kernels and torch's own need out.
        needs_out = documents.keeps_out if packed.cu_seqlens is not None else cpu_flash.can_run_backward
        kept_out = out if not is_softmax and (inputs.q.is_cuda or needs_out(inputs, settings)) else None
        ctx.save_for_backward(kept_out, kept, *tensors, *numbers)
        return out

    @staticmethod
    @first_derivative_only("attention", "attention")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        out, kept, *tensors, key, first_sample = ctx.saved_tensors
        settings, is_softmax = ctx.settings.join(key, first_sample), ctx.is_softmax
        if is_traced(grad_out):
            grads = _backward(grad_out, out, kept, *tensors, *settings.operands, is_softmax)
        else:
            inputs, packed = _read_tensors(tensors)
            grads = call_untraced(_differentiate, grad_out, grad_out, out, kept, inputs, packed, settings, is_softmax)
        return None, None, *grads, *[None] * (len(tensors) - 3)

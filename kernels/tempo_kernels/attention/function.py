"""attention: checks and the autograd.Function."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.attention import cpu
from tempo_kernels.attention.settings import OPERANDS, Settings
from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only
from tempo_kernels.opaque import opaque, separate, without_autocast
from tempo_kernels.philox import check_place, effective_probability

PREFERS_SDPA = True
"""Whether torch's scaled_dot_product_attention runs where it can, instead of our kernels. Which is faster is not
measured yet; the choice waits for that."""

FORMS = ("flash", "softmax")


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
    window_size: tuple[int, int] | None = None,
    key_lengths: Tensor | None = None,
    form: str = "flash",
) -> Tensor:
    """softmax(softmax_scale * q k^T) v with dropout on the probabilities, in Megatron's layout.

    Args:
        q: [sq, b, a, d], floating point; any strides, the last dimension's stride 1 is fastest.
        k, v: [sk, b, g, d] of q's dtype, where g divides a (grouped-query attention).
        causal: query i sees keys up to i + sk - sq; needs sq <= sk.
        mask: bool [b or 1, a or 1, sq or 1, sk], True where a key is hidden; a row whose keys are all hidden
            attends to all of them equally, as in Megatron.
        softmax_scale: multiplies the scores; positive.
        dropout_p: in [0, 1); realised within 2**-16.
        dropout_key: 64 bits, one per seed and layer (`tempo_kernels.philox.derive_key`).
        first_sample, first_head: global indices of q[:, 0] and q[:, :, 0].
        window_size: (left, right): query i sees keys i + sk - sq - left to i + sk - sq + right; -1 is no limit.
        key_lengths: int [b], how many keys a sample has; those behind them are not read, and their gradients are 0.
        form: "flash" keeps no [sq, sk] tensor. "softmax" keeps the softmax's output and draws the dropout's again.

    dropout_key and first_sample may each be a 0-dim int64 tensor on q's device (the key's 64 bits as a signed number),
    which must not change between a forward and its backward.

    Returns:
        [sq, b, a, d], contiguous. A query that by window_size and key_lengths sees no key gets 0, and passes no
        gradient on.

    Under autocast nothing is cast: the inputs' dtype is that of the products, in forward and in backward.

    Keeps for backward: q, k, v, and a logsumexp of 4 bytes per query and head (8 for float64), on a GPU also the
        output, which the next linear keeps anyway; with form="softmax" instead of logsumexp and output a
        [b, a, sq, sk] tensor of q's dtype. Also `mask` and `key_lengths` where given, which are the caller's tensors.
    Error: products in the inputs' dtype, softmax in float32; at most twice the unfused torch computation's own error.
        Of a 16-bit type on a GPU, the sum over a row of out * grad_out is of the rounded out, as in FlashAttention:
        wherever a softmax is saturated (a single key is seen, or one score is far above the others), gradients of
        scores that should be about 0 are one rounding of a product.
    Raises: ValueError for shapes, dtypes or a probability that do not fit; RuntimeError on a second derivative.
    """
    _check(q, k, v, causal, mask)
    settings = Settings(causal, softmax_scale, dropout_p, dropout_key, first_sample, first_head, window_size)
    _check_settings(q, settings, key_lengths, form)
    runs = backend(q, k, causal, mask, dropout_p, window_size, key_lengths, form)
    if runs == "sdpa":
        return _sdpa(q, k, v, causal, softmax_scale)
    return _Attention.apply(q, *separate(k, v), mask, key_lengths, settings, form == "softmax")


def backend(
    q: Tensor,
    k: Tensor,
    causal: bool,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    window_size: tuple[int, int] | None = None,
    key_lengths: Tensor | None = None,
    form: str = "flash",
) -> str:
    """What `attention` runs for these: "sdpa" (torch's flash attention), "triton" (our kernels) or "torch"."""
    if not q.is_cuda or form == "softmax":
        return "torch"
    is_plain = dropout_p == 0 and mask is None and key_lengths is None and window_size in (None, (-1, -1), (-1, 0))
    is_plain &= causal or window_size != (-1, 0)
    # torch aligns a causal mask to the first key. Its kernels write what they return in the order of q's memory, which
    # is ours, without a copy for the next linear to keep, where that is dense or of one sample.
    fits = (not causal or q.size(0) == k.size(0)) and (q.size(1) == 1 or q.is_contiguous()) and q.numel() > 0
    fits &= q.dtype in (torch.float16, torch.bfloat16) and q.size(3) % 8 == 0 and q.size(3) <= 256
    if PREFERS_SDPA and is_plain and fits and torch.backends.cuda.flash_sdp_enabled() and torch.cuda.is_available():
        return "sdpa" if torch.cuda.get_device_capability(q.device) >= (8, 0) else "triton"
    return "triton"


def describe(device_type: str, form: str = "flash") -> str:
    """What `attention` runs on a "cuda" or "cpu" device, in words for a banner; `backend` says it of one call."""
    if device_type != "cuda" or form == "softmax":
        return "plain torch"
    return "triton; torch's flash attention for 16-bit dtypes without dropout and mask" if PREFERS_SDPA else "triton"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float) -> Tensor:
    # [b, heads, s, d]
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    with without_autocast(q.device.type):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=q.size(1) != k.size(1)
        )
    return out.permute(2, 0, 1, 3).contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dimensions; expected [s, b, heads, d] for each")
    if not q.is_floating_point() or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; expected one floating-point dtype; cast them")
    if k.shape != v.shape or k.size(1) != q.size(1) or k.size(3) != q.size(3) or k.size(2) < 1 or q.size(2) % k.size(2):
        raise ValueError(
            f"q, k, v have shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)}; expected [sq, b, a, d] and twice "
            "[sk, b, g, d] with g a divisor of a"
        )
    if k.size(0) == 0 and q.size(0) > 0:
        raise ValueError("k and v are empty; expected at least one key")
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
                f"mask is {mask.dtype} of shape {list(mask.shape)}; expected bool, True where hidden, broadcastable to "
                f"{[q.size(1), q.size(2), q.size(0), k.size(0)]} with all keys"
            )


def _check_settings(q: Tensor, settings: Settings, key_lengths: Tensor | None, form: str) -> None:
    if effective_probability(settings.dropout_p):
        first_sample = settings.first_sample if isinstance(settings.first_sample, int) else 0
        check_place(
            first_sample=first_sample,
            num_samples=q.size(1),
            first_head=settings.first_head,
            num_heads=q.size(2),
            num_rows=q.size(0),
        )
    if form not in FORMS:
        raise ValueError(f'form is {form!r}; expected "flash" or "softmax"')
    if not 0.0 < settings.softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {settings.softmax_scale}; expected a positive number; negate q instead")
    window_size = settings.window_size
    if window_size is not None and (len(window_size) != 2 or any(size < -1 for size in window_size)):
        raise ValueError(f"window_size is {window_size}; expected (left, right), each at least 0, or -1 for no limit")
    if key_lengths is not None and (
        key_lengths.dtype not in (torch.int32, torch.int64)
        or key_lengths.shape != q.shape[1:2]
        or key_lengths.device != q.device
    ):
        raise ValueError(
            f"key_lengths is {key_lengths.dtype} of shape {list(key_lengths.shape)} on {key_lengths.device}; expected "
            f"torch.int32 or torch.int64 of shape [{q.size(1)}] on {q.device}, as q; move it there"
        )
    for name, number in (("dropout_key", settings.dropout_key), ("first_sample", settings.first_sample)):
        if isinstance(number, Tensor) and (number.dtype, number.dim(), number.device) != (torch.int64, 0, q.device):
            raise ValueError(
                f"{name} is {number.dtype} of shape {list(number.shape)} on {number.device}; expected "
                "an int, or a 0-dim "
                f"torch.int64 tensor on {q.device}, as q; move it there"
            )


def _shapes(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> list[Tensor]:
    out = torch.empty(*q.shape[:-1], v.size(-1), dtype=q.dtype, device=q.device)
    statistics = q.new_empty(q.size(1), q.size(2), q.size(0), dtype=torch.promote_types(q.dtype, torch.float32))
    return [out, q.new_empty(*statistics.shape, k.size(0)) if others[-1] else statistics]


@opaque(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key_lengths, {OPERANDS}, bool is_softmax) "
    "-> Tensor[]",
    _shapes,
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key_lengths: Tensor | None, *operands: Any
) -> list[Tensor]:
    """out, and the logsumexp, or with is_softmax the probabilities."""
    *others, is_softmax = operands
    settings = Settings.of(*others)
    if not is_softmax:
        return list(choose_backend(q, cpu).forward(q, k, v, mask, key_lengths, settings))
    kept = q.new_zeros(q.size(1), q.size(2), q.size(0), k.size(0))
    return [cpu.forward(q, k, v, mask, key_lengths, settings, kept)[0], kept]


def _gradient_shapes(grad_out: Tensor, *inputs: Any) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs[:3]]


@opaque(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? out, Tensor kept, Tensor? mask, "
    f"Tensor? key_lengths, {OPERANDS}, bool is_softmax) -> Tensor[]",
    _gradient_shapes,
)
def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, kept: Tensor, *others: Any
) -> list[Tensor]:
    """grad_q, grad_k and grad_v, from what forward kept."""
    mask, key_lengths, *operands, is_softmax = others
    arguments = (mask, key_lengths, Settings.of(*operands))
    if is_softmax:
        return list(cpu.backward(grad_out, q, k, v, None, kept, *arguments, kept))
    return list(choose_backend(q, cpu).backward(grad_out, q, k, v, out, kept, *arguments))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        key_lengths: Tensor | None,
        settings: Settings,
        is_softmax: bool,
    ) -> Tensor:
        ctx.settings, tensors = settings.split()
        ctx.is_softmax = is_softmax
        out, kept = _forward(q, k, v, mask, key_lengths, *settings.operands, is_softmax)
        # On a CPU, and from the softmax, whole rows are computed again, and nobody needs out.
        kept_out = out if q.is_cuda and not is_softmax else None
        ctx.save_for_backward(q, k, v, kept_out, kept, mask, key_lengths, *tensors)
        return out

    @staticmethod
    @first_derivative_only("attention", "attention")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, key, first_sample = ctx.saved_tensors
        operands = ctx.settings.joined(key, first_sample).operands
        return *_backward(grad_out, *tensors, *operands, ctx.is_softmax), *[None] * 4

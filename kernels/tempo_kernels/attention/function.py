"""Defines `attention`: chooses the backend and holds the autograd.Function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.attention import cpu
from tempo_kernels.attention.checks import check_documents, check_settings, check_tensors
from tempo_kernels.attention.settings import OPERANDS, Gradients, Inputs, Kept, Settings
from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only, takes_plain_tensors
from tempo_kernels.opaque import opaque, separate
from tempo_kernels.saved import keeping

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? alibi_slopes"
_INPUTS += ", Tensor? sink, Tensor? cu_seqlens, Tensor? cu_seqlens_k, Tensor? document_samples"


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
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    document_samples: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    hidden_rows: str = "uniform",
    form: str = "flash",
) -> Tensor:
    """softmax(softmax_scale * q k^T) v with dropout on the probabilities, in Megatron's layout.

    Args:
        q: [sq, b, a, d], floating point; any strides, the last dimension's stride 1 is fastest.
        k, v: [sk, b, g, d] and [sk, b, g, dv] of q's dtype, where g divides a (grouped-query attention).
        causal: query i sees keys up to i + sk - sq; needs sq <= sk, unless first_column is given.
        mask: bool [b or 1, a or 1, sq or 1, sk], True where a key is hidden; hidden_rows says what a row gets whose
            keys are all hidden.
        softmax_scale: multiplies the scores; positive.
        dropout_p: in [0, 1); realised within 2**-16.
        dropout_key: 64 bits, one per seed and layer (`tempo_kernels.philox.derive_key`).
        first_sample, first_head, first_row: global indices of q[:, 0], q[:, :, 0] and q[0], where q is a part.
        first_column: global index of k[0], where k and v are a part of the keys, as under context parallelism. causal
            and window_size then go by position: query i is at first_row + i, key j at first_column + j. None where the
            keys begin at 0 and the last query is at the last key.
        window_size: (left, right): query i sees keys i + sk - sq - left to i + sk - sq + right; -1 is no limit.
        cu_seqlens: int32 [n + 1], where a packed row's n documents begin and end: document i is q[cu_seqlens[i] :
            cu_seqlens[i + 1]], and sees its own keys only; causal and window_size count within it. b is 1. Tokens of no
            document get 0 and pass no gradient on. Neither mask nor first_column may be given with it. A
            number outside of the row is refused on a CPU; on a GPU, which is not waited for, it counts as nearest.
        cu_seqlens_k: int32 [n + 1], the same of k and v, where it differs.
        document_samples: int64 [n], the global index of each document's sample: its mask of dropout is then the
            mask of the document in a row of its own. None: the mask of the packed row, sample first_sample.
        sink: float32, or q's dtype, [a]: a logit per head that takes part in the sum of the softmax and has no value,
            as in gpt-oss. 0 is Megatron's "off-by-one" softmax. It is never dropped out; its gradient is computed.
        softcap: positive; scaled scores become softcap * tanh(scores / softcap), as in Gemma 2, before anything is
            added to them or hidden.
        alibi_slopes: float32 [a], without a gradient: slope * (column - row) is added to the scaled scores, counted by
            position as causal is, and within a document. Nothing is stored for it. The slopes are positive, as those
            of FlashAttention and of Transformer Engine; without a sink, what is the same for all keys of a query
            changes nothing, so that transformers' slope * column (BLOOM) is the same.
        bias: [b or 1, a or 1, sq or 1, sk], floating point, added to the scaled scores. Below -1e30 it hides its key,
            as minus infinity does. cu_seqlens may not be given with it. Its gradient, summed in float32, is computed
            where bias requires one; where bias is broadcast, in an order that is always the same. Hidden keys give it
            none, whatever hidden_rows is.
        hidden_rows: with "uniform" a row whose keys the mask hides all attends to all of them equally, or to its sink,
            and its scores get no gradient, as in Megatron, which writes over them. With "added" they get one, as where
            the lowest number is added to them. With "zero" the row gets 0 and passes no gradient on, as in torch's
            scaled_dot_product_attention. Other rows are the same with each.
        form: "flash" keeps no [sq, sk] tensor. "softmax" keeps the softmax's output and draws the dropout's again.

    dropout_key and first_sample may each be a 0-dim int64 tensor on q's device (the key's 64 bits as a signed number),
    which must not change between a forward and its backward.

    Returns:
        [sq, b, a, dv], contiguous. A query that sees no key, by position, window_size and bias, gets 0
        and passes no gradient on, with or without a sink.

    Under autocast nothing is cast: products have the inputs' dtype, in forward and in backward.

    Keeps for backward: q, k, v, and a logsumexp of 4 bytes per query and head (8 for float64). On a GPU, and on a CPU
        in 16 bits without dropout, it also keeps the output, which the next linear keeps anyway. form="softmax" keeps a
        [b, a, sq, sk] tensor of q's dtype in place of logsumexp and output, and with a sink the logsumexp too. Masks,
        biases, slopes, sinks, boundaries and samples, where given, are kept as the caller's tensors. The
        logsumexp includes the sink.
    Error: products in the inputs' dtype, softmax in float32; at most twice the unfused torch computation's own error.
        On a GPU, a 16-bit out is rounded before a row's sum of out * grad_out is taken, as in FlashAttention. Where a
        softmax is saturated (a single key is seen, or one score is far above the others), gradients of scores that
        should be about 0 are therefore one rounding of a product.
    Raises: ValueError for shapes, dtypes or a probability that do not fit, and on a GPU, in the form "flash", with
        dropout for a first_column that is not a multiple of 8; RuntimeError on a second derivative.
    """
    draw = (dropout_p, dropout_key, first_sample, first_head)
    settings = Settings(causal, softmax_scale, *draw, window_size, first_row, first_column, softcap, hidden_rows)
    others = mask, bias, alibi_slopes, sink, cu_seqlens, cu_seqlens_k, document_samples
    inputs = Inputs(q, k, v, *others)
    check_tensors(inputs, settings)
    check_settings(q, settings, form)
    check_documents(inputs, settings)
    if get_backend(inputs, settings, form) == "sdpa":
        return _run_sdpa(q, k, v, causal, softmax_scale)
    out: Tensor = _Attention.apply(settings, form == "softmax", q, *separate(k, v), *others)
    return out


def get_backend(inputs: Inputs, settings: Settings, form: str = "flash") -> str:
    """Returns the name of a call's backend: "sdpa" (torch's flash attention), "triton" (our kernels) or "torch"."""
    if not inputs.q.is_cuda or form == "softmax":
        return "torch"
    takes_sdpa = _takes_sdpa(inputs, settings) and torch.backends.cuda.flash_sdp_enabled()
    if takes_sdpa and torch.cuda.is_available() and torch.cuda.get_device_capability(inputs.q.device) >= (8, 0):
        return "sdpa"
    return "triton"


def _takes_sdpa(inputs: Inputs, settings: Settings) -> bool:
    """Whether torch's flash attention can compute this call. It is preferred to our kernels, which no GPU has measured
    against it."""
    q, k, v, causal, window_size = *inputs[:3], settings.causal, settings.window_size
    is_plain = settings.is_plain(inputs) and inputs.cu_seqlens is None and settings.first_column is None
    is_plain &= window_size in (None, (-1, -1)) or (causal and window_size == (-1, 0))
    # torch aligns a causal mask to the first key, and its kernels return the output in q's memory order. Where q is
    # dense or has one sample, that is our order too, and the next linear keeps the output without a copy.
    fits = (not causal or q.size(0) == k.size(0)) and (q.size(1) == 1 or q.is_contiguous()) and q.numel() > 0
    fits &= q.dtype in (torch.float16, torch.bfloat16) and q.size(3) % 8 == 0
    fits &= q.size(3) == v.size(3) <= 256
    return is_plain and fits


def list_gpu_workspaces(
    operands: Sequence[Any], major: int, multiprocessors: int, is_deterministic: bool = False
) -> list[int]:
    """Returns the bytes of each tensor that backward would hold on a GPU apart from its results, all of them at once.

    The softmax form's blocks are not among them: it is plain torch, and runs on fake tensors (`use_gpu_blocks`).

    Args:
        operands: of the operator `attention_backward` in the form "flash"; the tensors may be fake.
        major: of the GPU's compute capability, on which nothing depends today.
        multiprocessors: of the GPU.
        is_deterministic: whether torch is to use deterministic algorithms.
    """
    inputs, settings, _ = _read_operands(operands[4:-1])
    q, k = inputs[:2]
    if not q.numel():
        return []
    if _takes_sdpa(inputs, settings):
        return list_flash_workspaces(q.shape, k.shape, q.dtype, multiprocessors if is_deterministic else 1)
    return [4 * q.shape[:3].numel()] * (2 if q.dtype == torch.float32 else 1)


def list_flash_workspaces(
    q_shape: Sequence[int], k_shape: Sequence[int], dtype: torch.dtype, most_splits: int
) -> list[int]:
    """Returns the bytes of each tensor that FlashAttention-2's backward holds apart from its results: softmax_d,
    dq_accum, and with grouped queries dk_expanded and dv_expanded.

    mha_bwd allocates them, in its csrc/flash_attn/flash_api.cpp and in torch's aten/src/ATen/native/transformers/cuda/
    flash_attn.

    Args:
        q_shape, k_shape: [sq, b, a, d] and [sk, b, g, d].
        dtype: of both.
        most_splits: the GPU's multiprocessors, each of which has a head's sums where they are deterministic; else 1.
    """
    num_queries, batch, heads, head_dim = q_shape
    multiple = 32 if head_dim <= 128 else 64
    rows, columns = -(-num_queries // 128) * 128, -(-head_dim // multiple) * multiple
    expanded = [dtype.itemsize * k_shape[0] * batch * heads * head_dim] * (2 if k_shape[2] != heads else 0)
    splits = -(-most_splits // (batch * heads))
    return [4 * batch * heads * rows, 4 * splits * batch * heads * rows * columns, *expanded]


def describe(device_type: str, form: str = "flash") -> str:
    """Describes the backend of a "cuda" or "cpu" device for a banner; `get_backend` names the backend of one call."""
    if device_type != "cuda" or form == "softmax":
        return "plain torch"
    return "triton, or torch's flash attention for a 16-bit dtype with neither dropout nor a mask"


def _run_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float) -> Tensor:
    # [b, heads, s, d]
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=q.size(1) != k.size(1)
        )
    return out.permute(2, 0, 1, 3).contiguous()


def _make_empty_results(*operands: Any) -> list[Tensor]:
    q, k, v = operands[:3]
    out = torch.empty(*q.shape[:-1], v.size(-1), dtype=q.dtype, device=q.device)
    logsumexp = q.new_empty(q.size(1), q.size(2), q.size(0), dtype=torch.promote_types(q.dtype, torch.float32))
    return [out, logsumexp, q.new_empty(*logsumexp.shape, k.size(0))] if operands[-1] else [out, logsumexp]


@opaque(f"attention({_INPUTS}, {OPERANDS}, bool is_softmax) -> Tensor[]", _make_empty_results)
def _forward(*operands: Any) -> list[Tensor]:
    """Returns out and the logsumexp, and with is_softmax the probabilities."""
    inputs, settings, is_softmax = _read_operands(operands)
    if not is_softmax:
        return list(choose_backend(inputs.q, cpu).forward(inputs, settings))
    q, k = inputs[:2]
    probabilities = q.new_zeros(q.size(1), q.size(2), q.size(0), k.size(0))
    return [*cpu.forward(inputs, settings, probabilities), probabilities]


def _list_wanted(inputs: Inputs, needs_grad_bias: bool) -> Gradients:
    """Returns, in the place of each gradient that is computed, the tensor whose gradient it is; None elsewhere."""
    return Gradients(*inputs[:3], inputs.bias if needs_grad_bias else None, inputs.sink)


def _make_empty_gradients(*operands: Any) -> list[Tensor]:
    wanted = _list_wanted(Inputs(*operands[4 : 4 + len(Inputs._fields)]), operands[-1])
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in wanted if t is not None]


@opaque(
    "attention_backward(Tensor grad_out, Tensor? out, Tensor? logsumexp, Tensor? probabilities, "
    f"{_INPUTS}, {OPERANDS}, bool is_softmax, bool needs_grad_bias) -> Tensor[]",
    _make_empty_gradients,
)
def _backward(grad_out: Tensor, *operands: Any) -> list[Tensor]:
    """Returns those gradients that there are, from what forward kept."""
    kept, needs_grad_bias = Kept(*operands[:3]), operands[-1]
    inputs, settings, is_softmax = _read_operands(operands[3:-1])
    backend = cpu if is_softmax else choose_backend(inputs.q, cpu)
    grads = backend.backward(grad_out, inputs, kept, settings, needs_grad_bias)
    return [grad for grad in grads if grad is not None]


def _read_operands(operands: Sequence[Any]) -> tuple[Inputs, Settings, bool]:
    num_tensors = len(Inputs._fields)
    return Inputs(*operands[:num_tensors]), Settings.of(*operands[num_tensors:-1]), operands[-1]


OPERATIONS = (_forward, _backward)
"""Forward and backward, by which a program that counts memory knows them."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Settings, is_softmax: bool, *tensors: Any) -> Tensor:
        inputs = Inputs(*tensors)
        run = _forward.trace if keeping else _forward
        out, logsumexp, *probabilities = run(*tensors, *settings.operands, is_softmax)
        # The softmax form and the CPU's blocks compute whole rows again: only the kernels and torch's own need out.
        needs_out = not is_softmax and (inputs.q.is_cuda or cpu.keeps_out(inputs, settings))
        kept = Kept(
            out if needs_out else None,
            None if is_softmax and inputs.sink is None else logsumexp,
            probabilities[0] if is_softmax else None,
        )
        *ctx.numbers, key, first_sample = settings.operands
        ctx.is_softmax = is_softmax
        ctx.save_for_backward(*kept[:3], *tensors, key, first_sample)
        return out

    @staticmethod
    @first_derivative_only("attention", "attention")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *saved, key, first_sample = ctx.saved_tensors
        inputs = Inputs(*saved[3:])
        needs_grad_bias = inputs.bias is not None and ctx.needs_input_grad[2 + Inputs._fields.index("bias")]
        found = iter(_backward(grad_out, *saved, *ctx.numbers, key, first_sample, ctx.is_softmax, needs_grad_bias))
        wanted = _list_wanted(inputs, needs_grad_bias)
        grads = Gradients(*[None if t is None else next(found) for t in wanted])  # type: ignore[arg-type]
        return None, None, *Inputs(*grads[:3], bias=grads.bias, sink=grads.sink)

"""Defines `linear_cross_entropy` and `linear_log_prob`: the loss head, with the logits of one chunk alive at a time.

chunks.py makes the logits, operators.py holds the loops over chunks, and eager.py has the mathematics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.derivative import first_derivative_only, takes_plain_tensors
from tempo_kernels.linear_cross_entropy.checks import check_main_grad, check_scaling, check_tensors, make_settings
from tempo_kernels.linear_cross_entropy.operators import (
    compute_gradients,
    compute_losses,
    compute_losses_and_gradients,
    list_operands,
    order_rows,
    order_tokens,
)
from tempo_kernels.linear_cross_entropy.settings import Settings, Shards
from tempo_kernels.opaque import is_traced

_SCALED_ELEMENTS = 1 << 22


@takes_plain_tensors
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    group: Any = None,
    sequence_parallel: bool = False,
    chunk_tokens: int | None = None,
    token_weights: Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
) -> Any:
    """Computes the cross entropy of hidden weight^T + bias with the logits of one chunk of tokens alive at a time.

    Args:
        hidden: [s, b, h], floating point, any strides; with sequence_parallel this rank's [s/p, b, h].
        weight, bias: [v/p, h] and [v/p] or None, of hidden's dtype: this rank's rows of the vocabulary.
        labels: int64 [b, s], indices of the whole vocabulary, the same on every rank.
        ignore_index: tokens with this label have loss and gradient 0.
        label_smoothing: in [0, 1), spread evenly over the other real rows of the whole vocabulary.
        z_loss: this times logsumexp**2 is added to a token's loss.
        vocab_size: real rows of the whole vocabulary (default: all). Those that pad it at its end are in the softmax,
            as in Megatron, but take no part in the smoothing.
        vocab_start: index of this rank's first row: its rank in the group times v/p.
        group: the ranks that share the vocabulary, each with v/p rows; None for one.
        sequence_parallel: hidden is split over the group too: gathered, and its gradient scattered, chunk by chunk.
        chunk_tokens: tokens per chunk, at least one of each rank. By default their logits fill checks.CHUNK_BYTES. With
            a 16-bit weight several chunks need a float32 sum of its gradient. If that is more, one chunk takes all
            tokens, or backward's chunks take all tokens and some rows of weight each (not with sequence_parallel or
            token_weights).
        token_weights: [b, s]. Forward then computes the gradients too, chunk by chunk, and no logits are made twice.
        gradient_accumulation_fusion: weight's gradient is added to `weight.main_grad`, as Megatron's linears do.

    Returns:
        losses [b, s], float32 (float64 for float64 inputs). With token_weights (total, losses): the differentiable
        scalar sum(token_weights * losses), and losses that are not differentiable.

    Under autocast nothing is cast: the inputs' dtype is that of the products, in forward and in backward.

    Keeps for backward: hidden, weight and bias (which exist anyway), labels, and 8 bytes per token. With token_weights
        it keeps the gradients of hidden and weight instead of hidden, the latter in float32 if there are several
        chunks; backward scales both in place, once.
    Costs: four matrix products instead of three, because backward makes the logits again. With token_weights there are
        three, but the ranks of a group wait for one another once per chunk instead of once.
    Error: at most twice that of the unfused torch computation in the same dtype plus one ulp of the largest value; in
        float32 with few tokens or columns, where torch's own error may happen to be near 0, plus up to 8 ulp.
        NaN or infinity in hidden makes the loss of that token NaN, and of no other. A label that is neither in the
        vocabulary nor ignored gives an infinite loss, because checking labels would wait for the device.
    Raises: ValueError for shapes, dtypes and numbers that do not fit; RuntimeError on a second derivative, and with
        token_weights on a second backward.
    """
    shards = Shards(group if group is not None and group.size() > 1 else None, sequence_parallel)
    check_tensors(hidden, weight, bias, labels, token_weights, shards)
    fused = gradient_accumulation_fusion and check_main_grad(weight)
    knows_statistics = token_weights is None or not torch.is_grad_enabled()
    settings = make_settings(
        hidden, weight, shards, vocab_size, vocab_start, ignore_index, chunk_tokens, label_smoothing=label_smoothing,
        z_loss=z_loss, sums_weight=_sums_weight(weight, fused and token_weights is None),
        knows_statistics=knows_statistics,
    )  # fmt: skip
    if knows_statistics:
        losses = _LinearCrossEntropy.apply(hidden, weight, bias, labels, settings, fused)
        return losses if token_weights is None else ((token_weights * losses).sum(), losses)
    link = _Link.apply(hidden, weight, bias)
    return _WeightedLinearCrossEntropy.apply(hidden, weight, bias, labels, token_weights, link, settings, fused)


@takes_plain_tensors
def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    group: Any = None,
    sequence_parallel: bool = False,
    chunk_tokens: int | None = None,
    gradient_accumulation_fusion: bool = False,
) -> Any:
    """Computes the log-probabilities of labels under softmax(l), and its entropy, where z = hidden weight^T + bias and
    l = softcap tanh(z / softcap) / temperature, with the logits of one chunk of tokens alive at a time.

    The cap comes first because it belongs to the model, as in Gemma 2, while the temperature belongs to the sampler,
    which divides the model's logits by it, as vLLM does. Without a softcap l = z / temperature, as in verl and NeMo-RL.

    Args:
        hidden, weight, bias, vocab_start, group, sequence_parallel, chunk_tokens, gradient_accumulation_fusion: as
            linear_cross_entropy's.
        labels: int64 [b, s], indices of the whole vocabulary, the same on every rank. Shifting them is the caller's.
        temperature: a finite number above 0.
        softcap: a finite number above 0; None or 0 for none.
        return_entropy: False spares the work for it.
        ignore_index: tokens with this label have log-probability, entropy and gradient 0.
        vocab_size: real rows of the whole vocabulary (default: all). Those that pad it at its end have probability 0,
            as in an inference engine that cuts them off. By default they are in the softmax, as in Megatron.

    Returns:
        log_prob [b, s], or (log_prob, entropy) with entropy = -sum p log p in nats, never below 0: float32 (float64 for
        float64 inputs), both differentiable.

    Under autocast nothing is cast. Under torch.no_grad() nothing is kept.

    Keeps for backward: hidden, weight and bias (which exist anyway), labels, and 8 bytes per token; 12 for the entropy.
    Costs: four matrix products instead of three, because backward makes the logits again.
    Error: at most twice that of the unfused torch computation in the same dtype plus one ulp of the largest value.
        NaN or infinity in hidden makes the results of that token NaN, and of no other. A logit of -inf has probability
        0 and no part in the entropy. A label that is neither in the vocabulary nor ignored has log-probability -inf,
        because checking labels would wait for the device.
    Raises: ValueError for shapes, dtypes and numbers that do not fit; RuntimeError on a second derivative.
    """
    shards = Shards(group if group is not None and group.size() > 1 else None, sequence_parallel)
    check_tensors(hidden, weight, bias, labels, None, shards)
    check_scaling(temperature, softcap)
    fused = gradient_accumulation_fusion and check_main_grad(weight)
    settings = make_settings(
        hidden, weight, shards, vocab_size, vocab_start, ignore_index, chunk_tokens, excludes_padding=True,
        softcap=softcap, temperature=temperature, has_entropy=return_entropy, sums_weight=_sums_weight(weight, fused),
    )  # fmt: skip
    found = _LinearLogProb.apply(hidden, weight, bias, labels, settings, fused)
    return found if return_entropy else found[0]


def _sums_weight(weight: Tensor, takes_main_grad: bool) -> bool:
    """Whether several chunks need memory to sum their gradients of weight, because main_grad cannot hold the sum."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return False
    if not takes_main_grad:
        return True
    main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]
    return main_grad.dtype != torch.promote_types(weight.dtype, torch.float32)


def _spread(found: Sequence[Tensor], has_grads: Sequence[bool]) -> Iterator[Tensor | None]:
    """Yields the gradients in the places of has_grads, and None in the others."""
    remaining = iter(found)
    return (next(remaining) if has_grad else None for has_grad in has_grads)


def _compute_results(
    ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: Settings, fused: bool
) -> list[Tensor]:
    """Runs the forward of both functions: losses and, if asked for, entropies, [b, s]."""
    *results, kept = compute_losses(hidden, weight, bias, labels, *list_operands(settings))
    ctx.save_for_backward(hidden, weight, bias, labels, kept)
    ctx.settings, ctx.parameter = settings, weight if fused else None
    return [order_tokens(t, labels) for t in results]


def _differentiate(ctx: Any, grad_losses: Tensor, grad_entropies: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Runs the backward of both functions."""
    hidden, weight, bias, labels, kept = ctx.saved_tensors
    settings, has_grads = ctx.settings, ctx.needs_input_grad[:3]
    grad, grad_entropy = (
        None if t is None else order_rows(t, settings).to(kept.dtype) for t in (grad_losses, grad_entropies)
    )
    operands = (grad, grad_entropy, kept, hidden, weight, bias, labels, *has_grads, *list_operands(settings))
    main_grad = None if ctx.parameter is None else ctx.parameter.main_grad
    is_added = main_grad is not None and main_grad.dtype == kept.dtype and not is_traced(hidden)
    found = compute_gradients.call(*operands, total=main_grad) if is_added else compute_gradients(*operands)
    grad_hidden, grad_weight, grad_bias = _spread(found, has_grads)
    if main_grad is not None and grad_weight is not None and not is_added:
        main_grad += grad_weight  # a 16-bit main_grad is rounded once, after the sum over chunks
    if ctx.parameter is not None:
        grad_weight = _make_stand_in(ctx.parameter)
    return (
        None if grad_hidden is None else grad_hidden.view(hidden.shape),
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None else grad_bias.to(weight.dtype),
        *[None] * 3,
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *others: Any) -> Tensor:
        return _compute_results(ctx, hidden, weight, bias, labels, *others)[0]

    backward = staticmethod(first_derivative_only("linear_cross_entropy", "loss")(_differentiate))


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *others: Any
    ) -> tuple[Tensor, ...]:
        losses, *entropies = _compute_results(ctx, hidden, weight, bias, labels, *others)
        ctx.set_materialize_grads(False)
        return 0.0 - losses, *entropies  # the sign of 0 stays positive

    @staticmethod
    @first_derivative_only("linear_log_prob")
    def backward(
        ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if grad_log_prob is None and grad_entropy is None:
            return (None,) * 6
        grad = torch.zeros_like(grad_entropy) if grad_log_prob is None else -grad_log_prob  # type: ignore[arg-type]
        return _differentiate(ctx, grad, grad_entropy)


class _Link(torch.autograd.Function):
    """Returns an empty tensor that depends on the inputs. A function that keeps none of its inputs saves this tensor,
    so that a second derivative is noticed (derivative.py)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> Tensor:
        return torch.empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class _WeightedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        token_weights: Tensor,
        link: Tensor,
        settings: Settings,
        fused: bool,
    ) -> tuple[Tensor, Tensor]:
        has_grads = ctx.needs_input_grad[:3]
        rows = order_rows(token_weights, settings).to(torch.promote_types(hidden.dtype, torch.float32))
        # Token weights as small as 1 / (s b) would make a float16 gradient of the logits underflow.
        unit = rows.abs().amax() if rows.numel() else rows.new_ones(())
        unit = torch.where(unit > 0, unit, 1.0)
        operands = (rows / unit, hidden, weight, bias, labels, *has_grads, *list_operands(settings))
        losses, *found = compute_losses_and_gradients(*operands)
        ctx.save_for_backward(*_spread(found, has_grads), unit, link)
        ctx.shape, ctx.dtype, ctx.parameter = hidden.shape, weight.dtype, weight if fused else None
        ctx.is_spent = False
        total, losses = (rows * losses).sum(), order_tokens(losses, labels)
        ctx.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    @first_derivative_only("linear_cross_entropy", "loss")
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_spent and not torch.compiler.is_compiling():
            raise RuntimeError(
                "linear_cross_entropy with token_weights gave its gradients away in a first backward; expected no "
                "second one; leave token_weights out to run backward again"
            )
        ctx.is_spent = True
        grad_hidden, grad_weight, grad_bias, unit, _ = ctx.saved_tensors
        factor = unit * grad_total
        if ctx.parameter is not None:
            main_grad = ctx.parameter.main_grad
            if main_grad.dtype == factor.dtype:
                main_grad.addcmul_(grad_weight, factor)
            else:
                main_grad += _scale_(grad_weight, factor)
            grad_weight = _make_stand_in(ctx.parameter)
        elif grad_weight is not None:
            grad_weight = _scale_(grad_weight, factor).to(ctx.dtype)
        return (
            None if grad_hidden is None else _scale_(grad_hidden, factor).view(ctx.shape),
            grad_weight,
            None if grad_bias is None else (grad_bias * factor).to(ctx.dtype),
            *[None] * 5,
        )


def _scale_(t: Tensor, factor: Tensor) -> Tensor:
    """Multiplies t by a float32 factor in place. On a GPU torch's own `*=` would round the factor to t's 16 bits."""
    if t.dtype == factor.dtype or not t.is_cuda or torch.compiler.is_compiling():
        return t.mul_(factor)
    for block in t.view(-1).split(_SCALED_ELEMENTS):
        block.copy_(block.to(factor.dtype).mul_(factor))
    return t


def _make_stand_in(weight: Any) -> Tensor | None:
    """Returns what autograd gets in place of the gradient that is already in main_grad, as from Megatron's linears: for
    Megatron's DistributedDataParallel a tensor that only makes its hooks run, else None."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # Where the embedding shares the weight, autograd adds this to the embedding's gradient.
    new = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return new(weight)

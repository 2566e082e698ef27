"""Defines `linear_cross_entropy` and `linear_log_prob`: the loss head, with the logits of one chunk alive at a time.

The chunks live and die inside of three operations. The backend, eager.py or kernel.py, computes a chunk's statistics or
overwrites it with its gradient, and chunks.py makes the logits. torch.compile, fake tensors and autocast do not look
inside. As operators they take flat operands: tensors, flags, then the numbers of a Settings one by one, and a group by
its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only, takes_plain_tensors
from tempo_kernels.linear_cross_entropy import eager
from tempo_kernels.linear_cross_entropy.checks import check_scaling, check_tensors, get_main_grad, make_settings
from tempo_kernels.linear_cross_entropy.chunks import Gradients, Head, join_shards
from tempo_kernels.linear_cross_entropy.eager import compute_results, compute_rows
from tempo_kernels.linear_cross_entropy.settings import Rows, Settings, Shards
from tempo_kernels.opaque import is_traced, opaque

_SCALED_ELEMENTS = 1 << 22
_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels"
_HAS_GRADS = "bool has_grad_hidden, bool has_grad_weight, bool has_grad_bias"
_SETTINGS = (
    "str group, bool sequence_parallel, SymInt vocab_size, SymInt vocab_start, SymInt ignore_index, "
    "float label_smoothing, float z_loss, bool excludes_padding, float softcap, float temperature, bool has_entropy, "
    "SymInt chunk_rows"
)


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
            a 16-bit weight several chunks need a float32 sum of its gradient, and at the end its 16-bit copy: six bytes
            per element of weight. If that is more than the logits of all tokens, one chunk takes all tokens.
        token_weights: [b, s]. Forward then computes the gradients too, chunk by chunk, and no logits are made twice.
        gradient_accumulation_fusion: weight's gradient is added to `weight.main_grad`, as Megatron's linears do.

    Returns:
        losses [b, s], float32 (float64 for float64 inputs). With token_weights (total, losses): the differentiable
        scalar sum(token_weights * losses), and losses that are not differentiable.

    Under autocast nothing is cast: products have the inputs' dtype, in forward and in backward.

    Keeps for backward: hidden, weight and bias (which exist anyway), labels, and 8 bytes per token. With token_weights
        it keeps the gradients of hidden and weight instead of hidden, the latter in float32 if there are several
        chunks; backward scales both in place, once.
    Costs: four matrix products instead of three, because backward makes the logits again. With token_weights there are
        three, but the ranks of a group wait for one another once per chunk instead of once.
    Error: at most twice the error of the unfused torch computation in the same dtype plus one ulp of the largest value;
        in float32 with few tokens or columns, where torch's own error may happen to be near 0, plus up to 8 ulp.
        NaN or infinity in hidden makes the loss of that token NaN, and of no other. A label that is neither in the
        vocabulary nor ignored gives an infinite loss, because checking labels would wait for the device.
    Raises: ValueError for shapes, dtypes and numbers that do not fit; RuntimeError on a second derivative, and with
        token_weights on a second backward.
    """
    shards = Shards(group if group is not None and group.size() > 1 else None, sequence_parallel)
    check_tensors(hidden, weight, bias, labels, token_weights, shards)
    main_grad = get_main_grad(weight) if gradient_accumulation_fusion else None
    fused, makes_gradients = main_grad is not None, token_weights is not None and torch.is_grad_enabled()
    settings = make_settings(
        hidden, weight, shards, vocab_size, chunk_tokens, None if makes_gradients else main_grad,
        vocab_start=vocab_start, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
    )  # fmt: skip
    if not makes_gradients:
        (losses,) = _LinearCrossEntropy.apply(hidden, weight, bias, labels, settings, fused)
        return losses if token_weights is None else ((token_weights * losses).sum(), losses)
    # An empty tensor that depends on the inputs, for a function that keeps none of them: so a second derivative is
    # noticed (derivative.py).
    link = hidden[:0].flatten() + weight[:0].flatten()
    link = link if bias is None else link + bias[:0]
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
    Error: at most twice the error of the unfused torch computation in the same dtype plus one ulp of the largest value.
        NaN or infinity in hidden makes the results of that token NaN, and of no other. A logit of -inf has probability
        0 and no part in the entropy. A label that is neither in the vocabulary nor ignored has log-probability -inf,
        because checking labels would wait for the device.
    Raises: ValueError for shapes, dtypes and numbers that do not fit; RuntimeError on a second derivative.
    """
    shards = Shards(group if group is not None and group.size() > 1 else None, sequence_parallel)
    check_tensors(hidden, weight, bias, labels, None, shards)
    check_scaling(temperature, softcap)
    main_grad = get_main_grad(weight) if gradient_accumulation_fusion else None
    settings = make_settings(
        hidden, weight, shards, vocab_size, chunk_tokens, main_grad, vocab_start=vocab_start, ignore_index=ignore_index,
        excludes_padding=True, softcap=float(softcap or 0.0), temperature=float(temperature),
        has_entropy=return_entropy,
    )  # fmt: skip
    losses, *entropies = _LinearLogProb.apply(hidden, weight, bias, labels, settings, main_grad is not None)
    log_prob = 0.0 - losses  # the sign of 0 stays positive
    return (log_prob, *entropies) if return_entropy else log_prob


def list_operands(settings: Settings) -> tuple[Any, ...]:
    """Flattens settings to an operator's operands, in the order of the schema _SETTINGS."""
    shards, *numbers = settings
    return "" if shards.group is None else shards.group.group_name, shards.sequence_parallel, *numbers


def _read_settings(group: str, sequence_parallel: bool, *numbers: Any) -> Settings:
    """Builds the settings from what `list_operands` returned."""
    found = None
    if group:
        # Imported here, because a torch built without torch.distributed has no such module and no groups.
        from torch._C._distributed_c10d import _resolve_process_group

        found = _resolve_process_group(group)  # type: ignore[arg-type]  # a NewType of str
    return Settings(Shards(found, sequence_parallel), *numbers)


def _read_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *others: Any
) -> tuple[Head, Sequence[bool], Settings]:
    """Returns the tensors, which of them get a gradient, and the settings, from operands by the schemas."""
    settings = _read_settings(*others[-12:])
    return Head(hidden.flatten(0, 1), weight, bias, order_rows(labels, settings)), others[:-12], settings


def order_rows(t: Tensor, settings: Settings) -> Tensor:
    """Brings t [b, s] into the order of hidden's rows, [segments, s/segments * b]."""
    segments = settings.shards.num_segments
    return t.t().reshape(segments, t.numel() // segments)


def order_tokens(t: Tensor, labels: Tensor) -> Tensor:
    """Brings t from the order of hidden's rows to [b, s], as labels, in memory of its own."""
    return t.view(labels.size(1), labels.size(0)).t().clone(memory_format=torch.contiguous_format)


def _cut(t: Tensor, rows: slice) -> Tensor:
    """Returns a chunk [n] of t [t, m], or [..., n] of t [..., t, m]."""
    return t[..., rows].flatten(-2)


def _allocate_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *settings: Any
) -> list[Tensor]:
    found = _read_settings(*settings)
    segments, num_results = found.shards.num_segments, 2 if found.has_entropy else 1
    shape, dtype = (segments, labels.numel() // segments), torch.promote_types(hidden.dtype, torch.float32)
    results = [hidden.new_empty(shape, dtype=dtype) for _ in range(num_results)]
    return [*results, hidden.new_empty((num_results + 1, *shape), dtype=dtype)]


@opaque(f"linear_cross_entropy({_HEAD}, {_SETTINGS}) -> Tensor[]", _allocate_losses)
def compute_losses(*operands: Any, backend: Any = None) -> list[Tensor]:
    """Returns losses and, if asked for, entropies [t, m], and for backward each token's top, total and expected over
    all shards [2 or 3, t, m]. The shards exchange their statistics once.

    In all three operations `backend` is not an operand, so only `call` takes it. It has the functions of eager.py; by
    default it is the device's.
    """
    head, _, settings = _read_head(*operands)
    backend, num_columns = backend or choose_backend(head.hidden, eager), head.weight.size(0)
    shares = settings.get_shares(num_columns)
    dtype = torch.promote_types(head.hidden.dtype, torch.float32)
    statistics = head.hidden.new_empty(shares.num_statistics, *head.labels.shape, dtype=dtype)
    for rows, _, logits in head.make_logits(settings):
        targets = _cut(head.labels, rows) - settings.vocab_start
        part = backend.compute_statistics(logits, targets, shares)
        statistics[..., rows] = part.view(*statistics.shape[:2], -1)
    results, kept = compute_results(join_shards(statistics, num_columns, settings), head.labels, settings)
    return [*results, kept]


def _allocate_gradients(grad: Tensor, grad_entropy: Tensor | None, kept: Tensor, *operands: Any) -> list[Tensor]:
    (hidden, weight, *_), has_grads, settings = _read_head(*operands)
    gradients = [
        hidden.new_empty(hidden.shape),
        weight.new_empty(weight.shape, dtype=settings.get_weight_dtype(weight.dtype, hidden.size(0))),
        weight.new_empty(weight.shape[:1], dtype=torch.promote_types(weight.dtype, torch.float32)),
    ]
    return [t for t, has_grad in zip(gradients, has_grads, strict=True) if has_grad]


@opaque(
    f"linear_cross_entropy_backward(Tensor grad, Tensor? grad_entropy, Tensor kept, {_HEAD}, {_HAS_GRADS}, "
    f"{_SETTINGS}) -> Tensor[]",
    _allocate_gradients,
)
def compute_gradients(
    grad: Tensor, grad_entropy: Tensor | None, kept: Tensor, *operands: Any, total: Tensor | None = None,
    backend: Any = None,
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients that are asked for: of hidden [m, h], of weight in `Settings.get_weight_dtype`, and of bias
    in float32. It computes each chunk's logits again.

    grad [t, m] is the gradient of the losses, grad_entropy of the entropies. The weight's gradient is added to
    `total` if that is given. An operator cannot take it; only `compute_gradients.call` does.
    """
    head, has_grads, settings = _read_head(*operands)
    backend = backend or choose_backend(head.hidden, eager)
    gradients = Gradients(head, has_grads, total, settings)
    shares = settings.get_shares(head.weight.size(0))

    def read_rows(rows: slice) -> Rows:
        labels, of_entropies = _cut(head.labels, rows), None if grad_entropy is None else _cut(grad_entropy, rows)
        targets = labels - settings.vocab_start
        return compute_rows(targets, labels, _cut(grad, rows), of_entropies, _cut(kept, rows), settings)

    for rows, tokens, logits in head.make_logits(settings):
        own = read_rows(rows)
        backend.write_gradient_(logits, own, shares)
        gradients.add(rows, tokens, logits)
    return gradients.finish()


def _allocate_losses_and_gradients(token_weights: Tensor, *operands: Any) -> list[Tensor]:
    return [torch.empty_like(token_weights), *_allocate_gradients(token_weights, None, token_weights, *operands)]


@opaque(
    f"weighted_linear_cross_entropy(Tensor token_weights, {_HEAD}, {_HAS_GRADS}, {_SETTINGS}) -> Tensor[]",
    _allocate_losses_and_gradients,
)
def compute_losses_and_gradients(token_weights: Tensor, *operands: Any, backend: Any = None) -> list[Tensor]:
    """Returns losses [t, m] and the gradients of sum(token_weights * losses) as in `compute_gradients`; shards exchange
    statistics per chunk."""
    head, has_grads, settings = _read_head(*operands)
    backend, num_columns = backend or choose_backend(head.hidden, eager), head.weight.size(0)
    shares, losses = settings.get_shares(num_columns), torch.empty_like(token_weights)
    gradients = Gradients(head, has_grads, None, settings)
    for rows, tokens, logits in head.make_logits(settings):
        labels = _cut(head.labels, rows)
        targets = labels - settings.vocab_start
        statistics = join_shards(backend.compute_statistics(logits, targets, shares), num_columns, settings)
        results, kept = compute_results(statistics, labels, settings)
        losses[:, rows] = results[0].view(losses.size(0), -1)
        own = compute_rows(targets, labels, _cut(token_weights, rows), None, kept, settings)
        backend.write_gradient_(logits, own, shares)
        gradients.add(rows, tokens, logits)
    return [losses, *gradients.finish()]


OPERATIONS = (compute_losses, compute_gradients, compute_losses_and_gradients)
"""The operations that hold a chunk's logits inside, on a GPU too."""


def _spread(found: Sequence[Tensor], has_grads: Sequence[bool]) -> Iterator[Tensor | None]:
    """Yields the gradients in the places of has_grads, and None in the others."""
    remaining = iter(found)
    return (next(remaining) if has_grad else None for has_grad in has_grads)


def _differentiate(
    ctx: Any, grad_losses: Tensor | None, grad_entropies: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    if grad_losses is None:
        if grad_entropies is None:
            return (None,) * 6
        grad_losses = torch.zeros_like(grad_entropies)
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
    """Returns losses and, if asked for, entropies, [b, s]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: Settings, fused: bool
    ) -> tuple[Tensor, ...]:
        *results, kept = compute_losses(hidden, weight, bias, labels, *list_operands(settings))
        ctx.save_for_backward(hidden, weight, bias, labels, kept)
        ctx.settings, ctx.parameter = settings, weight if fused else None
        ctx.set_materialize_grads(False)
        return tuple(order_tokens(t, labels) for t in results)

    backward = staticmethod(first_derivative_only("linear_cross_entropy", "loss")(_differentiate))


class _LinearLogProb(_LinearCrossEntropy):
    backward = staticmethod(first_derivative_only("linear_log_prob")(_differentiate))


class _WeightedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, token_weights: Tensor,
        link: Tensor, settings: Settings, fused: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
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

"""Holds the three operations inside which the chunks of logits live and die.

The backend (cpu.py or kernel.py) computes a chunk's statistics, or overwrites it with its gradient; eager.py has the
mathematics. torch.compile, fake tensors and autocast do not look inside. As operators they take flat operands: tensors,
flags, then the numbers of a Settings one by one, and a group by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.backend import choose_backend
from tempo_kernels.linear_cross_entropy import cpu
from tempo_kernels.linear_cross_entropy.chunks import Gradients, Head, join_shards
from tempo_kernels.linear_cross_entropy.eager import compute_results, compute_rows
from tempo_kernels.linear_cross_entropy.settings import Rows, Settings, Shards
from tempo_kernels.opaque import opaque

_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels"
_HAS_GRADS = "bool has_grad_hidden, bool has_grad_weight, bool has_grad_bias"
_SETTINGS = (
    "str group, bool sequence_parallel, SymInt vocab_size, SymInt vocab_start, SymInt ignore_index, "
    "float label_smoothing, float z_loss, bool excludes_padding, float softcap, float temperature, bool has_entropy, "
    "SymInt chunk_rows, SymInt chunk_columns"
)


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
    settings = _read_settings(*others[-13:])
    return Head(hidden.flatten(0, 1), weight, bias, order_rows(labels, settings)), others[:-13], settings


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

    In all three operations `backend` is not an operand, so only `call` takes it. It has the functions of cpu.py; by
    default it is the device's.
    """
    head, _, settings = _read_head(*operands)
    backend, num_columns = backend or choose_backend(head.hidden, cpu), head.weight.size(0)
    shares = settings.get_shares(num_columns)
    dtype = torch.promote_types(head.hidden.dtype, torch.float32)
    statistics = head.hidden.new_empty(shares.num_statistics, *head.labels.shape, dtype=dtype)
    for rows, _, logits in head.make_logits(settings):
        columns = _cut(head.labels, rows) - settings.vocab_start
        part = backend.compute_statistics(logits, columns, shares)
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

    grad [t, m] is the gradient of the losses, grad_entropy that of the entropies. The weight's gradient is added to
    `total` if that is given. An operator cannot take it; only `compute_gradients.call` does.
    """
    head, has_grads, settings = _read_head(*operands)
    backend = backend or choose_backend(head.hidden, cpu)
    gradients = Gradients(head, has_grads, total, settings)
    shares = settings.get_shares(head.weight.size(0))

    def read_rows(rows: slice) -> Rows:
        labels, of_entropies = _cut(head.labels, rows), None if grad_entropy is None else _cut(grad_entropy, rows)
        columns = labels - settings.vocab_start
        return compute_rows(columns, labels, _cut(grad, rows), of_entropies, _cut(kept, rows), settings)

    if settings.chunk_columns:
        assert total is None
        whole = read_rows(slice(None))
        for columns, logits in head.make_columns(settings):
            num_real = min(max(shares.num_real - columns.start, 0), logits.size(1))
            own = whole._replace(columns=whole.columns - columns.start)
            backend.write_gradient_(logits, own, shares._replace(num_real=num_real))
            gradients.add_columns(columns, logits)
        return gradients.finish()
    for rows, tokens, logits in head.make_logits(settings):
        backend.write_gradient_(logits, read_rows(rows), shares)
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
    backend, num_columns = backend or choose_backend(head.hidden, cpu), head.weight.size(0)
    shares, losses = settings.get_shares(num_columns), torch.empty_like(token_weights)
    gradients = Gradients(head, has_grads, None, settings)
    for rows, tokens, logits in head.make_logits(settings):
        labels = _cut(head.labels, rows)
        columns = labels - settings.vocab_start
        statistics = join_shards(backend.compute_statistics(logits, columns, shares), num_columns, settings)
        results, kept = compute_results(statistics, labels, settings)
        losses[:, rows] = results[0].view(losses.size(0), -1)
        own = compute_rows(columns, labels, _cut(token_weights, rows), None, kept, settings)
        backend.write_gradient_(logits, own, shares)
        gradients.add(rows, tokens, logits)
    return [losses, *gradients.finish()]


OPERATIONS = (compute_losses, compute_gradients, compute_losses_and_gradients)
"""The operations that hold a chunk's logits inside, on a GPU too."""

"""Wraps the chunked loss head in operators, into which torch.compile, fake tensors and autocast do not look.

An operator takes flat operands: tensors, flags, then the numbers of a Settings one by one, and a group by its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.backend import choose_backend
from tempo_kernels.linear_cross_entropy import chunks, cpu
from tempo_kernels.linear_cross_entropy.chunks import Gradients, Head
from tempo_kernels.linear_cross_entropy.settings import Settings
from tempo_kernels.linear_cross_entropy.shards import Shards
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


def _read_problem(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *others: Any
) -> tuple[Head, tuple[bool, ...], Settings]:
    """Returns the tensors, which of them get a gradient, and the settings, from operands by the three schemas."""
    found = _read_settings(*others[3:])
    return make_head(hidden, weight, bias, labels, found), others[:3], found


def make_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: Settings, keeps_order: bool = False
) -> Head:
    """Brings the operation's tensors into the form in which they are computed. With keeps_order labels stay [b, s], for
    those kernels that `can_keep_order`."""
    if keeps_order:
        return Head(hidden.flatten(0, 1), weight, bias, labels, labels.shape[0])
    return Head(hidden.flatten(0, 1), weight, bias, order_rows(labels, settings))


def can_keep_order(hidden: Tensor, settings: Settings) -> bool:
    """Whether kernels can read and write [b, s] as it is: they can on a GPU, where one chunk of rows holds all tokens.
    Elsewhere torch copies it, which costs the host as much as four launches, and takes far less than several chunks."""
    num_rows = hidden.shape[0] * hidden.shape[1]
    return hidden.is_cuda and settings.takes_all(num_rows) and settings.shards.size == 1


def order_rows(t: Tensor, settings: Settings) -> Tensor:
    """Brings t [b, s] into the order of hidden's rows, [segments, s/segments * b]."""
    segments = settings.shards.num_segments
    t = t if 1 in t.shape else t.t()  # where one size is 1, both orders are the same
    return t.reshape(segments, t.numel() // segments)


def _make_empty_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *settings: Any
) -> list[Tensor]:
    found = _read_settings(*settings)
    segments, num_results = found.shards.num_segments, 2 if found.has_entropy else 1
    shape, dtype = (segments, labels.numel() // segments), torch.promote_types(hidden.dtype, torch.float32)
    results = [hidden.new_empty(shape, dtype=dtype) for _ in range(num_results)]
    return [*results, hidden.new_empty((num_results + 1, *shape), dtype=dtype)]


@opaque(f"linear_cross_entropy({_HEAD}, {_SETTINGS}) -> Tensor[]", _make_empty_losses)
def find_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *settings: Any, backend: Any = None
) -> list[Tensor]:
    """Returns losses and, if asked for, entropies [t, m], and the statistics for backward, [2 or 3, t, m].

    In all three operations `backend` is not an operand, so only `call` takes it. It has the functions of cpu.py; by
    default it is the device's.
    """
    found = _read_settings(*settings)
    head = make_head(hidden, weight, bias, labels, found)
    results, kept = compute_losses(head, found, backend)
    return [*results, kept]


def compute_losses(head: Head, settings: Settings, backend: Any = None) -> tuple[tuple[Tensor, ...], Tensor]:
    """As `find_losses`, without operands; results have the order of the head's labels."""
    return chunks.forward(head, settings, backend or choose_backend(head.hidden, cpu))


def _make_empty_gradients(grad: Tensor, grad_entropy: Tensor | None, kept: Tensor, *operands: Any) -> list[Tensor]:
    (hidden, weight, *_), has_grads, settings = _read_problem(*operands)
    gradients = [
        hidden.new_empty(hidden.shape),
        weight.new_empty(weight.shape, dtype=settings.find_weight_dtype(weight.dtype, hidden.size(0))),
        weight.new_empty(weight.shape[:1], dtype=torch.promote_types(weight.dtype, torch.float32)),
    ]
    return [t for t, has_grad in zip(gradients, has_grads, strict=True) if has_grad]


@opaque(
    f"linear_cross_entropy_backward(Tensor grad, Tensor? grad_entropy, Tensor kept, {_HEAD}, {_HAS_GRADS}, "
    f"{_SETTINGS}) -> Tensor[]",
    _make_empty_gradients,
)
def find_gradients(
    grad: Tensor,
    grad_entropy: Tensor | None,
    kept: Tensor,
    *operands: Any,
    total: Tensor | None = None,
    backend: Any = None,
) -> list[Tensor]:
    """Returns the gradients that are asked for: of hidden [m, h], of weight in `Settings.find_weight_dtype`, and of
    bias in float32.

    grad [t, m] is the gradient of the losses, grad_entropy that of the entropies. The weight's gradient is added to
    `total` if that is given. An operator cannot take it; only `find_gradients.call` does.
    """
    head, has_grads, settings = _read_problem(*operands)
    return _list(compute_gradients(grad, grad_entropy, kept, head, has_grads, settings, total, backend))


def compute_gradients(
    grad: Tensor,
    grad_entropy: Tensor | None,
    kept: Tensor,
    head: Head,
    has_grads: tuple[bool, ...],
    settings: Settings,
    total: Tensor | None = None,
    backend: Any = None,
) -> Gradients:
    """As `find_gradients`, without operands."""
    backend = backend or choose_backend(head.hidden, cpu)
    return chunks.backward((grad, grad_entropy), kept, head, has_grads, total, settings, backend)


def _make_empty_losses_and_gradients(token_weights: Tensor, *operands: Any) -> list[Tensor]:
    return [torch.empty_like(token_weights), *_make_empty_gradients(token_weights, None, token_weights, *operands)]


@opaque(
    f"weighted_linear_cross_entropy(Tensor token_weights, {_HEAD}, {_HAS_GRADS}, {_SETTINGS}) -> Tensor[]",
    _make_empty_losses_and_gradients,
)
def find_losses_and_gradients(token_weights: Tensor, *operands: Any, backend: Any = None) -> list[Tensor]:
    """Returns losses [t, m] and the gradients of sum(token_weights * losses) as in `find_gradients`."""
    head, has_grads, settings = _read_problem(*operands)
    backend = backend or choose_backend(head.hidden, cpu)
    losses, gradients = chunks.forward_with_gradients(token_weights, head, has_grads, settings, backend)
    return [losses, *_list(gradients)]


def _list(gradients: Gradients) -> list[Tensor]:
    return [t for t in (gradients.hidden, gradients.weight, gradients.bias) if t is not None]


OPERATIONS = (find_losses, find_gradients, find_losses_and_gradients)
"""The operations that hold a chunk's logits inside, on a GPU too."""

"""Checks the arguments of linear_cross_entropy and linear_log_prob, and chooses the size of their chunks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.linear_cross_entropy.settings import Settings, Shards

# The bytes of a chunk's logits, if there are several chunks. Each chunk reads and writes the weight's gradient once, so
# it must not be small. 28 MiB hold 144 tokens of GPT-2's vocabulary in float32: on a CPU about as fast as 256 tokens,
# while 64 are a tenth slower.
CHUNK_BYTES = {"cpu": 28 << 20, "cuda": 512 << 20}
_chunk_bytes: int | None = None


@contextlib.contextmanager
def use_chunk_bytes(num_bytes: int) -> Iterator[None]:
    """Makes a chunk's logits take num_bytes on every device inside the context, in place of CHUNK_BYTES."""
    global _chunk_bytes
    before, _chunk_bytes = _chunk_bytes, num_bytes
    try:
        yield
    finally:
        _chunk_bytes = before


def check_tensors(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, token_weights: Tensor | None, shards: Shards
) -> None:
    """Raises ValueError unless the tensors' shapes and dtypes agree."""
    if hidden.dim() != 3 or not hidden.is_floating_point():
        raise ValueError(f"hidden is {_describe(hidden)}; expected a floating-point [s, b, h] tensor")
    s, b, h = hidden.shape
    if weight.dim() != 2 or weight.size(1) != h or weight.size(0) < 1 or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight is {_describe(weight)}; expected {hidden.dtype} of shape [v, {h}], as hidden; cast it"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != hidden.dtype):
        raise ValueError(f"bias is {_describe(bias)}; expected {hidden.dtype} of shape {[weight.size(0)]}, as weight")
    tokens = [b, s * shards.num_segments]
    if labels.dtype != torch.int64 or list(labels.shape) != tokens:
        raise ValueError(
            f"labels are {_describe(labels)}; expected torch.int64 of shape {tokens}, [b, s] of the whole sequence"
        )
    if token_weights is not None and (
        token_weights.shape != labels.shape or not token_weights.is_floating_point() or token_weights.requires_grad
    ):
        raise ValueError(
            f"token_weights are {_describe(token_weights)}, requires_grad {token_weights.requires_grad}; expected "
            f"floating point of shape {tokens}, as labels, without gradient"
        )


def _describe(t: Tensor) -> str:
    return f"{t.dtype} of shape {list(t.shape)}"


def make_settings(
    hidden: Tensor, weight: Tensor, shards: Shards, vocab_size: int | None, chunk_tokens: int | None,
    main_grad: Tensor | None, **numbers: Any,
) -> Settings:  # fmt: skip
    """Builds the settings from numbers, which are named as theirs; raises ValueError where they do not fit.

    main_grad: what the chunks' gradients of weight are added to; without one, or where it has fewer bits than the sum,
        several chunks need memory for their sum.
    """
    is_summed = main_grad is not None and main_grad.dtype == torch.promote_types(weight.dtype, torch.float32)
    sums_weight = torch.is_grad_enabled() and weight.requires_grad and not is_summed
    chunk_rows = choose_chunk_rows(chunk_tokens, hidden, weight, shards, sums_weight)
    num_columns = weight.shape[0]
    num_rows = num_columns * shards.size
    if vocab_size is not None and not 1 <= vocab_size <= num_rows:
        raise ValueError(
            f"vocab_size is {vocab_size}; expected 1 to {num_rows}, the rows that weight has on all ranks together"
        )
    vocab_size = num_rows if vocab_size is None else vocab_size
    settings = Settings(shards, vocab_size, chunk_rows=chunk_rows, **numbers)
    if not 0.0 <= settings.label_smoothing < 1.0 or (settings.label_smoothing and vocab_size < 2):
        raise ValueError(
            f"label_smoothing is {settings.label_smoothing} over {vocab_size} rows; expected a number in [0, 1), "
            "and 0 where there is one row only"
        )
    if shards.group is not None and settings.vocab_start != shards.rank * num_columns:
        raise ValueError(
            f"vocab_start is {settings.vocab_start} on rank {shards.rank} of the group; expected "
            f"{shards.rank * num_columns}, the rank times the rows of weight"
        )
    return settings._replace(excludes_padding=settings.excludes_padding and vocab_size < num_rows)


def check_scaling(temperature: Any, softcap: Any) -> None:
    """Raises ValueError unless logits can be scaled by these."""
    if isinstance(temperature, Tensor) or not 0.0 < temperature < math.inf:
        found = f"a tensor of shape {list(temperature.shape)}" if isinstance(temperature, Tensor) else temperature
        raise ValueError(
            f"temperature is {found}; expected a finite number above 0; where each token has one, divide hidden by it"
        )
    if softcap is not None and not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; expected a finite number above 0, or None or 0 for none")


def get_main_grad(weight: Tensor) -> Tensor | None:
    """Returns what weight's gradient is added to; None where weight gets none. Raises ValueError if there is nothing to
    add it to."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None or main_grad.shape != weight.shape or hasattr(weight, "__fsdp_param__"):
        raise ValueError(
            "gradient_accumulation_fusion is on, but weight has no main_grad; expected one of weight's shape; wrap the "
            "model in Megatron's DistributedDataParallel or switch the fusion off"
        )
    return main_grad


def choose_chunk_rows(
    chunk_tokens: int | None, hidden: Tensor, weight: Tensor, shards: Shards, sums_weight: bool
) -> int:
    """Returns the rows of hidden per chunk, chunk_tokens / num_segments; by default those that need least memory.

    Several chunks sum a 16-bit weight's gradient in float32 and round it at the end. A single chunk needs no such sum:
    with few tokens the logits of all of them take less memory.
    """
    if chunk_tokens is not None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}; expected at least 1, or None")
        return max(1, chunk_tokens // shards.num_segments)
    num_segments, itemsize = shards.num_segments, weight.dtype.itemsize
    num_rows, logit_bytes = hidden.size(0) * hidden.size(1), weight.size(0) * itemsize
    chunk_bytes = _chunk_bytes or CHUNK_BYTES["cuda" if hidden.is_cuda else "cpu"]
    # Matrix products are fast for multiples of 16.
    chunk_rows = max(1, max(16, chunk_bytes // logit_bytes // 16 * 16) // num_segments)
    # Under sequence parallelism a chunk also holds the gathered tokens of all ranks and their gradients.
    token_bytes = logit_bytes + (2 * hidden.size(2) * itemsize if num_segments > 1 else 0)
    copy_bytes, sum_bytes = (size * weight.numel() for size in (itemsize, max(itemsize, torch.float32.itemsize)))
    at_once = num_rows * num_segments * token_bytes + copy_bytes
    in_chunks = sum_bytes + max(chunk_bytes, copy_bytes if sum_bytes != copy_bytes else 0)
    return chunk_rows if not sums_weight or in_chunks < at_once else max(1, num_rows)

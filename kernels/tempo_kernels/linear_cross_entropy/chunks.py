"""The loss head chunk by chunk of tokens: products, statistics over the shards, and gradients.

A chunk's logits are one matrix product; backend (cpu.py or kernel.py) turns them into statistics, or, over
themselves, into their gradient, and two more products bring that to the hidden states and to the weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tempo_kernels.linear_cross_entropy.shards import Shards

ROW_BLOCK_BYTES = 1 << 25
# Of the vocabulary: what a CPU's product with few tokens takes at once, for its result to stay in the cache.
CPU_BLOCK_COLUMNS = 1024


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is not a tensor."""

    shards: Shards
    vocab_size: int
    """Real rows of the whole vocabulary."""
    vocab_start: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    chunk_rows: int

    @property
    def other_share(self) -> float:
        return self.label_smoothing / (self.vocab_size - 1) if self.label_smoothing else 0.0

    @property
    def target_share(self) -> float:
        return 1.0 - self.vocab_size * self.other_share

    def num_real(self, rank: int, num_rows: int) -> int:
        """How many of a shard's rows are real."""
        return min(max(self.vocab_size - rank * num_rows, 0), num_rows)


class Head(NamedTuple):
    """The tensors: hidden [m, h] of this rank, weight [v/p, h], bias [v/p] or None, labels [t, m]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor

    def logits(self, settings: Settings) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Chunk by chunk: the slice of rows, their tokens [n, h], and logits [n, v/p] in memory that is used again."""
        memory = None
        for rows, tokens in settings.shards.gathered(self.hidden, settings.chunk_rows):
            if memory is None:
                memory = tokens.new_empty(tokens.size(0), self.weight.size(0))
            logits = memory[: tokens.size(0)]
            step = logits.size(1) if logits.is_cuda else CPU_BLOCK_COLUMNS
            for start in range(0, logits.size(1), step):
                block = slice(start, start + step)
                if self.bias is None:
                    torch.mm(tokens, self.weight[block].t(), out=logits[:, block])
                else:
                    torch.addmm(self.bias[block], tokens, self.weight[block].t(), out=logits[:, block])
            yield rows, tokens, logits

    def columns(self, rows: slice, settings: Settings) -> Tensor:
        """The targets [n] of a chunk as columns of this shard."""
        return self.labels[:, rows].reshape(-1) - settings.vocab_start


def forward(head: Head, settings: Settings, backend: Any) -> tuple[Tensor, Tensor]:
    """losses [t, m], and top and total over all shards [2, t, m]; the shards exchange their statistics once."""
    compute_dtype = torch.promote_types(head.hidden.dtype, torch.float32)
    num_rows, needs_sum = head.weight.size(0), settings.other_share > 0
    found = head.hidden.new_empty(3 + needs_sum, *head.labels.shape, dtype=compute_dtype)
    num_real = settings.num_real(settings.shards.rank, num_rows)
    for rows, _, logits in head.logits(settings):
        part = backend.statistics(logits, head.columns(rows, settings), num_real, needs_sum)
        found[:, :, rows] = part.view(len(found), head.labels.size(0), -1)
    return _losses(settings.shards.exchanged(found), head.labels, num_rows, settings)


def backward(
    grad: Tensor,
    kept: Tensor,
    head: Head,
    needs: tuple[bool, ...],
    total: Tensor | None,
    settings: Settings,
    backend: Any,
) -> Gradients:
    """Gradients of hidden, weight and bias from that of the losses [t, m]; every chunk's logits are made once more."""
    gradients = Gradients(head, needs, total, settings.shards)
    for rows, tokens, logits in head.logits(settings):
        of_chunk, kept_of_chunk, labels = (t[..., rows].flatten(-2) for t in (grad, kept, head.labels))
        _gradient(logits, head.columns(rows, settings), of_chunk, kept_of_chunk, labels, settings, backend)
        gradients.add(rows, tokens, logits)
    return gradients.finished()


def forward_with_gradients(
    token_weights: Tensor, head: Head, needs: tuple[bool, ...], settings: Settings, backend: Any
) -> tuple[Tensor, Gradients]:
    """losses [t, m] and the gradients of sum(token_weights * losses); the shards exchange statistics in every chunk."""
    num_rows, needs_sum = head.weight.size(0), settings.other_share > 0
    num_real = settings.num_real(settings.shards.rank, num_rows)
    losses = torch.empty_like(token_weights)
    gradients = Gradients(head, needs, None, settings.shards)
    for rows, tokens, logits in head.logits(settings):
        columns = head.columns(rows, settings)
        found = backend.statistics(logits, columns, num_real, needs_sum)
        labels, grad = (t[:, rows].reshape(-1) for t in (head.labels, token_weights))
        of_chunk, kept = _losses(settings.shards.exchanged(found), labels, num_rows, settings)
        losses[:, rows] = of_chunk.view(losses.size(0), -1)
        _gradient(logits, columns, grad, kept, labels, settings, backend)
        gradients.add(rows, tokens, logits)
    return losses, gradients.finished()


def _losses(found: Tensor, labels: Tensor, num_rows: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """Losses, and top and total over all shards, from every shard's statistics [p, 3 or 4, ...]."""
    tops, totals, targets = found[:, 0], found[:, 1], found[:, 2]
    top = tops.amax(0)
    total = (totals * (tops - top).exp()).sum(0)
    losses = total.log()
    logsumexp = top + losses
    losses = losses - settings.target_share * (targets.amax(0) - top)
    if settings.other_share > 0:
        for rank, (of_shard, shift) in enumerate(zip(found[:, 3], tops - top, strict=True)):
            losses -= settings.other_share * (of_shard + settings.num_real(rank, num_rows) * shift)
    if settings.z_loss:
        losses += settings.z_loss * logsumexp.square()
    return losses.masked_fill_(labels == settings.ignore_index, 0.0), torch.stack((top, total))


def _gradient(
    logits: Tensor, columns: Tensor, grad: Tensor, kept: Tensor, labels: Tensor, settings: Settings, backend: Any
) -> None:
    top, total = kept
    grad = grad.masked_fill(labels == settings.ignore_index, 0.0)
    scale = grad / total
    if settings.z_loss:
        scale *= 1.0 + 2.0 * settings.z_loss * (top + total.log())
    shares = settings.target_share, settings.other_share
    num_real = settings.num_real(settings.shards.rank, logits.size(1))
    backend.gradient_(logits, columns, top, scale, grad, *shares, num_real)


class Gradients:
    """Of hidden [m, h] in its dtype, and of weight and bias in float32; None where not needed.

    Args:
        head: whose gradients.
        needs: whether that of hidden, of weight, of bias.
        total: what the weight's gradient is added to in place of new memory.
        shards: whose parts are summed.
    """

    def __init__(self, head: Head, needs: tuple[bool, ...], total: Tensor | None, shards: Shards) -> None:
        compute_dtype = torch.promote_types(head.weight.dtype, torch.float32)
        self._shards, self._head_weight = shards, head.weight
        self._works: list[tuple[Any, Tensor]] = []
        self.hidden = torch.empty_like(head.hidden) if needs[0] else None
        self.weight = total
        if needs[1] and total is None:
            self.weight = head.weight.new_empty(head.weight.shape, dtype=compute_dtype)
        self._weight_is_empty = total is None
        self.bias = head.weight.new_zeros(head.weight.size(0), dtype=compute_dtype) if needs[2] else None

    def add(self, rows: slice, tokens: Tensor, grad_logits: Tensor) -> None:
        """The part of one chunk. What the ranks sum of it is under way when this returns."""
        if self.hidden is not None:
            self._add_hidden(self.hidden[rows], grad_logits)
        if self.weight is not None:
            _accumulate(self.weight, grad_logits, tokens, self._weight_is_empty)
            self._weight_is_empty = False
        if self.bias is not None:
            self.bias += grad_logits.sum(0, dtype=self.bias.dtype)

    def _add_hidden(self, out: Tensor, grad_logits: Tensor) -> None:
        if self._shards.num_segments == 1:
            torch.mm(grad_logits, self._head_weight, out=out)
            if self._shards.size > 1:
                self._works.append((self._shards.reduced(out), out))
            return
        part = torch.mm(grad_logits, self._head_weight)
        self._wait()  # of one chunk, so that two of its like are alive at most
        self._works.append((self._shards.reduce_scattered(part, out), part))

    def finished(self) -> Gradients:
        """These, with nothing under way any more."""
        self._wait()
        if self.weight is not None and self._weight_is_empty:
            self.weight.zero_()  # there are no tokens
        return self

    def _wait(self) -> None:
        while self._works:
            self._works.pop()[0].wait()


def _accumulate(total: Tensor, grad_logits: Tensor, tokens: Tensor, is_empty: bool) -> None:
    """total [v/p, h] = or, where it is not empty, += grad_logits^T tokens."""
    if total.dtype == grad_logits.dtype:
        torch.addmm(total, grad_logits.t(), tokens, beta=0 if is_empty else 1, out=total)
        return
    # A product of 16-bit matrices is rounded to 16 bits once per chunk; the sum over chunks is not.
    step = max(1, ROW_BLOCK_BYTES // (total.size(1) * tokens.element_size()))
    for start in range(0, total.size(0), step):
        block = slice(start, start + step)
        part = total[block]
        # Nothing holds on to the product while the next one is made.
        (part.copy_ if is_empty else part.add_)(grad_logits[:, block].t() @ tokens)

"""Runs the loss head one chunk of tokens at a time: products, statistics over the shards, and gradients.

With fewer tokens than rows of the weight, backward goes through it one chunk of the weight's rows at a time instead.

A chunk's logits are one matrix product. The backend (cpu.py or kernel.py) computes their statistics, or overwrites them
with their gradient. Two more products turn this gradient into those of the hidden states and of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tempo_kernels.linear_cross_entropy.settings import Settings
from tempo_kernels.linear_cross_entropy.shards import take
from tempo_kernels.opaque import skip_alike

ROW_BLOCK_BYTES = 1 << 25
# Columns of the vocabulary per product on a CPU: few enough that the result of a few tokens stays in the cache.
CPU_BLOCK_COLUMNS = 1024
_HAS_WIDE_PRODUCT = hasattr(torch.ops.aten.addmm, "dtype_out")


class Head(NamedTuple):
    """The tensors of the head: hidden [m, h] of this rank, weight [v/p, h], bias [v/p] or None, labels [t, m]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    batch: int | None = None
    """If given, labels, losses, entropies and their gradients are [b, s], with this b, and one chunk holds all of them;
    only the kernels on a GPU take them so."""

    @property
    def order(self) -> tuple[int, ...]:
        """Returns the last argument of a backend that takes the batch, or none."""
        return () if self.batch is None else (self.batch,)

    def make_logits(self, settings: Settings) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields per chunk the slice of rows, their tokens [n, h], and logits [n, v/p] in a shared buffer."""
        if self.hidden.is_cuda and settings.takes_all(self.hidden.shape[0]):
            logits = torch.nn.functional.linear(self.hidden, self.weight, self.bias)
            yield slice(0, self.hidden.shape[0]), self.hidden, logits
            return
        memory = None
        for rows, tokens in settings.shards.gather(self.hidden, settings.chunk_rows):
            num_tokens, num_columns = tokens.shape[0], self.weight.shape[0]
            if memory is None:
                memory = tokens.new_empty(num_tokens, num_columns)
            logits = take(memory, slice(0, num_tokens))
            if logits.is_cuda:
                self._multiply(tokens, self.weight, self.bias, logits)
            else:
                for start in skip_alike(range(0, num_columns, CPU_BLOCK_COLUMNS), logits):
                    block = slice(start, start + CPU_BLOCK_COLUMNS)
                    bias = None if self.bias is None else take(self.bias, block)
                    self._multiply(tokens, take(self.weight, block), bias, take(logits, block, 1))
            yield rows, tokens, logits

    @staticmethod
    def _multiply(tokens: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Writes tokens weight^T + bias to out."""
        if bias is None:
            torch.mm(tokens, weight.t(), out=out)
        else:
            torch.addmm(bias, tokens, weight.t(), out=out)

    def make_columns(self, settings: Settings) -> Iterator[tuple[slice, Tensor]]:
        """Yields per chunk the slice of columns, and logits [m, n] in a shared buffer."""
        num_rows, num_columns = self.hidden.size(0), self.weight.size(0)
        memory = self.hidden.new_empty(num_rows * min(num_columns, settings.chunk_columns))
        starts = range(0, num_columns, settings.chunk_columns)
        blocks = [slice(start, min(start + settings.chunk_columns, num_columns)) for start in starts]
        for block in skip_alike(blocks, memory):
            size = block.stop - block.start
            logits = memory[: num_rows * size].view(num_rows, size)
            bias = None if self.bias is None else take(self.bias, block)
            self._multiply(self.hidden, take(self.weight, block), bias, logits)
            yield block, logits

    def find_targets(self, rows: slice, settings: Settings) -> tuple[Tensor, Tensor]:
        """Returns the labels of a chunk, [n] or, where they keep their order, [b, s], and the same labels as columns of
        this shard."""
        labels = self.labels if self.batch is not None else take(self.labels, rows, 1).flatten()
        return labels, labels - settings.vocab_start if settings.vocab_start else labels


def forward(head: Head, settings: Settings, backend: Any) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns losses and, if asked for, entropies, each as head.labels, and for backward each token's top, total and
    expected over all shards [2 or 3, t, m]. The shards exchange their statistics once."""
    (_, num_tokens), num_columns = head.labels.shape, head.weight.shape[0]
    shares = settings.find_shares(num_columns)
    shape = shares.num_statistics, *head.labels.shape
    found = None
    for rows, _, logits in head.make_logits(settings):
        part = backend.find_statistics(logits, head.find_targets(rows, settings)[1], shares, *head.order)
        if head.batch is not None:
            found = part
            break
        part = part.view(*shape[:2], -1)
        if part.size(2) == num_tokens:
            found = part
        else:
            found = part.new_empty(shape) if found is None else found
            take(found, rows, 2).copy_(part)
    if found is None:  # there are no tokens
        found = head.hidden.new_empty(shape, dtype=torch.promote_types(head.hidden.dtype, torch.float32))
    whole = _find_whole(found, num_columns, settings)
    results, kept = backend.find_results(whole, head.labels, settings, *head.order)
    return results, kept


def backward(
    grads: tuple[Tensor, Tensor | None],
    kept: Tensor,
    head: Head,
    has_grads: tuple[bool, ...],
    total: Tensor | None,
    settings: Settings,
    backend: Any,
) -> Gradients:
    """Returns the gradients of hidden, weight and bias from those of the losses and, if not None, of the entropies,
    each as head.labels. It computes each chunk's logits again."""
    gradients = Gradients(head, has_grads, total, settings)
    shares = settings.find_shares(head.weight.size(0))
    if settings.chunk_columns:
        assert total is None
        whole = slice(0, head.hidden.size(0))
        labels, columns = head.find_targets(whole, settings)
        of_losses, of_entropies = (None if t is None else t.flatten() for t in grads)
        assert of_losses is not None
        for block, logits in head.make_columns(settings):
            num_real = min(max(shares.num_real - block.start, 0), logits.size(1))
            found = backend.list_rows(columns - block.start, labels, of_losses, of_entropies, kept.flatten(1), settings)
            backend.write_gradient_(logits, found, shares._replace(num_real=num_real))
            gradients.add_columns(block, logits)
        return gradients.finish()
    for rows, tokens, logits in head.make_logits(settings):
        labels, columns = head.find_targets(rows, settings)
        (grad, grad_entropy), kept_of_chunk = grads, kept
        if head.batch is None:
            kept_of_chunk, grad = take(kept, rows, 2).flatten(1), take(grads[0], rows, 1).flatten()
            grad_entropy = None if grads[1] is None else take(grads[1], rows, 1).flatten()
        found = backend.list_rows(columns, labels, grad, grad_entropy, kept_of_chunk, settings, *head.order)
        backend.write_gradient_(logits, found, shares, *head.order)
        gradients.add(rows, tokens, logits)
    return gradients.finish()


def forward_with_gradients(
    token_weights: Tensor, head: Head, has_grads: tuple[bool, ...], settings: Settings, backend: Any
) -> tuple[Tensor, Gradients]:
    """Returns losses [t, m] and the gradients of sum(token_weights * losses); shards exchange statistics per chunk."""
    num_columns = head.weight.size(0)
    shares = settings.find_shares(num_columns)
    losses = torch.empty_like(token_weights)
    gradients = Gradients(head, has_grads, None, settings)
    for rows, tokens, logits in head.make_logits(settings):
        labels, columns = head.find_targets(rows, settings)
        found = _find_whole(backend.find_statistics(logits, columns, shares), num_columns, settings)
        results, kept = backend.find_results(found, labels, settings)
        take(losses, rows, 1).copy_(results[0].view(losses.size(0), -1))
        grad = take(token_weights, rows, 1).reshape(-1)
        backend.write_gradient_(logits, backend.list_rows(columns, labels, grad, None, kept, settings), shares)
        gradients.add(rows, tokens, logits)
    return losses, gradients.finish()


def _find_whole(found: Tensor, num_columns: int, settings: Settings) -> Tensor:
    """Exchanges the shards' statistics [3 to 5, ...] and joins them to those of the whole vocabulary."""
    if settings.shards.size == 1:
        return found
    found = settings.shards.exchange(found)
    tops, totals, targets = found[:, 0], found[:, 1], found[:, 2]
    top = tops.amax(0)
    shifts = tops - top
    factors = shifts.exp()
    whole = [top, (totals * factors).sum(0), targets.amax(0)]
    if settings.other_share > 0:
        of_shards = enumerate(zip(found[:, 3], shifts, strict=True))
        others = [of_shard + settings.count_real(rank, num_columns) * shift for rank, (of_shard, shift) in of_shards]
        whole.append(torch.stack(others).sum(0))
    if settings.has_entropy:
        # A shard whose every logit is -inf adds nothing.
        shifts = shifts.masked_fill(factors == 0, 0.0)
        whole.append(((found[:, -1] + totals * shifts) * factors).sum(0))
    return torch.stack(whole)


class Gradients:
    """Sums over chunks the gradients of hidden [m, h] in its dtype, of weight in the dtype of
    `settings.find_weight_dtype`, and of bias in float32; None for those that are not asked for.

    Args:
        head: the tensors whose gradients these are.
        has_grads: whether hidden, weight and bias get a gradient.
        total: the tensor to which the weight's gradient is added; None for a new one.
        settings: names the ranks whose parts are summed.
    """

    def __init__(self, head: Head, has_grads: tuple[bool, ...], total: Tensor | None, settings: Settings) -> None:
        hidden, weight = head.hidden, head.weight
        self._shards, self._head = settings.shards, head
        self._works: list[tuple[Any, Tensor]] = []
        self._sums_hidden = settings.chunk_columns > 0
        self._has_grads = has_grads
        self._takes_all = settings.takes_all(hidden.shape[0])
        compute_dtype = weight.dtype if weight.dtype == torch.float64 else torch.float32
        dtype = compute_dtype if self._sums_hidden else hidden.dtype
        self.hidden: Tensor | None = None
        if has_grads[0] and not self._takes_all:
            self.hidden = torch.empty_like(hidden, dtype=dtype)
        self.weight = total
        if has_grads[1] and total is None and not self._takes_all:
            dtype = settings.find_weight_dtype(weight.dtype, hidden.shape[0])
            self.weight = weight.new_empty(weight.shape, dtype=dtype)
        self._weight_is_empty = total is None
        self.bias = weight.new_zeros(weight.shape[0], dtype=compute_dtype) if has_grads[2] else None

    def add(self, rows: slice, tokens: Tensor, grad_logits: Tensor) -> None:
        """Adds the part of one chunk. The reduction over the ranks may still run when this returns."""
        if self._takes_all and self._has_grads[0]:
            self.hidden = torch.mm(grad_logits, self._head.weight)
            self._reduce(self.hidden)
        elif self.hidden is not None:
            self._add_hidden(take(self.hidden, rows), grad_logits)
        if self._takes_all and self._has_grads[1] and self.weight is None:
            self.weight, self._weight_is_empty = torch.mm(grad_logits.t(), tokens), False
        elif self.weight is not None:
            _accumulate(self.weight, grad_logits.t(), tokens, self._weight_is_empty)
            self._weight_is_empty = False
        if self.bias is not None:
            self.bias += grad_logits.sum(0, dtype=self.bias.dtype)

    def add_columns(self, block: slice, grad_logits: Tensor) -> None:
        """Adds the part of a chunk of columns: all of these rows of weight's gradient, and a part of hidden's."""
        if self.hidden is not None:
            _accumulate(self.hidden, grad_logits, take(self._head.weight, block), block.start == 0)
        if self.weight is not None:
            torch.mm(grad_logits.t(), self._head.hidden, out=take(self.weight, block))
            self._weight_is_empty = False
        if self.bias is not None:
            take(self.bias, block).copy_(grad_logits.sum(0, dtype=self.bias.dtype))

    def _add_hidden(self, out: Tensor, grad_logits: Tensor) -> None:
        if self._shards.num_segments == 1:
            torch.mm(grad_logits, self._head.weight, out=out)
            self._reduce(out)
            return
        part = torch.mm(grad_logits, self._head.weight)
        self._wait()  # for the previous chunk's reduction, so that at most two parts are alive
        self._works.append((self._shards.reduce_scatter(part, out), part))

    def _reduce(self, part: Tensor) -> None:
        """Starts to sum the shards' parts of a chunk in place."""
        if self._shards.size > 1:
            self._works.append((self._shards.reduce(part), part))

    def finish(self) -> Gradients:
        """Waits for the ranks' sums and returns self."""
        if self._sums_hidden and self.hidden is not None:
            self.hidden = self.hidden.to(self._head.hidden.dtype)
            if self._shards.size > 1:
                self._works.append((self._shards.reduce(self.hidden), self.hidden))
        self._wait()
        if self.weight is not None and self._weight_is_empty:
            self.weight.zero_()  # there are no tokens
        return self

    def _wait(self) -> None:
        while self._works:
            self._works.pop()[0].wait()


def _accumulate(total: Tensor, left: Tensor, right: Tensor, is_empty: bool) -> None:
    """Adds left right to total, or writes it there if total is empty."""
    beta = 0 if is_empty else 1
    if total.dtype == right.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
        return
    if _multiplies_into(total):
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
        return
    # A product of 16-bit matrices is rounded to 16 bits, once per chunk; the sum over chunks stays in float32.
    step = max(1, ROW_BLOCK_BYTES // (total.size(1) * right.element_size()))
    for start in range(0, total.size(0), step):
        block = slice(start, start + step)
        part = total[block]
        # Written in one expression, so that no name keeps the product alive while the next one is made.
        (part.copy_ if is_empty else part.add_)(left[block] @ right)


def _multiplies_into(total: Tensor) -> bool:
    """Whether torch can add a product of 16-bit matrices to a float32 `total` without rounding it first: on a GPU, from
    about torch 2.8 on."""
    return total.is_cuda and total.dtype == torch.float32 and _HAS_WIDE_PRODUCT

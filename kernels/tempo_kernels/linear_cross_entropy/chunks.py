"""Makes the logits of one chunk at a time, and adds up over chunks what their gradients give.

A chunk's logits are one matrix product; two more turn their gradient into those of the hidden states and of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tempo_kernels.linear_cross_entropy.settings import Settings
from tempo_kernels.opaque import skip_alike

CPU_BLOCK_COLUMNS = 1024
"""Columns of the vocabulary per product on a CPU: few enough that the result of a few tokens stays in the cache."""
_PRODUCT_BYTES = 1 << 25
_HAS_WIDE_PRODUCT = hasattr(torch.ops.aten.addmm, "dtype_out")


class Head(NamedTuple):
    """The tensors of the head: hidden [m, h] of this rank, weight [v/p, h], bias [v/p] or None, labels [t, m]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor

    def make_logits(self, settings: Settings) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields per chunk of tokens the slice of rows, the tokens [n, h], and logits [n, v/p] in a shared buffer."""
        memory = None
        for rows, tokens in settings.shards.gather(self.hidden, settings.chunk_rows):
            memory = tokens.new_empty(tokens.size(0), self.weight.size(0)) if memory is None else memory
            logits = memory[: tokens.size(0)]
            step = logits.size(1) if logits.is_cuda else CPU_BLOCK_COLUMNS
            for start in skip_alike(range(0, logits.size(1), step), logits):
                columns = slice(start, start + step)
                weight = self.weight[columns].t()
                if self.bias is None:
                    torch.mm(tokens, weight, out=logits[:, columns])
                else:
                    torch.addmm(self.bias[columns], tokens, weight, out=logits[:, columns])
            yield rows, tokens, logits


class Gradients:
    """Sums over chunks the gradients of hidden [m, h] in its dtype, of weight in `Settings.get_weight_dtype`, and of
    bias in float32; None for those that are not asked for. The weight's is added to `total` if that is given."""

    def __init__(self, head: Head, has_grads: Sequence[bool], total: Tensor | None, settings: Settings) -> None:
        hidden, weight = head.hidden, head.weight
        self._shards, self._head, self._begins_weight = settings.shards, head, total is None
        self.hidden = torch.empty_like(hidden) if has_grads[0] else None
        self.weight = total
        self.bias: Tensor | None = None
        if has_grads[1] and total is None:
            self.weight = torch.empty_like(weight, dtype=settings.get_weight_dtype(weight.dtype, hidden.size(0)))
        if has_grads[2]:
            self.bias = weight.new_zeros(weight.size(0), dtype=torch.promote_types(weight.dtype, torch.float32))

    def add(self, rows: slice, tokens: Tensor, grad_logits: Tensor) -> None:
        """Adds the part of a chunk. The ranks sum hidden's while the weight's is computed."""
        work = None
        if self.hidden is not None:
            out = self.hidden[rows]
            part = out if self._shards.num_segments == 1 else out.new_empty(tokens.shape)
            _accumulate(part, grad_logits, self._head.weight, True)
            work = self._shards.start_reduction(part, out)
        if self.weight is not None:
            _accumulate(self.weight, grad_logits.t(), tokens, self._begins_weight and rows.start == 0)
        if self.bias is not None:
            self.bias.add_(grad_logits.sum(0, dtype=self.bias.dtype))
        if work is not None:
            work.wait()

    def finish(self) -> list[Tensor]:
        """Returns those that are asked for."""
        if self.weight is not None and self._begins_weight and not self._head.hidden.size(0):
            self.weight.zero_()
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]


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
    step = max(1, _PRODUCT_BYTES // (total.size(1) * right.element_size()))
    for start in range(0, total.size(0), step):
        block = slice(start, start + step)
        part = total[block]
        # Written in one expression, so that no name keeps the product alive while the next one is made.
        (part.copy_ if is_empty else part.add_)(left[block] @ right)


def _multiplies_into(total: Tensor) -> bool:
    """Whether torch can add a product of 16-bit matrices to a float32 `total` without rounding it first: on a GPU, from
    about torch 2.8 on."""
    return total.is_cuda and total.dtype == torch.float32 and _HAS_WIDE_PRODUCT


def join_shards(statistics: Tensor, num_columns: int, settings: Settings) -> Tensor:
    """Exchanges the shards' statistics [3 to 5, ...] and joins them to those of the whole vocabulary."""
    if settings.shards.size == 1:
        return statistics
    found = settings.shards.exchange(statistics)
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

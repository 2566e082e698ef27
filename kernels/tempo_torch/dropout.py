"""Replaces nn.Dropout by one whose mask is a function of positions: backward draws it again, and nothing is kept."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.philox import LANES
from tempo_kernels.recompute import adopt
from tempo_torch.linear import can_be_made, drop_input
from tempo_torch.position import DropoutPlace
from tempo_torch.replace import Replaced


class RedrawnDropout(Replaced):
    """Dropout of [samples, ...]: Philox decides by sample i and element j whether to drop element (i, j) of the input,
    viewed as [samples, elements of a sample].

    The first dimension counts the samples, or a multiple of them, as in [samples * tokens, h]. If it is neither, the
    mask belongs to the tensor as a whole and depends on the batch. Ranks that share the tokens of a sample, as many on
    each, have parts of one sample's mask, one behind the other: where an input is [samples, tokens, ...], those that
    their tokens have on one process.

    Keeps for backward: nothing. If the input can be recomputed or `keeps_input` is set, the input, from which the next
    linear recomputes the output.
    """

    keeps_input = False

    def forward(self, x: Tensor) -> Tensor:
        """Returns y of x's shape and dtype, or x itself in eval and for p = 0."""
        if not self.training or self.p == 0.0 or x.numel() == 0:
            return x
        if self.p == 1.0:
            return F.dropout(x, 1.0)
        return apply_dropout(x, self.p, self.place, self.keeps_input)


def apply_dropout(x: Tensor, p: float, place: DropoutPlace, keeps_input: bool = False) -> Tensor:
    """Drops elements of x [samples, ...] by the mask of `place`."""
    key, first_sample, num_samples = place.draw(x.device)
    rows = num_samples if x.dim() > 0 and x.size(0) % num_samples == 0 else 1
    p = place.passes.get_probability(p)
    draw = (rows, p, key, first_sample, _compute_first_column(x.numel() // rows, *place.passes.samples.sequence))
    # torch.compile decides itself what is kept.
    traced = torch.compiler.is_compiling()
    if traced or not torch.is_grad_enabled() or not x.requires_grad or not (keeps_input or can_be_made(x)):
        return _draw(x, *draw)
    y = adopt(_draw(x, *draw), _draw, x, *draw)
    if not keeps_input:
        drop_input(x, y)
    return y


def _compute_first_column(num_columns: int, part: int, num_parts: int) -> int:
    if num_parts > 1 and num_columns % LANES:
        raise ValueError(
            f"a dropout of {num_columns} elements of a sample on each of {num_parts} ranks that share its tokens is "
            f"asked for; expected a multiple of {LANES}, as one draw serves {LANES}; give each rank more tokens"
        )
    return part and part * num_columns


def _draw(x: Tensor, rows: int, p: float, key: int | Tensor, first_sample: int | Tensor, column: int) -> Tensor:
    # One row per sample, or part of one, so that the mask does not depend on the shape of a sample.
    y = x.reshape(1, rows, -1)
    y = bias_dropout_add(y, None, None, p=p, key=key, first_sample=first_sample, first_column=column)
    return y.view(x.shape)

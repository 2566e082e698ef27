"""torch.set_default_dtype changes no result of a kernel: see interpreted.py for where they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, kernel_test
from torch import Tensor

from tempo_kernels.dropout_add import Draw
from tempo_kernels.dropout_add import kernel as dropout_add
from tempo_kernels.gelu import kernel as gelu
from tempo_kernels.glu import kernel as glu
from tempo_kernels.linear_cross_entropy import kernel as loss
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares
from tempo_kernels.pointwise import kernel as pointwise
from tempo_kernels.squared_relu import kernel as squared_relu


def gradients_of_gelu(x: Tensor, bias: Tensor) -> tuple[Any, ...]:
    y, bits = pointwise.forward_with_bits(x, bias, "gelu", -0.75)
    return y, *gelu.backward(x, y, bits, "none", True), *pointwise.backward(x, x, bias, "gelu", True)


def gradients_of_logits(x: Tensor, _: Tensor) -> tuple[Any, ...]:
    columns = torch.arange(x.size(0), dtype=torch.int64, device=x.device)
    shares = Shares(0.9, 1e-3, 30)
    found, gradient = loss.find_statistics(x, columns, shares), x.clone()
    loss.write_gradient_(gradient, Rows(columns, found[0], 0.1 / found[1], found[1]), shares)
    return found, gradient


def gradients_of_scaled_logits(x: Tensor, _: Tensor) -> tuple[Any, ...]:
    columns = torch.arange(x.size(0), dtype=torch.int64, device=x.device)
    shares = Shares(1.0, 0.0, 30, True, 5.0, 0.7, True)
    found, gradient = loss.find_statistics(x, columns, shares), x.clone()
    loss.write_gradient_(gradient, Rows(columns, found[0], 0.1 / found[1], found[1], 0.2 / found[1]), shares)
    return found, gradient


OPERATIONS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "gelu": gradients_of_gelu,
    "glu": lambda x, bias: (glu.forward(x, bias, "silu"), *glu.backward(x[:, :16], x, bias, "silu", True)),
    "glu of nothing": lambda x, bias: glu.backward(x[:0, :16], x[:0], bias, "silu", True),
    "squared_relu": lambda x, _: squared_relu.backward(x, x.abs(), True),
    "dropout_add": lambda x, _: dropout_add.backward(x.unsqueeze(1), Draw(0.1, 7, 0, 0), True),
    "dropout_add of nothing": lambda x, _: dropout_add.backward(x[:0].unsqueeze(1), Draw(0.1, 7, 0, 0), True),
    # A program has a row to itself: 40 rows, of which the last ten have their target in no column.
    "linear_cross_entropy": lambda x, bias: gradients_of_logits(x[:40], bias),
    "linear_log_prob": lambda x, bias: gradients_of_scaled_logits(x[:40], bias),
}


@kernel_test
@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")
@parametrize_covering(each={"name": OPERATIONS.keys(), "default": [torch.bfloat16, torch.float64]})
def test_a_default_dtype_changes_no_bit_of_a_kernels_result(name: str, default: torch.dtype) -> None:
    x, bias = (torch.randn(shape, dtype=torch.float32, device=DEVICE) for shape in ((300, 32), (32,)))
    wanted = OPERATIONS[name](x, bias)
    torch.set_default_dtype(default)
    try:
        found = OPERATIONS[name](x, bias)
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)

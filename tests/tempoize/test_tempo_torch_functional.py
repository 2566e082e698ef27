"""Models as nanoGPT and timm write them: a forward that calls F.scaled_dot_product_attention, and a norm of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional
from torch import Tensor, nn
from torch.nn import functional as F

from tempo_kernels.recompute import find_saved_tensors
from tempo_torch import report_on, samples, tempoize

HIDDEN, HEADS, LENGTH = 32, 4, 24


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class OwnAttention(nn.Module):
    """`mask` is None for causal, or added or bool."""

    def __init__(self, p: float, mask: Tensor | None) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = OwnNorm(), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.p, self.mask = p, mask

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        p = self.p if self.training else 0.0
        is_causal = self.mask is None
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, self.mask, dropout_p=p, is_causal=is_causal)
        return x + self.out(y.transpose(1, 2).contiguous().view(b, s, h))


def build(p: float = 0.5, mask: Tensor | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OwnAttention(p, mask), OwnAttention(p, mask)).train()


def keeps_scores(y: Tensor) -> bool:
    """Whether a node of the graph keeps a tensor [b, a, s, s]."""
    pending, seen = [y.grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(parent for parent, _ in node.next_functions)
        saved = [t for _, t in find_saved_tensors(node) if t is not None and t.is_floating_point()]
        if any(t.shape[-2:] == (LENGTH, LENGTH) for t in saved):
            return True
    return False


BOOL = torch.rand(1, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.7


@pytest.mark.parametrize("mask", [None, BOOL, BOOL[0, 0]], ids=["causal", "mask", "mask of two dimensions"])
def test_the_mask_of_a_sample_depends_on_no_other_and_no_scores_are_kept(mask: Tensor | None) -> None:
    x = torch.randn(4, LENGTH, HIDDEN, requires_grad=True)
    model = tempoize(build(mask=mask), seed=1)
    with samples(model, 8):
        whole = model(x)
    assert not keeps_scores(whole) and keeps_scores(build(mask=mask)(x))
    for first in (0, 2):
        with samples(model, 8 + first):
            torch.testing.assert_close(model(x[first : first + 2]), whole[first : first + 2], rtol=1e-5, atol=1e-6)
    with samples(model, 9):
        assert not torch.allclose(model(x), whole)
    assert "replaced  attention  OwnAttention  flash" in str(report_on(model)).replace("   ", "  ")


@pytest.mark.parametrize("mask", [None, BOOL], ids=["causal", "mask"])
def test_the_mean_over_masks_and_the_rows_at_p_0_are_stocks(mask: Tensor | None) -> None:
    x = torch.randn(2, LENGTH, HIDDEN)
    stock = build(p=0.0, mask=mask)
    expected = stock(x)
    torch.testing.assert_close(tempoize(build(p=0.0, mask=mask), seed=1)(x), expected, rtol=1e-5, atol=1e-5)
    model = tempoize(build(p=0.1, mask=mask)[:1], seed=1)
    mean = torch.stack([model(x) for _ in range(800)]).mean(0)
    torch.testing.assert_close(mean, stock[:1](x), rtol=0.0, atol=0.05)


def test_what_it_cannot_serve_stays_stock_and_the_report_says_why() -> None:
    added = torch.zeros(LENGTH, LENGTH)
    model = tempoize(build(mask=added), seed=1)
    model(torch.randn(2, LENGTH, HIDDEN))
    assert "adds a tensor to its scores" in str(report_on(model))
    required = tempoize(build(mask=added), seed=1, attention="flash")
    with pytest.raises(ValueError, match='attention is "flash".*adds a tensor to its scores'):
        required(torch.randn(2, LENGTH, HIDDEN))


def test_a_norm_over_channels_is_not_taken_for_one_over_the_last_dimension() -> None:
    model = nn.Sequential(nn.GroupNorm(1, 8), nn.Linear(8, 8)).train()
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 1.5)
    x = torch.randn(2, 8, 8)
    expected = model(x)
    torch.testing.assert_close(tempoize(model, seed=1)(x), expected)


def test_a_norm_with_its_eps_in_its_code_is_recognised() -> None:
    report = str(report_on(tempoize(build(), seed=1)))
    assert report.count("OwnNorm") == 1 and "inplace" in report and "no eps" not in report

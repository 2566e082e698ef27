"""Under autocast the inputs' dtype decides, in forward and in backward: nothing is less exact than stock there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from covering import parametrize_covering
from torch import Tensor
from witness import assert_within_rule

from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import swiglu
from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from tempo_kernels.squared_relu import squared_relu

S, B, H, V = 48, 2, 32, 40
LABELS = torch.arange(S * B).view(B, S) % V
TOKEN_WEIGHTS = torch.full((B, S), 0.3)


def attend(q: Tensor, k: Tensor, form: str) -> Tensor:
    q, k = q.view(S, B, 2, -1), k.view(S, B, 2, -1)
    return attention(q, k, k, causal=True, softmax_scale=0.5, form=form)


def stock_attention(q: Tensor, k: Tensor) -> Tensor:
    # [b, a, s, d]
    q, k = (t.view(S, B, 2, -1).permute(1, 2, 0, 3) for t in (q, k))
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ k).permute(2, 0, 1, 3)


def stock_losses(x: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight[:V, 0]).flatten(0, 1), LABELS.t().flatten(), reduction="none").view(S, B)


OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (lambda x, _: gelu(x), lambda x, _: F.gelu(x)),
    "gelu of its input": (lambda x, _: gelu(x, keep="input"), lambda x, _: F.gelu(x)),
    "squared_relu": (lambda x, _: squared_relu(x), lambda x, _: F.relu(x).square()),
    "swiglu": (lambda x, _: swiglu(x), lambda x, _: F.silu(x[..., : H // 2]) * x[..., H // 2 :]),
    "bias_dropout_add": (lambda x, y: bias_dropout_add(x, None, y, p=0.0, key=1), lambda x, y: y + x),
    "attention": (lambda q, k: attend(q, k, "flash"), stock_attention),
    "attention keeping its softmax": (lambda q, k: attend(q, k, "softmax"), stock_attention),
    "linear_cross_entropy": (lambda x, w: linear_cross_entropy(x, w[:V, 0], LABELS).t(), stock_losses),
    "linear_cross_entropy with token_weights": (
        lambda x, w: linear_cross_entropy(x, w[:V, 0], LABELS, token_weights=TOKEN_WEIGHTS)[0],
        lambda x, w: (stock_losses(x, w) * 0.3).sum(),
    ),
    "linear_log_prob": (lambda x, w: linear_log_prob(x, w[:V, 0], LABELS).t(), lambda x, w: -stock_losses(x, w)),
}


def run(
    function: Callable[[Tensor, Tensor], Tensor], inputs: list[Tensor], casts: bool, casts_backward: bool = False
) -> list[Tensor | None]:
    """Output and gradients."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    with torch.autocast("cpu", torch.bfloat16) if casts else nullcontext():
        out = function(*leaves)
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    with torch.autocast("cpu", torch.bfloat16) if casts_backward else nullcontext():
        out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@parametrize_covering(
    name=OPERATIONS.keys(),
    dtype=[torch.float32, torch.float16],
    casts_backward={"backward outside": False, "backward inside": True},
)
def test_autocast_changes_no_bit(name: str, dtype: torch.dtype, casts_backward: bool) -> None:
    inputs = [torch.randn(S, B, H).to(dtype) for _ in range(2)]
    plain = run(OPERATIONS[name][0], inputs, False)
    for found, wanted in zip(run(OPERATIONS[name][0], inputs, True, casts_backward), plain, strict=True):
        assert (found is None and wanted is None) or (found.dtype == wanted.dtype and torch.equal(found, wanted))


# In-place GELU has an error of its own, whatever autocast does; see test_gelu.py.
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "gelu"])
def test_nothing_is_less_exact_than_stock_under_autocast(name: str) -> None:
    inputs = [torch.randn(S, B, H) for _ in range(2)]
    ours, stock = OPERATIONS[name]
    witnesses = [
        run(ours, inputs, True), run(stock, inputs, True), run(stock, [t.double() for t in inputs], False),
    ]  # fmt: skip
    for found, same, exact in zip(*witnesses, strict=True):
        if exact is not None:
            assert_within_rule(name, found, same.to(found.dtype), exact)

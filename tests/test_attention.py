from __future__ import annotations

import pytest
import torch
from witness import assert_three_witnesses, kept_storages

from tempo_kernels.attention import attention
from tempo_kernels.attention.eager import MASKED_SCORE
from tempo_kernels.philox import drop_mask, effective_probability

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KEY, FIRST_SAMPLE, FIRST_HEAD, SCALE = 0xABCDEF0123456789, 3, 4, 0.125


def reference(q, k, v, causal, mask, p):
    """Unfused attention with Megatron's mask value and the mask of dropout from its definition."""
    (sq, b, a, _), sk = q.shape, k.size(0)
    k, v = (t.repeat_interleave(a // t.size(2), 2) for t in (k, v))
    scores = torch.einsum("sbad,tbad->bast", q, k) * SCALE
    if mask is not None:
        scores = scores.masked_fill(mask, MASKED_SCORE)
    if causal:
        scores = scores.masked_fill(torch.ones(sq, sk, dtype=torch.bool).triu(1 + sk - sq), float("-inf"))
    probabilities = scores.softmax(-1)
    if p:
        dropped = drop_mask(
            KEY,
            p,
            sample=torch.arange(FIRST_SAMPLE, FIRST_SAMPLE + b).view(-1, 1, 1),
            head=torch.arange(FIRST_HEAD, FIRST_HEAD + a).unsqueeze(-1),
            row=torch.arange(sq),
            num_columns=sk,
        )
        probabilities = probabilities * (~dropped) / (1 - effective_probability(p))
    return torch.einsum("bast,tbad->sbad", probabilities, v)


def ours(q, k, v, causal, mask, p):
    return attention(
        q,
        k,
        v,
        causal=causal,
        mask=mask,
        softmax_scale=SCALE,
        dropout_p=p,
        dropout_key=KEY,
        first_sample=FIRST_SAMPLE,
        first_head=FIRST_HEAD,
    )


def padding(b, sq, sk):
    """Samples of different lengths; in the last one everything is hidden."""
    lengths = torch.linspace(sk, 0, b).long()
    return (torch.arange(sk) >= lengths.view(-1, 1)).view(b, 1, 1, sk).expand(b, 1, sq, sk)


# sq, sk, b, heads, groups, d, causal, mask
CASES = {
    "causal": (65, 65, 2, 4, 4, 64, True, None),
    "several blocks": (700, 700, 1, 3, 3, 16, True, None),
    "full": (33, 33, 2, 2, 2, 32, False, None),
    "grouped queries": (40, 40, 2, 6, 2, 16, True, None),
    "one group": (24, 24, 1, 4, 1, 128, True, None),
    "fewer queries than keys": (5, 37, 2, 2, 2, 16, True, None),
    "cross attention": (37, 11, 2, 2, 2, 16, False, None),
    "one token": (1, 1, 1, 1, 1, 8, True, None),
    "padding": (20, 20, 3, 2, 2, 16, False, padding(3, 20, 20)),
    "padding for all rows": (20, 20, 3, 4, 2, 16, False, padding(3, 1, 20)),
    "a mask per head": (20, 20, 1, 4, 4, 16, False, torch.rand(1, 4, 20, 20) < 0.3),
    "a mask on top of causal": (20, 20, 2, 4, 2, 16, True, torch.rand(2, 1, 20, 20).tril() > 0.7),
    "wide heads": (17, 17, 1, 2, 1, 256, True, None),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_backward_obey_the_rule(case, p, dtype, nan_poison):
    sq, sk, b, a, g, d, causal, mask = case
    q, k, v, grad = (torch.randn(s, b, heads, d) for s, heads in ((sq, a), (sk, g), (sk, g), (sq, a)))
    assert_three_witnesses(
        lambda *t: ours(*t, causal, mask, p), lambda *t: reference(*t, causal, mask, p), [q, k, v], grad, dtype
    )


def test_scores_of_any_size_give_finite_results():
    q, k, v = (torch.randn(16, 1, 2, 8) * scale for scale in (1e4, 1e4, 1.0))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = ours(*leaves, True, None, 0.1)
    out.sum().backward()
    assert out.isfinite().all() and all(leaf.grad.isfinite().all() for leaf in leaves)


def test_float64_passes_gradcheck_with_a_row_that_sees_nothing():
    q, k, v = (torch.randn(s, 2, n, 4, dtype=torch.float64, requires_grad=True) for s, n in ((6, 4), (6, 2), (6, 2)))
    mask = torch.rand(2, 1, 6, 6) < 0.3
    mask[0, 0, 2] = True
    assert torch.autograd.gradcheck(lambda *t: ours(*t, False, mask, 0.2), (q, k, v))
    assert torch.autograd.gradcheck(lambda *t: ours(*t, True, None, 0.2), (q, k, v))


def test_heads_of_one_tensor_parallel_rank_draw_their_part_of_the_mask():
    q, k, v = (torch.randn(48, 2, 8, 16) for _ in range(3))
    settings = {"causal": True, "softmax_scale": SCALE, "dropout_p": 0.3, "dropout_key": KEY}
    whole = attention(q, k, v, **settings)
    part = attention(*(t[:, 1:, 4:] for t in (q, k, v)), **settings, first_head=4, first_sample=1)
    assert torch.allclose(
        part, whole[:, 1:, 4:], rtol=0, atol=torch.finfo(torch.float32).eps * whole.abs().max().item()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_q_k_v_and_four_bytes_per_row_and_head(dtype):
    s, b, a, d = 32, 2, 4, 16
    mixed = torch.randn(s, b, a, 3 * d).to(dtype).requires_grad_()
    outputs = []

    def run(mixed):
        # As Megatron does: three views of what linear_qkv returns.
        outputs.append(ours(*mixed.split(d, dim=-1), True, None, 0.1))
        return outputs[0]

    kept = kept_storages(run, mixed)
    assert outputs[0].data_ptr() not in kept
    assert kept.pop(mixed.data_ptr()) == mixed.numel() * mixed.element_size()
    assert list(kept.values()) == [4 * s * b * a]


def test_a_second_derivative_raises():
    q = torch.randn(4, 1, 1, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(ours(q, q, q, True, None, 0.0).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def q_k_v(*shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("tensors", "causal", "mask", "message"),
    [
        (q_k_v((4, 2, 8), (4, 2, 8), (4, 2, 8)), True, None, "dimensions"),
        (q_k_v(*[(4, 1, 2, 8)] * 3, dtype=torch.int64), True, None, "floating-point"),
        (q_k_v((4, 1, 4, 8), (4, 1, 3, 8), (4, 1, 3, 8)), True, None, "divisor"),
        (q_k_v((4, 1, 1, 8), (2, 1, 1, 8), (2, 1, 1, 8)), True, None, "would see no key"),
        (q_k_v((4, 1, 1, 8), (0, 1, 1, 8), (0, 1, 1, 8)), False, None, "at least one key"),
        (q_k_v(*[(4, 1, 1, 8)] * 3), False, torch.zeros(4, 4, dtype=torch.bool), "mask is"),
        (q_k_v(*[(4, 1, 1, 8)] * 3), False, torch.zeros(1, 1, 4, 4), "mask is torch.float32"),
    ],
    ids=["dimensions", "dtype", "groups", "causal", "no keys", "mask shape", "mask dtype"],
)
def test_what_does_not_fit_is_refused(tensors, causal, mask, message):
    with pytest.raises(ValueError, match=message):
        ours(*tensors, causal, mask, 0.0)

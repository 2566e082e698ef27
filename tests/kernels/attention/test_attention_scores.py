"""Attention whose scores are changed: sinks, softcap, ALiBi and biases, against unfused attention."""

from __future__ import annotations

import functools

import pytest
import torch
from attention_cases import DTYPES, SCALE, ours, reference, settings
from covering import parametrize_covering
from witness import assert_three_witnesses, kept_storages, outputs_and_gradients

from tempo_kernels.attention import (
    add_sink,
    attend_block,
    attention,
    cpu,
    differentiate_block,
    differentiate_sink,
    eager,
    merge_blocks,
)
from tempo_kernels.attention.settings import Gradients, Inputs, Kept

SQ, SK, BATCH, HEADS, GROUPS, DIM = 23, 37, 2, 4, 2, 16
SLOPES = torch.tensor([0.5, 0.25, 0.0625, 0.3])
FORMS = ["flash", "softmax"]

# What is given: a sink, the softcap, ALiBi's slopes, the bias's [b, a, sq].
CHANGES = {
    "sink": (True, None, False, None),
    "softcap": (False, 0.7, False, None),
    "slopes": (False, None, True, None),
    "bias of heads": (False, None, False, (1, HEADS, SQ)),
    "bias of samples": (False, None, False, (BATCH, 1, 1)),
    "all": (True, 1.5, True, (BATCH, HEADS, SQ)),
}


def make_operands(change, sq=SQ, sk=SK):
    has_sink, softcap, has_slopes, bias_shape = change
    q, k, v = (torch.randn(s, BATCH, n, DIM) for s, n in ((sq, HEADS), (sk, GROUPS), (sk, GROUPS)))
    sink = torch.randn(HEADS) if has_sink else None
    bias = None if bias_shape is None else torch.randn(*bias_shape, sk)
    return [q, k, v, sink, bias], softcap, SLOPES if has_slopes else None


SEEN = {
    "all": (False, None, False),
    "causal": (True, None, False),
    "window": (False, (5, 2), False),
    "mask": (True, None, True),
}


@parametrize_covering(change=CHANGES, seen=SEEN, form=FORMS, dtype=DTYPES, p=[0.0, 0.1], elements=[1, 1 << 19])
def test_forward_and_every_gradient_obey_the_rule(change, seen, form, dtype, p, elements, monkeypatch, nan_poison):
    monkeypatch.setattr(cpu, "MIN_BLOCK_ROWS", 16)
    monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", elements)
    causal, window_size, has_mask = seen
    operands, softcap, slopes = make_operands(change)
    chosen = settings(causal, p, window_size=window_size, softcap=softcap)
    mask = torch.rand(BATCH, 1, SQ, SK) < 0.3 if has_mask else None
    if mask is not None:
        mask[0, 0, 2] = True

    def run(function, q, k, v, sink, bias, **more):
        return function(q, k, v, chosen, mask, sink=sink, bias=bias, alibi_slopes=slopes, **more)

    grad = torch.randn(SQ, BATCH, HEADS, DIM)
    assert_three_witnesses(
        functools.partial(run, ours, form=form), functools.partial(run, reference), operands, grad, dtype
    )


@parametrize_covering(change=CHANGES, p=[0.0, 0.1], seen=SEEN, keeps_probabilities=[False, True])
def test_the_specification_says_the_same(change, p, seen, keeps_probabilities):
    causal, window_size, has_mask = seen
    operands, softcap, slopes = make_operands(change)
    *qkv, sink, bias = [None if t is None else t.double() for t in operands]
    chosen = settings(causal, p, window_size=window_size, softcap=softcap)
    mask = torch.rand(BATCH, 1, SQ, SK) < 0.3 if has_mask else None
    inputs, grad = Inputs(*qkv, mask, None, bias, slopes, sink), torch.randn(SQ, BATCH, HEADS, DIM).double()
    found = []
    for module in (eager, cpu):
        probabilities = torch.zeros(BATCH, HEADS, SQ, SK).double() if keeps_probabilities else None
        out, logsumexp = module.forward(inputs, chosen, probabilities)
        grads = module.backward(grad, inputs, Kept(None, logsumexp, probabilities), chosen, bias is not None)
        assert [name for name, t in zip(Gradients._fields, grads, strict=True) if t is not None] == [
            name for name in Gradients._fields if getattr(inputs, name) is not None
        ]
        found.append([out, logsumexp, *(t for t in grads if t is not None)])
    for ours_, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-11, atol=1e-11)


def test_a_sink_of_zero_is_the_softmax_of_one_more_and_minus_infinity_is_none():
    q, k, v = (torch.randn(9, 1, 2, 8, dtype=torch.float64) for _ in range(3))
    chosen = settings(p=0.0)
    scores = torch.einsum("sbad,tbad->bast", q, k) * SCALE
    powers = scores.exp().tril()
    expected = torch.einsum("bast,tbad->sbad", powers / (1 + powers.sum(-1, keepdim=True)), v)
    torch.testing.assert_close(ours(q, k, v, chosen, sink=torch.zeros(2)), expected, rtol=1e-12, atol=1e-12)
    nothing = torch.full((2,), float("-inf"))
    torch.testing.assert_close(ours(q, k, v, chosen, sink=nothing), ours(q, k, v, chosen), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [float("-inf"), torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min])
@pytest.mark.parametrize("form", FORMS)
def test_a_bias_may_hide_keys_and_all_keys_of_a_query(form, value):
    q, k, v = (torch.randn(12, 1, 2, 8, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 1, 12, 12)
    bias[..., 7:] = value
    bias[:, :, 3] = value
    bias.requires_grad_()
    out = ours(q, k, v, settings(False, 0.0), bias=bias, form=form)
    expected = ours(q, k[:7], v[:7], settings(False, 0.0))
    others = [row for row in range(12) if row != 3]
    torch.testing.assert_close(out[others], expected[others], rtol=1e-5, atol=1e-6)
    assert not out[3].any()
    out.sum().backward()
    assert not q.grad[3].any() and not k.grad[7:].any() and not v.grad[7:].any() and bias.grad.isfinite().all()


def test_alibi_is_that_of_transformers_for_bloom():
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom", reason="transformers is not installed")
    q, k, v = (torch.randn(20, 1, 4, 8) for _ in range(3))
    stored = bloom.build_alibi_tensor(torch.ones(1, 20), 4, torch.float32).view(1, 4, 1, 20)
    slopes = stored[0, :, 0, 1].clone()
    found, expected = (ours(q, k, v, settings(p=0.0), **more) for more in ({"alibi_slopes": slopes}, {"bias": stored}))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@parametrize_covering(dtype=[torch.float32, torch.bfloat16], p=[0.0, 0.1], form=FORMS, is_announced=[True, False])
def test_documents_have_sinks_softcap_and_alibi_of_their_own(dtype, p, form, is_announced):
    chosen = settings(p=p, softcap=1.5)
    q, k, v, grad = (torch.randn(30, 1, n, DIM).to(dtype) for n in (HEADS, GROUPS, GROUPS, HEADS))
    boundaries, samples = [1, 9, 9, 30], torch.tensor([4, 0, 2**40])
    more = {"alibi_slopes": SLOPES, "form": form}
    packed = {"cu_seqlens": torch.tensor(boundaries, dtype=torch.int32)}
    packed |= {"document_samples": samples} if is_announced else {}

    def attend_alone(q, k, v, sink):
        out = torch.zeros_like(q)
        for start, end, sample in zip(boundaries, boundaries[1:], samples.tolist(), strict=False):
            if start == end:
                continue
            place = {"first_row": start, "first_column": start}
            place = vars(chosen) | ({"first_sample": sample} if is_announced else place)
            part = slice(start, end)
            out = out.clone()
            out[part] = attention(q[part], k[part], v[part], sink=sink, **place, **more)
        return out

    def attend(q, k, v, sink):
        return attention(q, k, v, sink=sink, **packed, **vars(chosen), **more)

    sink = torch.randn(HEADS, dtype=dtype)
    found, expected = (outputs_and_gradients(f, [q, k, v, sink], grad, dtype) for f in (attend, attend_alone))
    for ours_, theirs in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=0, atol=0)
    torch.testing.assert_close(found[-1], expected[-1], rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


class RingWithSink(torch.autograd.Function):
    """Attention with a sink by parts of 16 keys, as under context parallelism."""

    @staticmethod
    def forward(ctx, q, k, v, sink, slopes, chosen):
        numbers = {name: number for name, number in vars(chosen).items() if name != "hidden_rows"}
        places = [numbers | {"first_column": at, "alibi_slopes": slopes} for at in range(0, k.size(0), 16)]
        ctx.parts = list(zip(k.split(16), v.split(16), places, strict=True))
        merged = functools.reduce(merge_blocks, (attend_block(q, *part, **at) for *part, at in ctx.parts))
        out, logsumexp = add_sink(*merged, sink)
        ctx.save_for_backward(q, out, logsumexp, sink)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        q, out, logsumexp, sink = ctx.saved_tensors
        parts = [differentiate_block(grad_out, out, logsumexp, q, *part, **at) for *part, at in ctx.parts]
        grad_q, grad_k, grad_v = zip(*parts, strict=True)
        grads = (t.to(q.dtype) for t in (sum(grad_q), torch.cat(grad_k), torch.cat(grad_v)))
        return *grads, differentiate_sink(grad_out, out, logsumexp, sink), None, None


@parametrize_covering(dtype=[torch.float64, torch.bfloat16], p=[0.0, 0.1], softcap=[None, 1.5], first_row=[0, 6, 45])
def test_parts_of_the_keys_with_a_sink_make_the_whole(dtype, p, softcap, first_row, nan_poison):
    chosen = settings(p=p, softcap=softcap, first_row=first_row, first_column=0)
    operands = [torch.randn(s, 2, n, 16) for s, n in ((29, 4), (60, 2), (60, 2))] + [torch.randn(4)]
    grad = torch.randn(29, 2, 4, 16)

    def whole(q, k, v, sink):
        return reference(q, k, v, chosen, sink=sink, alibi_slopes=SLOPES)

    def ring(*t):
        return RingWithSink.apply(*t, SLOPES, chosen)

    if dtype == torch.bfloat16:
        assert_three_witnesses(ring, whole, operands, grad, dtype)
        return
    for found, expected in zip(*(outputs_and_gradients(f, operands, grad, dtype) for f in (ring, whole)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_a_sink_is_added_with_its_gradient_to_rows_that_saw_keys_and_to_those_that_saw_none():
    out, logsumexp = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 2, 3, 4), (2, 3, 5)))
    out[1], logsumexp[:, :, 1] = 0.0, float("inf")
    sink, grad = torch.randn(3, dtype=torch.float64, requires_grad=True), torch.randn(5, 2, 3, 4, dtype=torch.float64)
    new_out, new_logsumexp = add_sink(out, logsumexp, sink)
    assert not new_out[1].any() and torch.equal(new_logsumexp[:, :, 1], sink.detach().expand(2, 3))
    new_out.backward(grad)
    found = differentiate_sink(grad, new_out.detach(), new_logsumexp.detach(), sink.detach())
    torch.testing.assert_close(found, sink.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_keeps_the_callers_tensors_and_a_logsumexp_and_in_the_softmax_form_the_softmax(form, dtype):
    operands, softcap, slopes = make_operands(CHANGES["all"])
    leaves = [t.to(dtype).requires_grad_() for t in operands]
    chosen = settings(softcap=softcap)

    def run(q, k, v, sink, bias):
        return ours(q, k, v, chosen, sink=sink, bias=bias, alibi_slopes=slopes, form=form)

    kept = kept_storages(run, *leaves)
    assert all(kept.pop(t.data_ptr()) == t.nbytes for t in (*leaves, slopes))
    probabilities = BATCH * HEADS * SQ * SK * dtype.itemsize
    assert sorted(kept.values()) == [4 * SQ * BATCH * HEADS] + ([probabilities] if form == "softmax" else [])


ONES = torch.ones(2)
REFUSED = [
    ({"softcap": 0.0}, "softcap is 0.0; expected a positive number"),
    ({"sink": torch.ones(3)}, r"sink is torch.float32 of shape \[3\] on cpu; expected torch.float32 of shape \[2\]"),
    ({"sink": ONES.double()}, "sink is torch.float64"),
    ({"alibi_slopes": torch.ones(1, 2)}, r"alibi_slopes is torch.float32 of shape \[1, 2\]"),
    ({"alibi_slopes": ONES.bfloat16()}, "alibi_slopes is torch.bfloat16"),
    ({"alibi_slopes": torch.ones(2, requires_grad=True)}, "alibi_slopes requires a gradient"),
    ({"bias": torch.zeros(4, 4)}, r"bias is torch.float32 of shape \[4, 4\] on cpu; expected a floating-point dtype"),
    ({"bias": torch.zeros(1, 1, 4, 4, dtype=torch.bool)}, "bias is torch.bool"),
    ({"bias": torch.zeros(1, 1, 4, 1)}, "with all keys"),
    (
        {"bias": torch.zeros(1, 1, 4, 4), "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)},
        "bias is given beside cu_seqlens",
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_does_not_fit_is_refused(given, message):
    q = torch.zeros(4, 1, 2, 8)
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, causal=True, softmax_scale=1.0, **given)


@pytest.mark.parametrize("form", FORMS)
def test_meta_tensors_get_results_and_gradients_of_the_right_shapes(form):
    operands, softcap, slopes = make_operands(CHANGES["all"])
    leaves = [t.to("meta").requires_grad_() for t in operands]
    *qkv, sink, bias = leaves
    out = ours(*qkv, settings(softcap=softcap), sink=sink, bias=bias, alibi_slopes=slopes.to("meta"), form=form)
    out.sum().backward()
    assert out.shape == qkv[0].shape and all(t.grad.shape == t.shape for t in leaves)

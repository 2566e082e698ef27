"""Attention in both forms, flash and the paper's, whose softmax is kept, against unfused attention."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attention_cases import (
    CASES,
    CHANGES,
    DTYPES,
    SCALE,
    SEEN,
    SLOPES,
    attend_in_parts,
    make_change,
    make_mask,
    ours,
    reference,
    settings,
)  # fmt: skip
from covering import parametrize_covering
from witness import assert_same, assert_three_witnesses, kept_storages, outputs_and_gradients

from tempo_kernels.attention import (
    add_sink,
    attend_block,
    attention,
    differentiate_block,
    differentiate_sink,
    eager,
    merge_blocks,
)
from tempo_kernels.opaque import use_blocks


def softmax_form(q, k, v, chosen, mask=None):
    return attention(q, k, v, mask=mask, form="softmax", **vars(chosen))


FORMS = {"flash": ours, "softmax": softmax_form}
FORM_NAMES = list(FORMS)
SQ, SK, BATCH, HEADS, GROUPS, DIM = 23, 37, 2, 4, 2, 16


def assert_right(form, chosen, tensors, grad, dtype, mask=None):
    ours_, theirs = (lambda *t, f=f: f(*t, chosen, mask) for f in (form, reference))
    assert_three_witnesses(ours_, theirs, tensors, grad, dtype)


@parametrize_covering(case=CASES, form=FORMS, dtype=DTYPES, p=[0.0, 0.1])
def test_forward_and_backward_obey_the_rule(case, form, dtype, p, nan_poison):
    sq, sk, b, a, g, d, causal, mask = case
    q, k, v, grad = (torch.randn(s, b, heads, d) for s, heads in ((sq, a), (sk, g), (sk, g), (sq, a)))
    assert_right(form, settings(causal, p), [q, k, v], grad, dtype, mask)


def test_both_forms_have_one_output_bit_for_bit():
    q, k, v = (torch.randn(100, 2, 4, 16).bfloat16() for _ in range(3))
    assert torch.equal(softmax_form(q, k, v, settings()), ours(q, k, v, settings()))


ROWS = {
    "padding before a sample": ((torch.arange(20) < torch.tensor([0, 7, 20]).view(3, 1, 1, 1)), True, None),
    "in windows": ((torch.arange(20) < torch.tensor([0, 7, 19]).view(3, 1, 1, 1)), False, (4, 3)),
    "all of them": (torch.ones(1, 1, 1, 20, dtype=torch.bool), False, None),
    "by head": (
        torch.rand(3, 4, 20, 1, generator=torch.Generator().manual_seed(5)).round().bool().expand(-1, -1, -1, 20),
        True,
        None,
    ),
}


@parametrize_covering(
    each={"rows": ROWS, "hidden_rows": ["added", "zero"]}, form=FORMS, dtype=[*DTYPES, torch.float64], p=[0.0, 0.1]
)
def test_rows_whose_keys_are_all_hidden_obey_the_rule(rows, hidden_rows, form, dtype, p, nan_poison):
    mask, causal, window_size = rows
    q, k, v, grad = (torch.randn(20, 3, heads, 16) for heads in (4, 2, 2, 4))
    chosen = settings(causal, p, window_size=window_size, hidden_rows=hidden_rows)
    if dtype != torch.float64:
        assert_right(form, chosen, [q, k, v], grad, dtype, mask)
        return
    both = (partial(each, chosen=chosen, mask=mask) for each in (form, reference))
    assert_same(*(outputs_and_gradients(each, [q, k, v], grad, dtype) for each in both), atol=1e-14)


# sq, sk, first_row, first_column, causal, window_size: also parts of the queries and of the keys of a longer sequence.
WINDOWS = [(5, 0), (200, 0), (3, 4), (-1, 2), (-1, 0), (7, -1), (0, 0), (-1, -1)]
PLACES = [
    *((*lengths, 0, None, False, window) for lengths in ((150, 150), (70, 300), (90, 20)) for window in WINDOWS),
    *((40, 70, 30, None, True, None), (33, 50, 100, 83, True, (9, 0)), (70, 40, 3, 0, True, None)),
    *((20, 30, 0, 15, True, None), (20, 30, 7, 21, False, (4, 6)), (30, 30, 64, 32, False, None)),
]


@parametrize_covering(each={"place": PLACES}, value_dim=[16, 10, 24], form=FORMS, dtype=DTYPES, p=[0.0, 0.1])
def test_windows_parts_of_a_sequence_and_values_of_any_size_obey_the_rule(place, value_dim, form, dtype, p, nan_poison):
    sq, sk, first_row, first_column, causal, window_size = place
    shapes = (sq, 4, 16), (sk, 2, 16), (sk, 2, value_dim), (sq, 4, value_dim)
    q, k, v, grad = (torch.randn(s, 2, heads, d) for s, heads, d in shapes)
    chosen = settings(causal, p, window_size=window_size, first_row=first_row, first_column=first_column)
    assert_right(form, chosen, [q, k, v], grad, dtype)


@parametrize_covering(
    causal=[True, False], window_size=[None, (9, 0), (-1, 2)], dtype=[*DTYPES, torch.float64], p=[0.0, 0.1],
    first_row=[0, 6, 45], elements=[1, eager.BLOCK_ELEMENTS], softcap=[None, 1.5], has_sink=[False, True],
)  # fmt: skip
def test_parts_of_the_keys_make_the_whole(
    causal, window_size, dtype, p, first_row, elements, softcap, has_sink, nan_poison
):
    tensors = [torch.randn(s, 2, heads, d) for s, heads, d in ((29, 4, 16), (60, 2, 16), (60, 2, 8))]
    tensors += [torch.randn(4)] if has_sink else []
    grad, slopes = torch.randn(29, 2, 4, 8), SLOPES if has_sink else None
    chosen = settings(causal, p, window_size=window_size, first_row=first_row, first_column=0, softcap=softcap)

    def parts(q, k, v, sink=None):
        with use_blocks(attention=elements, attention_rows=16):
            return attend_in_parts(q, k, v, chosen, sink, slopes)

    def whole(q, k, v, sink=None):
        return reference(q, k, v, chosen, sink=sink, alibi_slopes=slopes)

    if dtype in (torch.float16, torch.bfloat16):
        assert_three_witnesses(parts, whole, tensors, grad, dtype)
        return
    # The logsumexp's rounding stays in the probabilities, as no part has a whole row to normalise again. Slopes bring
    # later keys' scores to 14, and the logsumexp as far.
    roundings = 8 if slopes is None else 64
    pairs = (
        outputs_and_gradients(parts, tensors, grad, dtype),
        outputs_and_gradients(whole, tensors, grad, torch.float64),
    )
    for found, expected in zip(*pairs, strict=True):
        limit = roundings * torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=limit)


def test_a_row_that_saw_no_key_takes_the_other_parts_result():
    q, k = torch.randn(6, 2, 2, 8), torch.randn(6, 2, 2, 8)
    at = {"causal": True, "softmax_scale": SCALE, "first_row": 4}
    blind, seeing = attend_block(q, k, k, **at, first_column=8), attend_block(q, k, k, **at, first_column=0)
    assert blind[1][..., :4].isposinf().all() and not blind[0][:4].any() and blind[1][..., 4:].isfinite().all()
    for merged in (merge_blocks(blind, seeing), merge_blocks(seeing, blind)):
        assert all(torch.equal(a[:4], b[:4]) for a, b in zip(merged[:1], seeing[:1], strict=True))
        assert torch.equal(merged[1][..., :4], seeing[1][..., :4])
    out, logsumexp = merge_blocks(blind, blind)
    assert not out[:4].any() and logsumexp[..., :4].isposinf().all()
    grads = differentiate_block(torch.ones_like(out), out, logsumexp, q, k, k, **at, first_column=8)
    assert not grads[0][:4].any() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("window_size", [None, (3, 0), (3, 1)])
def test_a_hidden_score_may_be_nan(window_size):
    q, k, v = (torch.randn(70, 2, 2, 16) for _ in range(3))
    k[-1] = float("nan")
    out = ours(q, k, v, settings(window_size is None, window_size=window_size))
    seen_by = 2 if window_size == (3, 1) else 1
    assert out[:-seen_by].isfinite().all() and out[-seen_by:].isnan().all()


TORN = {"turned": lambda t: t.mT.contiguous().mT, "every second": lambda t: torch.stack((t, t), -1)[..., 0]}


@parametrize_covering(tear=TORN, place=range(4), p=[0.0, 0.1], dtype=[*DTYPES, torch.float64])
def test_a_last_dimension_of_any_stride_changes_no_bit(tear, place, p, dtype):
    """torch's kernel for CPUs reads as if its stride were 1: other numbers, and beyond the tensor's end."""
    tensors = [torch.randn(9, 2, 4, 16, dtype=dtype) for _ in range(4)]

    def find(*operands):
        *leaves, grad = operands
        leaves = [t.requires_grad_() for t in leaves]
        out = ours(*leaves, settings(p=p))
        return [out, *torch.autograd.grad(out, leaves, grad)]

    expected = find(*(t.clone() for t in tensors))
    torn = [tear(t) if at == place else t.clone() for at, t in enumerate(tensors)]
    assert torn[place].stride(3) != 1
    assert all(torch.equal(*pair) for pair in zip(find(*torn), expected, strict=True))


@pytest.mark.parametrize("form", ["flash", "softmax"])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(("sq", "sk", "b"), [(0, 0, 2), (0, 5, 2), (6, 6, 0)])
def test_no_query_and_no_sample_have_gradients_of_zeros(sq, sk, b, p, form):
    leaves = [torch.randn(s, b, heads, 8).requires_grad_() for s, heads in ((sq, 4), (sk, 2), (sk, 2))]
    out = attention(*leaves, **vars(settings(p=p)), form=form)
    out.sum().backward()
    assert out.shape == (sq, b, 4, 8) and not any(leaf.grad.any() for leaf in leaves)


def q_k_v(*shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


BOOL = torch.zeros(4, 4, dtype=torch.bool)
MISFITS = {
    "dimensions": (q_k_v((4, 2, 8), (4, 2, 8), (4, 2, 8)), True, None, "dimensions"),
    "dtype": (q_k_v(*[(4, 1, 2, 8)] * 3, dtype=torch.int64), True, None, "floating-point"),
    "groups": (q_k_v((4, 1, 4, 8), (4, 1, 3, 8), (4, 1, 3, 8)), True, None, "divisor"),
    "no size": (q_k_v(*[(4, 1, 1, 0)] * 3), True, None, "none of a, g, d and dv 0"),
    "no heads": (q_k_v((4, 1, 0, 8), (4, 1, 1, 8), (4, 1, 1, 8)), True, None, "none of a, g, d and dv 0"),
    "keys": (q_k_v((4, 1, 1, 8), (4, 1, 1, 6), (4, 1, 1, 8)), True, None, r"\[sk, b, g, d\] and \[sk, b, g, dv\]"),
    "causal": (q_k_v((4, 1, 1, 8), (2, 1, 1, 8), (2, 1, 1, 8)), True, None, "would see no key"),
    "no keys": (q_k_v((4, 1, 1, 8), (0, 1, 1, 8), (0, 1, 1, 8)), False, None, "at least one key"),
    "mask shape": (q_k_v(*[(4, 1, 1, 8)] * 3), False, BOOL, "mask is"),
    "mask dtype": (q_k_v(*[(4, 1, 1, 8)] * 3), False, torch.zeros(1, 1, 4, 4), "mask is torch.float32"),
}


@pytest.mark.parametrize(("tensors", "causal", "mask", "message"), MISFITS.values(), ids=MISFITS)
def test_tensors_that_do_not_fit_are_refused(tensors, causal, mask, message):
    with pytest.raises(ValueError, match=message):
        ours(*tensors, settings(causal, 0.0), mask)


ONES = torch.ones(2)
DRAWN = {"dropout_p": 0.1, "dropout_key": 1}
BEYOND = "beyond lie the masks of other places"
REFUSED = [
    ({"form": "paper"}, 'form is .paper.; expected "flash" or "softmax"'),
    ({"softmax_scale": 0.0}, "softmax_scale is 0.0; expected a positive number"),
    ({"window_size": (3, -2)}, r"window_size is \(3, -2\)"),
    ({"dropout_key": torch.ones(1)}, "dropout_key is torch.float32"),
    ({"dropout_p": 1.0}, "dropout probability is 1.0"),
    *(
        ({**DRAWN, **place}, BEYOND)
        for place in ({"first_sample": 2**48}, {"first_head": 2**16 - 1}, {"first_row": 2**32 - 3})
    ),
    *(({name: -1}, f"{name} is -1; expected a position") for name in ("first_row", "first_column")),
    *(
        ({**DRAWN, "dropout_key": key}, f"the key of a dropout mask is {key}; expected 64 bits, signed or not")
        for key in (2**70, 2**64, -(2**63) - 1)
    ),
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
        "bias is given together with cu_seqlens",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[str(arguments) for arguments, _ in REFUSED])
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    q = torch.zeros(4, 1, 2, 8)
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, **{"causal": "window_size" not in arguments, "softmax_scale": 1.0} | arguments)


@parametrize_covering(each={"num_keys": [2, 60, 1000], "size": [1e3, 1e4, 1e5, 1e6]})
def test_scores_that_are_equal_and_huge_share_the_gradient_evenly(size, num_keys):
    # Near size**2 float32 has no digits for the logarithm of num_keys.
    q = torch.full((1, 1, 1, 8), size, requires_grad=True)
    k = torch.full((num_keys, 1, 1, 8), size, requires_grad=True)
    v = torch.randn(num_keys, 1, 1, 8, requires_grad=True)
    grad = torch.randn(1, 1, 1, 8)
    attention(q, k, v, causal=False, softmax_scale=1 / 8).backward(grad)
    torch.testing.assert_close(v.grad, (grad / num_keys).expand_as(v))


def make_q_k_v():
    return [torch.randn(s, BATCH, n, DIM) for s, n in ((SQ, HEADS), (SK, GROUPS), (SK, GROUPS))]


@parametrize_covering(change=CHANGES, seen=SEEN, form=FORM_NAMES, dtype=DTYPES, p=[0.0, 0.1], elements=[1, 1 << 19])
def test_forward_and_every_gradient_obey_the_rule(change, seen, form, dtype, p, elements, nan_poison):
    causal, window_size, has_mask = seen
    operands = make_q_k_v()
    sink, bias, softcap, slopes = make_change(change, BATCH, HEADS, SQ, SK)
    chosen = settings(causal, p, window_size=window_size, softcap=softcap)
    mask = make_mask(BATCH, SQ, SK) if has_mask else None

    def run(function, q, k, v, sink, bias, **more):
        return function(q, k, v, chosen, mask, sink=sink, bias=bias, alibi_slopes=slopes, **more)

    grad = torch.randn(SQ, BATCH, HEADS, DIM)
    with use_blocks(attention=elements, attention_rows=16):
        assert_three_witnesses(
            partial(run, ours, form=form), partial(run, reference), [*operands, sink, bias], grad, dtype
        )


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
@pytest.mark.parametrize("form", FORM_NAMES)
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
@pytest.mark.parametrize("form", FORM_NAMES)
def test_keeps_the_callers_tensors_and_a_logsumexp_and_in_the_softmax_form_the_softmax(form, dtype):
    sink, bias, softcap, slopes = make_change(CHANGES["all"], BATCH, HEADS, SQ, SK)
    leaves = [t.to(dtype).requires_grad_() for t in (*make_q_k_v(), sink, bias)]
    chosen = settings(softcap=softcap)

    def run(q, k, v, sink, bias):
        return ours(q, k, v, chosen, sink=sink, bias=bias, alibi_slopes=slopes, form=form)

    kept = kept_storages(run, *leaves)
    assert all(kept.pop(t.data_ptr()) == t.nbytes for t in (*leaves, slopes))
    probabilities = BATCH * HEADS * SQ * SK * dtype.itemsize
    assert sorted(kept.values()) == [4 * SQ * BATCH * HEADS] + ([probabilities] if form == "softmax" else [])

"""Attention in both forms, flash and the paper's, whose softmax is kept, against unfused attention."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attention_cases import (
    CHANGES,
    DTYPES,
    FIRST_HEAD,
    KEY,
    PLACES,
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
    attention,
    eager,
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


@parametrize_covering(
    each={"place": PLACES}, form=FORMS, dtype=DTYPES, p=[0.0, 0.1], elements=[1, eager.BLOCK_ELEMENTS]
)
def test_forward_and_backward_obey_the_rule(place, form, dtype, p, elements, nan_poison):
    mask = None if place.make_mask is None else place.make_mask()
    *tensors, grad = place.make_inputs()
    with use_blocks(attention=elements, attention_rows=16):
        assert_right(form, place.settings(p), tensors, grad, dtype, mask)


def test_both_forms_have_one_output_bit_for_bit():
    q, k, v = (torch.randn(100, 2, 4, 16).bfloat16() for _ in range(3))
    assert torch.equal(softmax_form(q, k, v, settings()), ours(q, k, v, settings()))


@parametrize_covering(
    causal=[True, False], window_size=[None, (9, 0), (-1, 2)], dtype=[*DTYPES, torch.float64], p=[0.0, 0.1],
    first_row=[0, 6, 65], elements=[1, eager.BLOCK_ELEMENTS], softcap=[None, 1.5], has_sink=[False, True],
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


@pytest.mark.parametrize("window_size", [None, (3, 0), (3, 1)])
def test_a_hidden_score_may_be_nan(window_size):
    q, k, v = (torch.randn(70, 2, 2, 16) for _ in range(3))
    k[-1] = float("nan")
    out = ours(q, k, v, settings(window_size is None, window_size=window_size))
    seen_by = 2 if window_size == (3, 1) else 1
    assert out[:-seen_by].isfinite().all() and out[-seen_by:].isnan().all()


@parametrize_covering(place=range(4), p=[0.0, 0.1], dtype=[*DTYPES, torch.float64])
def test_a_last_dimension_of_any_stride_changes_no_bit(place, p, dtype):
    """torch's kernel for CPUs reads as if its stride were 1: other numbers, and beyond the tensor's end."""
    tensors, found = [torch.randn(9, 2, 4, 16, dtype=dtype) for _ in range(4)], []
    for tear in (lambda t: t.clone(), lambda t: t.mT.contiguous().mT, lambda t: torch.stack((t, t), -1)[..., 0]):
        *leaves, grad = (tear(t) if at == place else t.clone() for at, t in enumerate(tensors))
        leaves = [t.requires_grad_() for t in leaves]
        out = ours(*leaves, settings(p=p))
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert_same(found[0] * 2, found[1] + found[2])


SHAPES = [
    ([(4, 2, 8)] * 3, "dimensions"),
    ([(4, 1, 4, 8), (4, 1, 3, 8), (4, 1, 3, 8)], "divisor"),
    ([(4, 1, 1, 0)] * 3, "none of a, g, d and dv 0"),
    ([(4, 1, 0, 8), (4, 1, 1, 8), (4, 1, 1, 8)], "none of a, g, d and dv 0"),
    ([(4, 1, 1, 8), (4, 1, 1, 6), (4, 1, 1, 8)], r"\[sk, b, g, d\] and \[sk, b, g, dv\]"),
    ([(4, 1, 1, 8), (2, 1, 1, 8), (2, 1, 1, 8)], "would see no key"),
    ([(4, 1, 1, 8), (0, 1, 1, 8), (0, 1, 1, 8)], "at least one key"),
]


@pytest.mark.parametrize(("shapes", "message"), SHAPES, ids=str)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        attention(*map(torch.zeros, shapes), causal="least" not in message, softmax_scale=1.0)


ONES = torch.ones(2)
DRAWN = {"dropout_p": 0.1, "dropout_key": 1}
BEYOND = "beyond lie the masks of other places"
REFUSED = [
    ({"mask": torch.zeros(4, 4, dtype=torch.bool)}, "mask is"),
    ({"mask": torch.zeros(1, 1, 4, 4)}, "mask is torch.float32"),
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
    causal, window_size, has_mask, hidden_rows = seen
    operands = make_q_k_v()
    sink, bias, softcap, slopes = make_change(change, BATCH, HEADS, SQ, SK)
    chosen = settings(causal, p, window_size=window_size, softcap=softcap, hidden_rows=hidden_rows)
    mask = make_mask(BATCH, SQ, SK) if has_mask else None

    def run(function, q, k, v, sink, bias, **more):
        return function(q, k, v, chosen, mask, sink=sink, bias=bias, alibi_slopes=slopes, **more)

    grad = torch.randn(SQ, BATCH, HEADS, DIM)
    with use_blocks(attention=elements, attention_rows=16):
        assert_three_witnesses(
            partial(run, ours, form=form), partial(run, reference), [*operands, sink, bias], grad, dtype
        )


def test_a_sink_of_minus_infinity_is_none():
    q, k, v = (torch.randn(9, 1, 2, 8, dtype=torch.float64) for _ in range(3))
    found = ours(q, k, v, settings(), sink=torch.full((2,), float("-inf")))
    torch.testing.assert_close(found, ours(q, k, v, settings()), rtol=1e-12, atol=1e-12)


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


# Documents of a packed row, against each document in a row of its own.
TOKENS = 36
NUMBERS = {"softmax_scale": SCALE, "dropout_key": KEY, "first_head": FIRST_HEAD}
BOUNDARIES = {
    "one": [0, 36],
    "several": [0, 5, 6, 20, 36],
    "padding around, an empty one": [1, 6, 6, 15, 33],
    "none": [4],
}


def pack(dtype=torch.float64, value_dim=8):
    sizes = (HEADS, 8), (GROUPS, 8), (GROUPS, value_dim)
    return [torch.randn(TOKENS, 1, *size, dtype=dtype, requires_grad=True) for size in sizes]


def as_int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def attend_alone(tensors, boundaries, attend):
    """[t, 1, a, dv]: attend(q, k, v, number, start) of each document, 0 elsewhere."""
    out = tensors[0].new_zeros(TOKENS, 1, HEADS, tensors[2].size(3))
    pieces = [out[: boundaries[0]]]
    for number, (start, end) in enumerate(zip(boundaries, boundaries[1:], strict=False)):
        pieces.append(attend(*(t[start:end] for t in tensors), number, start) if start < end else out[:0])
    return torch.cat([*pieces, out[boundaries[-1] :]])


@parametrize_covering(
    boundaries=BOUNDARIES.values(),
    dtype=[torch.float64, torch.float32, torch.bfloat16],
    form=["flash", "softmax"],
    p=[0.0, 0.3],
    is_announced=[True, False],
    seen=[(True, None), (False, None), (True, (3, 0)), (False, (2, 4))],
    value_dim=[8, 12],
    is_changed=[False, True],
)
def test_a_document_is_what_it_is_in_a_row_of_its_own(
    boundaries, dtype, form, p, is_announced, seen, value_dim, is_changed, nan_poison
):
    causal, window_size = seen
    tensors, grad = pack(dtype, value_dim), torch.randn(TOKENS, 1, HEADS, value_dim, dtype=dtype)
    samples = torch.randint(0, 2**40, (len(boundaries) - 1,), dtype=torch.int64)
    chosen = {**NUMBERS, "causal": causal, "window_size": window_size, "dropout_p": p, "form": form}
    sink = torch.randn(HEADS).to(torch.float32 if dtype == torch.float64 else dtype).requires_grad_()
    if is_changed:
        chosen |= {"sink": sink, "softcap": 1.5, "alibi_slopes": torch.tensor([0.5, 0.25, 0.0625, 0.3])}

    def attend(q, k, v, number, start):
        if is_announced:
            return attention(q, k, v, **chosen, first_sample=int(samples[number]))
        return attention(q, k, v, **chosen, first_sample=5, first_row=start, first_column=start)

    packed = {"cu_seqlens": as_int32(boundaries), "document_samples": samples if is_announced else None}
    found = attention(*tensors, **chosen, **packed, first_sample=5)
    found.backward(grad)
    grads = [t.grad for t in tensors]
    expected = attend_alone(tensors, boundaries, attend)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if len(boundaries) == 1:
        assert not any(g.any() for g in grads)
        return
    leaves = [*tensors, sink] if is_changed else tensors
    *expected_grads, last = torch.autograd.grad(expected, leaves, grad)
    if is_changed:
        # The sink's gradient is a sum over documents.
        torch.testing.assert_close(sink.grad, last, rtol=4 * torch.finfo(sink.dtype).eps, atol=1e-6)
    else:
        expected_grads.append(last)
    for grad_found, grad_expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad_found, grad_expected, rtol=0, atol=0)


def test_documents_may_have_more_keys_than_queries():
    tensors = pack()
    boundaries, key_boundaries = [0, 3, 20], [2, 9, 36]
    packed = {"cu_seqlens": as_int32(boundaries), "cu_seqlens_k": as_int32(key_boundaries)}
    samples = torch.tensor([7, 3])
    found = attention(
        tensors[0][:20], *tensors[1:], causal=True, dropout_p=0.3, document_samples=samples, **packed, **NUMBERS
    )
    for number, sample in enumerate(samples.tolist()):
        queries = slice(*boundaries[number : number + 2])
        keys = slice(*key_boundaries[number : number + 2])
        alone = tensors[0][queries], *(t[keys] for t in tensors[1:])
        expected = attention(*alone, causal=True, dropout_p=0.3, first_sample=sample, **NUMBERS)
        torch.testing.assert_close(found[queries], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "p", "outputs"), [(torch.bfloat16, 0.0, 1), (torch.bfloat16, 0.1, 0), (torch.float32, 0.0, 0)]
)
def test_keeps_what_an_unpacked_row_keeps_and_the_boundaries(dtype, p, outputs):
    tensors = pack(dtype)
    cu_seqlens, samples = as_int32([0, 5, 36]), torch.tensor([3, 1])
    packed = {"cu_seqlens": cu_seqlens, "document_samples": samples}
    kept = kept_storages(lambda: attention(*tensors, causal=True, dropout_p=p, **packed, **NUMBERS))
    of_tensors = sum(t.nbytes for t in (*tensors, cu_seqlens, samples))
    assert sum(kept.values()) == of_tensors + 4 * TOKENS * HEADS + outputs * tensors[0].nbytes


REFUSED_DOCUMENTS = [
    ({"cu_seqlens": [0, 40]}, r"cu_seqlens is \[0, 40\]; expected .* at most 36, the tokens of q"),
    ({"cu_seqlens": [0, 9, 5]}, "growing from 0"),
    ({"cu_seqlens": [-1, 5]}, "growing from 0"),
    ({"cu_seqlens": []}, "expected torch.int32 of shape"),
    ({"cu_seqlens": torch.tensor([0, 36])}, r"cu_seqlens is torch.int64 .* expected torch.int32"),
    ({"cu_seqlens": [0, 36], "cu_seqlens_k": [0, 5, 36]}, r"cu_seqlens_k is .*\[3\].* expected .*\[2\]"),
    ({"cu_seqlens": [0, 36], "cu_seqlens_k": [0, 9]}, "more queries than keys"),
    ({"cu_seqlens": [0, 36], "cu_seqlens_k": [0, 36], "dropout_p": 0.1}, "give document_samples"),
    ({"cu_seqlens": [0, 36], "document_samples": torch.tensor([1, 2])}, "document_samples .* for 1 documents"),
    ({"document_samples": torch.tensor([1])}, "without cu_seqlens"),
    ({"cu_seqlens": [0, 36], "mask": torch.zeros(1, 1, 36, 36, dtype=torch.bool)}, "mask is given together"),
    ({"cu_seqlens": [0, 36], "first_row": 1}, "first_row is given together"),
    ({"cu_seqlens": [0, 36], "first_column": 0}, "first_column is given together"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED_DOCUMENTS)
def test_documents_that_do_not_fit_are_refused(given, message):
    given = {name: as_int32(value) if isinstance(value, list) else value for name, value in given.items()}
    with pytest.raises(ValueError, match=message):
        attention(*pack(), causal=True, **NUMBERS, **given)
    if list(given) == ["cu_seqlens"]:
        with pytest.raises(ValueError, match="q has 2 samples and cu_seqlens is given"):
            attention(*(t.expand(-1, 2, -1, -1) for t in pack()), causal=True, **NUMBERS, **given)

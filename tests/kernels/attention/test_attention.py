"""Attention in both forms, flash and the paper's, whose softmax is kept, against unfused attention."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    CASES,
    DTYPES,
    FIRST_SAMPLE,
    KEY,
    SCALE,
    Ring,
    assert_case_obeys_the_rule,
    ours,
    reference,
    settings,
)  # fmt: skip
from covering import parametrize_covering
from witness import assert_three_witnesses, kept_storages, outputs_and_gradients

from tempo_kernels.attention import attend_block, attention, cpu, differentiate_block, eager, find_backend, merge_blocks
from tempo_kernels.attention.settings import Inputs, Kept


def softmax_form(q, k, v, chosen, mask=None, key_lengths=None):
    return attention(q, k, v, mask=mask, key_lengths=key_lengths, form="softmax", **vars(chosen))


FORMS = {"flash": ours, "softmax": softmax_form}


@parametrize_covering(case=CASES, form=FORMS, dtype=DTYPES, p=[0.0, 0.1])
def test_forward_and_backward_obey_the_rule(case, form, dtype, p, nan_poison):
    assert_case_obeys_the_rule(form, case, p, dtype)


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
    operands = lambda *t: form(*t, chosen, mask), lambda *t: reference(*t, chosen, mask), [q, k, v], grad
    if dtype != torch.float64:
        assert_three_witnesses(*operands, dtype)
        return
    ours_, exact = (outputs_and_gradients(function, *operands[2:], dtype) for function in operands[:2])
    for found, expected in zip(ours_, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-14)


@parametrize_covering(
    each={"rows": ROWS, "hidden_rows": ["uniform", "added", "zero"]}, has_sink=[False, True], softcap=[None, 2.0]
)
def test_blocks_of_rows_whose_keys_are_all_hidden_are_the_specification(rows, hidden_rows, has_sink, softcap):
    mask, causal, window_size = rows
    shapes = [(20, 3, heads, 16) for heads in (4, 2, 2, 4)]
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    chosen = settings(causal, window_size=window_size, hidden_rows=hidden_rows, softcap=softcap)
    bias, sink = torch.randn(1, 4, 20, 20, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    inputs = Inputs(q, k, v, mask.expand(-1, -1, 20, -1), bias=bias, sink=sink if has_sink else None)
    results = []
    for module in (cpu, eager):
        out, logsumexp = module.forward(inputs, chosen)
        grads = module.backward(grad, inputs, Kept(out, logsumexp), chosen, needs_grad_bias=True)
        results.append([out, logsumexp, *(each for each in grads if each is not None)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)


WINDOWS = [(5, 0), (200, 0), (3, 4), (-1, 2), (-1, 0), (7, -1), (0, 0), (-1, -1)]


@parametrize_covering(lengths=[(150, 150), (70, 300), (90, 20)], window_size=WINDOWS, dtype=DTYPES, p=[0.0, 0.1])
def test_sliding_windows_obey_the_rule(lengths, window_size, dtype, p, nan_poison):
    sq, sk = lengths
    q, k, v, grad = (torch.randn(s, 2, heads, 16) for s, heads in ((sq, 4), (sk, 2), (sk, 2), (sq, 4)))
    chosen = settings(False, p, window_size=window_size)
    assert_three_witnesses(lambda *t: ours(*t, chosen), lambda *t: reference(*t, chosen), [q, k, v], grad, dtype)


# sq, sk, first_row, first_column, causal, window_size: a part of the queries and of the keys of a longer sequence.
PLACES = [
    *((40, 70, 30, None, True, None), (33, 50, 100, 83, True, (9, 0)), (70, 40, 3, 0, True, None)),
    *((20, 30, 0, 15, True, None), (20, 30, 7, 21, False, (4, 6)), (30, 30, 64, 32, False, None)),
]


@parametrize_covering(place=PLACES, value_dim=[16, 10, 24], form=FORMS, dtype=DTYPES, p=[0.0, 0.1])
def test_parts_of_a_sequence_and_values_of_any_size_obey_the_rule(place, value_dim, form, dtype, p, nan_poison):
    sq, sk, first_row, first_column, causal, window_size = place
    shapes = (sq, 4, 16), (sk, 2, 16), (sk, 2, value_dim), (sq, 4, value_dim)
    q, k, v, grad = (torch.randn(s, 2, heads, d) for s, heads, d in shapes)
    chosen = settings(causal, p, window_size=window_size, first_row=first_row, first_column=first_column)
    assert_three_witnesses(lambda *t: form(*t, chosen), lambda *t: reference(*t, chosen), [q, k, v], grad, dtype)


@parametrize_covering(
    causal=[True, False], window_size=[None, (9, 0), (-1, 2)], dtype=[*DTYPES, torch.float64], p=[0.0, 0.1],
    first_row=[0, 6, 45], elements=[1, cpu.BLOCK_ELEMENTS],
)  # fmt: skip
def test_parts_of_the_keys_make_the_whole(causal, window_size, dtype, p, first_row, elements, monkeypatch, nan_poison):
    monkeypatch.setattr(cpu, "MIN_BLOCK_ROWS", 16)
    monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", elements)
    q, k, v, grad = (torch.randn(s, 2, heads, d) for s, heads, d in ((29, 4, 16), (60, 2, 16), (60, 2, 8), (29, 4, 8)))
    chosen = settings(causal, p, window_size=window_size, first_row=first_row, first_column=0)
    operands = lambda *t: Ring.apply(*t, chosen), lambda *t: reference(*t, chosen), [q, k, v], grad
    if dtype in (torch.float16, torch.bfloat16):
        assert_three_witnesses(*operands, dtype)
        return
    # The logsumexp's rounding stays in the probabilities, as no part has a whole row to normalise again.
    parts, whole, *rest = operands
    pairs = outputs_and_gradients(parts, *rest, dtype), outputs_and_gradients(whole, *rest, torch.float64)
    for found, expected in zip(*pairs, strict=True):
        limit = 8 * torch.finfo(dtype).eps * expected.abs().max().item()
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


@parametrize_covering(causal=[True, False], dtype=DTYPES, form=FORMS)
def test_key_lengths_obey_the_rule_and_what_is_behind_them_is_not_read(causal, dtype, form, nan_poison):
    q, k, v, grad = (torch.randn(150, 4, heads, 16) for heads in (4, 2, 2, 4))
    lengths = torch.tensor([150, 100, 1, 0])
    for sample, length in enumerate(lengths.tolist()):
        k[length:, sample], v[length:, sample] = float("nan"), float("nan")
    chosen = settings(causal, window_size=None if causal else (20, 3))
    assert_three_witnesses(
        lambda *t: form(*t, chosen, None, lengths), lambda *t: reference(*t, chosen, None, lengths), [q, k, v], grad,
        dtype,
    )  # fmt: skip


@parametrize_covering(
    name=["causal", "padding", "padding for all rows", "a mask on top of causal"],
    elements=[1, 16 * 4 * 65, 16 * 4 * 65 * 2, 1 << 24],
)
def test_rows_and_samples_may_be_cut_into_blocks_of_any_size(name, elements, monkeypatch):
    monkeypatch.setattr(cpu, "MIN_BLOCK_ROWS", 16)
    monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", elements)
    assert_case_obeys_the_rule(ours, CASES[name], 0.1, torch.float32)


@pytest.mark.parametrize("window_size", [None, (3, 0), (3, 1)])
def test_a_hidden_score_may_be_nan(window_size):
    q, k, v = (torch.randn(70, 2, 2, 16) for _ in range(3))
    k[-1] = float("nan")
    out = ours(q, k, v, settings(window_size is None, window_size=window_size))
    seen_by = 2 if window_size == (3, 1) else 1
    assert out[:-seen_by].isfinite().all() and out[-seen_by:].isnan().all()


def test_draws_from_device_data_are_the_same_and_must_not_change_before_backward():
    q, k, v = (torch.randn(20, 2, 2, 16, requires_grad=True) for _ in range(3))
    key, first_sample = torch.tensor(KEY - 2**64), torch.tensor(FIRST_SAMPLE)
    expected = torch.autograd.grad(ours(q, k, v, settings()).sum(), (q, k, v))
    out = ours(q, k, v, settings(key=key, first_sample=first_sample))
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True))
    out = ours(q, k, v, settings(key=key, first_sample=first_sample))
    key += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_keeps_q_k_v_and_four_bytes_per_row_and_head_or_the_softmax(form, dtype):
    s, b, a, d = 32, 2, 4, 16
    mixed = torch.randn(s, b, a, 3 * d).to(dtype).requires_grad_()
    outputs = []

    def run(mixed):
        # As Megatron does: three views of what linear_qkv returns.
        outputs.append(form(*mixed.split(d, dim=-1), settings()))
        return outputs[0]

    kept = kept_storages(run, mixed)
    assert outputs[0].data_ptr() not in kept
    assert kept.pop(mixed.data_ptr()) == mixed.numel() * mixed.element_size()
    assert list(kept.values()) == [4 * s * b * a if form is ours else b * a * s * s * mixed.element_size()]


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
def test_what_does_not_fit_is_refused(tensors, causal, mask, message):
    with pytest.raises(ValueError, match=message):
        ours(*tensors, settings(causal, 0.0), mask)


def int64(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


DRAWN = {"dropout_p": 0.1, "dropout_key": 1}
BEYOND = "beyond lie the masks of other places"
REFUSED = [
    ({"form": "paper"}, 'form is .paper.; expected "flash" or "softmax"'),
    ({"softmax_scale": 0.0}, "softmax_scale is 0.0; expected a positive number"),
    ({"window_size": (3, -2)}, r"window_size is \(3, -2\)"),
    ({"key_lengths": int64(1, 1)}, r"key_lengths is torch.int64 of shape \[2\]"),
    ({"key_lengths": torch.ones(1)}, "key_lengths is torch.float32"),
    *(
        ({"key_lengths": int64(n)}, f"key_lengths holds {n}; expected 0 to 4, how many keys a sample has")
        for n in (-5, 5)
    ),
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
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[str(arguments) for arguments, _ in REFUSED])
def test_settings_that_do_not_fit_are_refused(arguments, message):
    q = torch.zeros(4, 1, 2, 8)
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, **{"causal": "window_size" not in arguments, "softmax_scale": 1.0} | arguments)


def test_the_backend_of_a_call_is_told():
    q = torch.zeros(4, 1, 1, 8)
    assert find_backend(q, q, q, causal=True) == "torch" == find_backend(q, q, q, causal=True, form="softmax")


@parametrize_covering(each={"num_keys": [2, 60, 1000], "size": [1e3, 1e4, 1e5, 1e6]})
def test_scores_that_are_equal_and_huge_share_the_gradient_evenly(size, num_keys):
    # Near size**2 float32 has no digits for the logarithm of num_keys.
    q = torch.full((1, 1, 1, 8), size, requires_grad=True)
    k = torch.full((num_keys, 1, 1, 8), size, requires_grad=True)
    v = torch.randn(num_keys, 1, 1, 8, requires_grad=True)
    grad = torch.randn(1, 1, 1, 8)
    attention(q, k, v, causal=False, softmax_scale=1 / 8).backward(grad)
    torch.testing.assert_close(v.grad, (grad / num_keys).expand_as(v))

from __future__ import annotations

import pytest
import torch
from dropout_masks import recorded_masks
from witness import assert_three_witnesses, kept_storages

from tempo_kernels.dropout_add import Draw, bias_dropout_add, eager
from tempo_kernels.philox import drop_mask, effective_probability

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DRAW = {"p": 0.1, "key": 0xFEDCBA9876543210, "first_sample": 11, "first_row": 5}


def mask_of(x):
    """The mask from its definition, over the whole tensor at once: [s, b, h]."""
    row, sample = torch.arange(5, 5 + x.size(0)).unsqueeze(-1), torch.arange(11, 11 + x.size(1))
    return drop_mask(DRAW["key"], 0.1, sample=sample, head=torch.tensor(0), row=row, num_columns=x.size(2))


def ours(x, bias, residual):
    return bias_dropout_add(x, bias, residual, **DRAW)


compiled_dropout_add = torch.compile(bias_dropout_add, backend="aot_eager", fullgraph=True)


def reference(x, bias, residual):
    kept = (x if bias is None else x + bias) * (~mask_of(x)) / (1 - effective_probability(0.1))
    return kept if residual is None else residual + kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 2, 768), (1, 1, 1), (5, 3, 13), (0, 2, 8), (4, 2, 0)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
def test_forward_and_backward_obey_the_rule(shape, has_bias, has_residual, dtype, nan_poison):
    x, residual, grad = (torch.rand(shape) * 16 - 8 for _ in range(3))
    bias = torch.randn(shape[-1]) if has_bias else None
    assert_three_witnesses(ours, reference, [x, bias, residual if has_residual else None], grad, dtype)


ROWS_OF_TOKENS, SAMPLES_OF_TOKENS = torch.arange(13).flip(0), torch.arange(39).view(13, 3)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("place", [(7, 9), (0, 0, 0, ROWS_OF_TOKENS, SAMPLES_OF_TOKENS)], ids=["numbers", "tokens"])
def test_blocks_of_rows_give_what_the_whole_gives(dtype, place):
    # Small whole numbers and a scale of 2: sums are exact in any order.
    x, residual = (torch.randint(-8, 9, (13, 3, 40)).to(dtype) for _ in range(2))
    draw = Draw(0.5, 2**63 + 5, *place)
    out, (grad_x, grad_bias) = eager.forward(x, x[0, 0], residual, draw), eager.backward(x, draw, True)
    assert torch.equal(eager.forward(x, x[0, 0], residual, draw, block_elements=4 * 3 * 40), out)
    found = eager.backward(x, draw, True, block_elements=4 * 3 * 40)
    assert torch.equal(found[0], grad_x) and torch.equal(found[1], grad_bias)


def test_nothing_is_drawn_where_nothing_is_dropped():
    x, residual = (torch.randn(6, 2, 40, requires_grad=True) for _ in range(2))
    with recorded_masks() as drawn:
        out = bias_dropout_add(x, torch.ones(40), residual, p=0.0, key=1)
        out.sum().backward()
    assert not drawn and torch.equal(out, residual + (x + 1)) and (x.grad == 1).all() and (residual.grad == 1).all()


ROWS, SAMPLES = torch.tensor([0, 1, 9, 11, 10, 3]), torch.tensor([[4, 4], [0, 1], [5, 2], [2, 5], [3, 3], [1, 0]])
PLACES = {"rows": {"rows": ROWS}, "samples": {"samples": SAMPLES}, "both": {"rows": ROWS, "samples": SAMPLES}}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("compute", [bias_dropout_add, compiled_dropout_add], ids=["plain", "compiled"])
@pytest.mark.parametrize("places", [*PLACES.values(), {"rows": SAMPLES + 6, "samples": ROWS // 2}], ids=str)
def test_each_token_draws_the_mask_of_the_row_and_sample_that_it_is_given(places, compute):
    whole = bias_dropout_add(torch.ones(12, 6, 40), None, None, p=0.4, key=5)
    rows, samples = (places.get(name, other) for name, other in (("rows", torch.arange(6)), ("samples", None)))
    samples = torch.arange(2).expand(6, 2) if samples is None else samples.view(6, -1)
    expected = whole[rows.view(6, -1).expand(6, 2), samples.expand(6, 2)]
    x = torch.ones(6, 2, 40, requires_grad=True)
    out = compute(x, None, None, p=0.4, key=5, **places)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("compute", [bias_dropout_add, compiled_dropout_add], ids=["plain", "compiled"])
def test_a_part_of_the_columns_draws_the_mask_that_they_have_in_the_whole(compute):
    whole = bias_dropout_add(torch.ones(6, 2, 40), None, None, p=0.4, key=5, first_row=3)
    x = torch.ones(6, 2, 16, requires_grad=True)
    out = compute(x, None, None, p=0.4, key=5, first_row=3, first_column=24)
    out.sum().backward()
    assert torch.equal(out, whole[..., 24:]) and torch.equal(x.grad, whole[..., 24:])


def test_no_tokens_may_have_rows_of_their_own():
    x = torch.ones(0, 2, 8, requires_grad=True)
    bias_dropout_add(x, None, None, p=0.4, key=5, rows=torch.empty(0).long()).sum().backward()
    assert x.grad.shape == x.shape


def test_keeps_nothing_but_the_eight_bytes_of_a_key_in_a_tensor():
    x, residual = (torch.randn(8, 2, 16, requires_grad=True) for _ in range(2))
    assert kept_storages(ours, x, torch.randn(16, requires_grad=True), residual) == {}
    key = torch.tensor(3)
    assert kept_storages(lambda x: bias_dropout_add(x, None, None, p=0.1, key=key), x) == {key.data_ptr(): 8}


def test_nan_and_inf_pass_where_kept_and_vanish_where_dropped():
    x = torch.full((64, 1, 16), float("inf"))
    x[::2] = float("nan")
    out = ours(x, None, torch.ones(64, 1, 16))
    dropped = mask_of(x)
    assert (out[dropped] == 1).all() and not out[~dropped].isfinite().any()


X = torch.ones(6, 2, 40)
REFUSED = [
    ({"x": X[0]}, r"\[s, b, h\]"),
    ({"bias": torch.ones(4)}, r"bias is torch.float32 of shape \[4\]"),
    ({"bias": torch.ones(40, dtype=torch.complex64)}, "bias is torch.complex64"),
    ({"residual": X.half()}, "residual is torch.float16"),
    ({"p": 1.0}, r"must be in \[0, 1\)"),
    ({"rows": ROWS[:5]}, r"rows is torch.int64 of shape \[5\] .*expected torch.int64 of shape \[6\] or \[6, 2\]"),
    ({"samples": SAMPLES.int()}, "samples is torch.int32"),
    ({"rows": ROWS, "first_row": 1}, "rows and first_row are given; expected one of them"),
    ({"samples": SAMPLES, "first_sample": torch.tensor(0)}, "samples and first_sample are given"),
    ({"rows": ROWS - 1}, "row -1 to 10; expected 0 to"),
    ({"first_column": 12}, "first_column is 12; expected a multiple of 8"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_does_not_fit_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        bias_dropout_add(**{"x": X, "bias": None, "residual": None, "p": 0.4, "key": 5, **given})


@pytest.mark.parametrize("name", ["key", "first_sample"])
@pytest.mark.parametrize("number", [X[0, 0, 0].int(), X[0, 0, :1].long(), X[0, 0, 0].long().to("meta")], ids=str)
def test_device_data_that_does_not_fit_is_refused(name, number):
    with pytest.raises(
        ValueError, match=f"{name} is torch.int.* on .*; expected an int, or a 0-dim torch.int64 tensor on cpu"
    ):
        bias_dropout_add(torch.ones(2, 2, 8), None, None, **{"p": 0.1, "key": 1, name: number})


@pytest.mark.parametrize(
    "place",
    [{"first_sample": 2**48 - 1}, {"first_sample": -1}, {"first_row": 2**32 - 3}, {"first_column": 2**35}],
    ids=str,
)
def test_a_mask_beyond_the_indices_that_are_told_apart_is_refused(place):
    x = torch.ones(4, 2, 8)
    with pytest.raises(ValueError, match="beyond lie the masks of other places"):
        bias_dropout_add(x, None, None, p=0.1, key=1, **place)
    assert torch.equal(bias_dropout_add(x, None, None, p=0.0, key=1, **place), x)

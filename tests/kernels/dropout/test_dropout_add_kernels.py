"""The kernels of bias_dropout_add and Philox against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, assert_as_specified, check_many_tiles, kernel_test

from tempo_kernels.dropout_add import Draw
from tempo_kernels.dropout_add import eager as dropout_eager
from tempo_kernels.dropout_add import kernel as dropout_kernel

KEYS = [0, 0xFEDCBA9876543210, 0x80000000_7FFFFFFF, 2**64 - 1]
DRAW = Draw(0.1, 0xFEDCBA9876543210, 2**32 - 1, 5)
SHAPES = [(5, 2, 768), (2, 3, 1000), (5, 3, 13), (1, 1, 1), (1, 2, 2049), (40, 1, 8), (0, 2, 8), (4, 2, 0)]


def check_dropout_add(x, bias, residual, grad):
    out = dropout_kernel.forward(x, bias, residual, DRAW)
    assert_as_specified([out], [x, bias, residual], lambda *t: [dropout_eager.forward(*t, DRAW)], "out")
    found = dropout_kernel.backward(grad, DRAW, has_grad_bias=True)
    assert_as_specified(
        found, [grad], lambda t: dropout_eager.backward(t, DRAW, has_grad_bias=True), "grad_x", "grad_bias"
    )
    alone, nothing = dropout_kernel.backward(grad, DRAW, has_grad_bias=False)
    assert torch.equal(alone, found[0]) and nothing is None


@kernel_test
@parametrize_covering(each={"shape": SHAPES}, dtype=DTYPES, has_bias=[True, False], has_residual=[True, False])
def test_dropout_add_does_what_is_specified(shape, dtype, has_bias, has_residual):
    x, residual, grad = ((torch.rand(shape, device=DEVICE) * 16 - 8).to(dtype) for _ in range(3))
    bias = torch.randn(shape[-1], device=DEVICE).to(dtype) if has_bias else None
    check_dropout_add(x, bias, residual if has_residual else None, grad)


@kernel_test
def test_dropout_add_takes_any_strides_and_alignment():
    x = torch.randn(6, 5, 4, device=DEVICE).permute(2, 1, 0)
    residual, grad = torch.randn(8, 5, 6, device=DEVICE)[::2], torch.randn(6, device=DEVICE).expand(4, 5, 6)
    check_dropout_add(x, torch.randn(12, device=DEVICE)[::2], residual, grad)
    x, residual, grad = (torch.randn(385, device=DEVICE).bfloat16()[1:].view(3, 2, 64) for _ in range(3))
    check_dropout_add(x, torch.randn(65, device=DEVICE)[1:], residual, grad[1:])


@kernel_test
@pytest.mark.parametrize(("key", "dtype"), list(zip(KEYS, [*DTYPES, torch.float16], strict=True)), ids=str)
@pytest.mark.parametrize(("p", "num_columns"), [(0.0, 64), (0.4, 300), (0.9999, 1024)])
def test_dropout_add_drops_the_specified_elements_bit_for_bit(p, num_columns, key, dtype):
    ones = torch.ones(9, 3, num_columns, dtype=dtype, device=DEVICE)
    # A part of the columns may begin where a group of eight has a number of 32 bits.
    for first_column in (0, 8 << 31):
        draw = Draw(p, key, 2**32 - 2, 77, first_column)
        dropped = dropout_eager.forward(torch.ones(9, 3, num_columns), None, None, draw) == 0
        assert torch.equal(dropout_kernel.forward(ones, None, None, draw).cpu() == 0, dropped)
        assert torch.equal(dropout_kernel.backward(ones, draw, has_grad_bias=False)[0].cpu() == 0, dropped)


@kernel_test
@pytest.mark.parametrize("key", KEYS, ids=hex)
def test_dropout_add_draws_the_same_from_device_data_bit_for_bit(key):
    ones = torch.ones(9, 3, 100, device=DEVICE)
    where = (key, 2**32 - 2)
    loaded = [torch.tensor(number - 2**64 if number >> 63 else number, device=DEVICE) for number in where]
    for p in (0.0, 0.4):
        out = dropout_kernel.forward(ones, None, None, Draw(p, *where, 77))
        grads = dropout_kernel.backward(ones, Draw(p, *where, 77), has_grad_bias=True)
        for key_form, sample_form in [loaded, (loaded[0], where[1]), (where[0], loaded[1])]:
            assert torch.equal(dropout_kernel.forward(ones, None, None, Draw(p, key_form, sample_form, 77)), out)
            found = dropout_kernel.backward(ones, Draw(p, key_form, sample_form, 77), has_grad_bias=True)
            assert all(torch.equal(a, b) for a, b in zip(found, grads, strict=True))


@kernel_test
@pytest.mark.parametrize("places", [(1, 0), (0, 1), (1, 1), (2, 2)], ids=str)
def test_dropout_add_takes_the_rows_and_samples_of_tokens_bit_for_bit(places):
    shapes = [None, (9,), (9, 3)]
    rows, samples = (None if shapes[i] is None else torch.randint(2**32, shapes[i]) for i in places)
    x, bias, residual = torch.randn(9, 3, 100), torch.randn(100), torch.randn(9, 3, 100)
    draws = [Draw(0.4, 7, 0, 0, 0, *(t if t is None else t.to(to) for t in (rows, samples))) for to in ("cpu", DEVICE)]
    expected = dropout_eager.forward(torch.ones_like(x), None, None, draws[0]) == 0
    for given in ((None, None), (bias, residual)):
        there = dropout_kernel.forward(*(t if t is None else t.to(DEVICE) for t in (x, *given)), draws[1])
        torch.testing.assert_close(there.cpu(), dropout_eager.forward(x, *given, draws[0]))
    found = dropout_kernel.backward(torch.ones_like(x, device=DEVICE), draws[1], has_grad_bias=True)
    assert torch.equal(found[0].cpu() == 0, expected)
    torch.testing.assert_close(found[1].cpu(), dropout_eager.backward(torch.ones_like(x), draws[0], True)[1])


@kernel_test
def test_dropout_add_passes_nan_and_inf_where_kept_and_none_where_dropped():
    x = torch.full((64, 1, 16), float("inf"), device=DEVICE)
    x[::2] = float("nan")
    out = dropout_kernel.forward(x, None, torch.ones_like(x), Draw(0.5, 1, 0, 0)).cpu()
    dropped = dropout_eager.forward(torch.ones(64, 1, 16), None, None, Draw(0.5, 1, 0, 0)) == 0
    assert (out[dropped] == 1).all() and not out[~dropped].isfinite().any()


@kernel_test
def test_dropout_adds_bias_gradient_sums_many_tiles_in_a_fixed_order(monkeypatch):
    x, grad = (torch.randn(40, 3, 260, device=DEVICE) for _ in range(2))
    check_many_tiles(
        monkeypatch,
        lambda x, grad: check_dropout_add(x, None, None, grad),
        (x, grad),
        lambda x, grad: dropout_kernel.backward(grad, DRAW, has_grad_bias=True)[1],
    )


@kernel_test
def test_dropout_add_refuses_float64_and_what_32_bits_do_not_count_where_kernels_run():
    with pytest.raises(ValueError, match="x is torch.float64; expected float32, float16 or bfloat16"):
        dropout_kernel.forward(torch.ones(1, 1, 8, dtype=torch.float64, device=DEVICE), None, None, Draw(0.1, 1, 0, 0))
    for shape in ((1, 1, 2**31), (2**29, 4, 8)):
        with pytest.raises(ValueError, match=r"2147483648 .*expected fewer than 2\*\*31 .*first_row"):
            dropout_kernel.forward(torch.empty(shape, device="meta").half(), None, None, Draw(0.1, 1, 0, 0))

"""bias_dropout_add_*_norm's Triton kernels against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, DTYPES, assert_as_specified, kernel_test
from test_dropout_add_norm import random_inputs
from test_norm import PARAMETERS

from tempo_kernels.dropout_add import Draw
from tempo_kernels.dropout_add import kernel as dropout_add
from tempo_kernels.dropout_add_norm import bias_dropout_add_layer_norm, eager, kernel
from tempo_kernels.norm import kernel as norm
from tempo_kernels.norm import kernel_lost_channels as lost_channels

DRAW = Draw(0.1, 0xFEDCBA9876543210, 2**32 - 1, 5)
NAMES = ["residual_out", "y", "grad_x", "grad_bias", "grad_residual", "grad_weight", "grad_norm_bias"]


def forward_and_backward(module, inputs, grads, draw=DRAW, zero_centered=False):
    """What NAMES names, but for what there is none of; four inputs and not five are RMSNorm's."""
    x, bias, residual, weight, norm_bias = [*inputs, None][:5]
    form = (norm_bias is not None, zero_centered)
    residual_out, y, *kept = module.forward(x, bias, residual, weight, norm_bias, 1e-5, *form, draw)
    dtypes = [None if t is None else t.dtype for t in (bias, weight, norm_bias)]
    found = module.backward(*grads, y, *kept, draw, *dtypes)
    named = dict(zip(NAMES, [residual_out, y, *found], strict=True))
    if norm_bias is None:
        del named["grad_norm_bias"]
    return {name: result for name, result in named.items() if result is not None}


def check(inputs, grads=None, dtype=torch.bfloat16, parameter_dtype=None, draw=DRAW, zero_centered=False):
    """Returns what the kernels gave; parameter_dtype is that of the norm's, if another."""
    dtypes = [dtype] * 3 + [parameter_dtype or dtype] * 2
    inputs = [None if t is None else t.to(DEVICE, dtype) for t, dtype in zip(inputs, dtypes, strict=False)]
    grads = [torch.randn_like(inputs[0]) for _ in range(2)] if grads is None else grads
    grads = [None if t is None else t.to(device=DEVICE, dtype=dtype) for t in grads]
    found = forward_and_backward(kernel, inputs, grads, draw, zero_centered)

    def specified(*tensors):
        split = len(inputs)
        return forward_and_backward(eager, tensors[:split], tensors[split:], draw, zero_centered).values()

    assert_as_specified(found.values(), [*inputs, *grads], specified, *found)
    return found


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_fused_norm_does_what_is_specified_for_any_gamma_and_beta(name, dtype):
    check(random_inputs((5, 3, 200), name), dtype=dtype)
    check(random_inputs((5, 3, 72), name, has_bias=False, has_norm_bias=False), dtype=dtype)


@kernel_test
@pytest.mark.parametrize("shape", [(2, 3, 768), (1, 2, 2048), (3, 3, 33), (1, 1, 1), (5, 2, 4), (0, 2, 8), (3, 0, 8)])
def test_the_fused_norm_does_what_is_specified_for_any_shape(shape):
    check(random_inputs(shape, "one in a hundred gamma 0"))
    check(random_inputs(shape, has_norm_bias=False), dtype=torch.float32)


@kernel_test
def test_the_fused_norm_takes_float32_parameters_with_16_bit_rows():
    found = check(random_inputs((5, 2, 72)), parameter_dtype=torch.float32)
    assert found["grad_weight"].dtype == torch.float32 and found["grad_bias"].dtype == torch.bfloat16


@kernel_test
@pytest.mark.parametrize("unused", [0, 1], ids=["residual_out", "y"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_fused_norm_does_without_one_of_its_gradients_what_is_specified(has_bias, unused):
    inputs = random_inputs((4, 3, 72), has_bias=has_bias)
    grads = [torch.randn(4, 3, 72) for _ in range(2)]
    grads[unused] = None
    check(inputs, grads)


@kernel_test
@pytest.mark.parametrize("has_norm_bias", [True, False])
def test_the_fused_norm_takes_a_zero_centered_gamma_any_strides_and_alignment(has_norm_bias):
    x, bias, residual, *parameters = random_inputs((8, 5, 24), has_norm_bias=has_norm_bias)
    parameters = [torch.cat((t, t))[1:25] for t in parameters]
    inputs = [x.permute(1, 0, 2)[:, ::2], bias, residual[::2].permute(1, 0, 2), *parameters]
    check(inputs, [torch.randn(24).expand(5, 4, 24), torch.randn(5, 8, 24)[:, ::2]], torch.float32, zero_centered=True)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_norm_draws_and_adds_as_dropout_add_does_bit_for_bit(dtype):
    inputs = [t.to(device=DEVICE, dtype=dtype) for t in random_inputs((5, 2, 136))]
    grads = [torch.randn(5, 2, 136, device=DEVICE).to(dtype) for _ in range(2)]
    for p in (0.0, 0.4, 0.99):
        found = forward_and_backward(kernel, inputs, grads, DRAW._replace(p=p))
        key = torch.tensor(DRAW.key - 2**64, device=DEVICE)
        loaded = DRAW._replace(p=p, key=key, first_sample=torch.tensor(DRAW.first_sample, device=DEVICE))
        again = forward_and_backward(kernel, inputs, grads, loaded)
        assert all(torch.equal(a, b) for a, b in zip(found.values(), again.values(), strict=True))
        assert torch.equal(found["residual_out"], dropout_add.forward(*inputs[:3], *loaded))
        dropped = dropout_add.forward(torch.ones_like(inputs[0]), None, None, *loaded) == 0
        assert torch.equal(found["grad_x"] == 0, dropped | (found["grad_residual"] == 0))


@kernel_test
def test_the_fused_norm_normalises_what_it_wrote():
    inputs = [t.to(DEVICE).bfloat16() for t in random_inputs((9, 3, 300))]
    residual_out, y, rstd, *_ = kernel.forward(*inputs, 1e-5, True, False, DRAW)
    wanted = norm.forward(residual_out, *inputs[3:], 1e-5, True, False)
    assert torch.equal(y, wanted[0]) and torch.equal(rstd, wanted[1])


@kernel_test
def test_the_fused_norm_counts_the_channels_that_get_lost_for_later_calls():
    inputs = [t.to(DEVICE) for t in random_inputs((4, 2, 64), "initial")]
    weight, norm_bias = inputs[3:]
    for lost in (0, 3):
        weight.data[:lost] = 0.0
        assert kernel.forward(*inputs, 1e-5, True, False, DRAW)[-1].shape == (8, 0)
        counts = lost_channels.find_lost(inputs[0], weight, norm_bias, False, True).counts
        assert counts.tolist() == [lost, lost]


@kernel_test
def test_rows_too_long_for_the_fused_norm_take_the_operations_in_a_row(monkeypatch):
    inputs = random_inputs((5, 2, 100), "one in a hundred gamma 0")
    for constant in ("FORWARD_COLUMNS", "BACKWARD_COLUMNS"):
        check(inputs)
        monkeypatch.setattr(kernel, constant, 64)
    monkeypatch.setattr(kernel, "_backward_kernel", None)
    check(inputs)


@kernel_test
def test_the_fused_norms_sums_over_many_programs_are_in_a_fixed_order(monkeypatch):
    for constant in ("FORWARD_PROGRAMS", "BACKWARD_PROGRAMS"):
        monkeypatch.setattr(kernel, constant, 3)
    inputs, grads = random_inputs((40, 3, 130)), [torch.randn(40, 3, 130) for _ in range(2)]
    first, second = (check(inputs, grads, torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))


@kernel_test
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_with_inf_or_nan_leaves_the_fused_norms_other_rows_alone():
    inputs = random_inputs((4, 1, 40))
    inputs[2][0, 0, 3], inputs[2][1, 0, 4] = float("inf"), float("nan")
    inputs = [t.to(DEVICE) for t in inputs]
    found = forward_and_backward(kernel, inputs, [torch.randn(4, 1, 40, device=DEVICE) for _ in range(2)])
    for name in ("y", "grad_residual"):
        assert found[name][:2].isnan().all() and found[name][2:].isfinite().all()


@kernel_test
def test_another_default_dtype_changes_nothing_in_the_fused_norm():
    inputs = [t.to(DEVICE) for t in random_inputs((9, 2, 72))]
    grads = [torch.randn(9, 2, 72, device=DEVICE) for _ in range(2)]
    wanted = forward_and_backward(kernel, inputs, grads)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = forward_and_backward(kernel, inputs, grads)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@kernel_test
def test_the_fused_norm_refuses_float64_where_kernels_run():
    inputs = [t.to(DEVICE).double() for t in random_inputs((1, 1, 8))]
    with pytest.raises(ValueError, match="x is torch.float64; float32, float16 or bfloat16"):
        kernel.forward(*inputs, 1e-5, True, False, DRAW)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_fused_norm_does_on_a_gpu_what_is_specified(name):
    check(random_inputs((512, 2, 768), name))


@pytest.mark.gpu
def test_the_fused_norm_addresses_more_than_two_billion_elements():
    x = torch.zeros(2**31 // 4096 + 9, 1, 4096, dtype=torch.bfloat16, device="cuda")
    x[-9:] = torch.randn(9, 1, 4096)
    weight, form = torch.ones(4096, dtype=torch.bfloat16, device="cuda"), (None, 1e-5, False, False)
    found = kernel.forward(x, None, x, weight, *form, DRAW)
    last = x[-9:].clone()
    wanted = kernel.forward(last, None, last, weight, *form, DRAW._replace(first_row=DRAW.first_row + x.size(0) - 9))
    assert all(torch.equal(a[-9:], b) for a, b in zip(found[:3], wanted[:3], strict=True))


@pytest.mark.gpu
def test_a_captured_fused_norm_draws_from_what_the_key_holds_at_each_replay():
    inputs = [t.cuda().bfloat16().requires_grad_() for t in random_inputs((64, 2, 512))]

    def step(key):
        outputs = bias_dropout_add_layer_norm(*inputs, p=0.4, key=key)
        return [*outputs, *torch.autograd.grad(outputs, inputs, [torch.ones_like(out) for out in outputs])]

    key, stream, graph = torch.tensor(3, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(key)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = step(key)
    for value in (5, 11):
        key.fill_(value)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(value), strict=True))

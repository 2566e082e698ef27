"""The norms in inference mode, without data and under another default dtype."""

from __future__ import annotations

import contextlib
from itertools import product

import pytest
import torch
from covering import exhaustive
from norm_inputs import DTYPES, FORMS, PARAMETERS
from torch._subclasses.fake_tensor import FakeTensorMode

from tempo_kernels.norm import layer_norm, rms_norm

LARGE = (1024, 512)  # compiled on a CPU


@pytest.mark.parametrize(
    ("shape", "keep"), [*product([(4, 8)], FORMS), (LARGE, "output"), *exhaustive((LARGE, "input"))]
)
def test_what_ran_in_inference_mode_first_can_be_trained(shape, keep):
    leaves = [torch.randn(shape), *PARAMETERS["trained"](shape[-1])]
    with torch.inference_mode():
        layer_norm(*leaves, keep=keep), rms_norm(*leaves[:2], keep=keep)
    leaves = [t.requires_grad_() for t in leaves]
    (layer_norm(*leaves, keep=keep) + rms_norm(*leaves[:2], keep=keep)).sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_an_output_may_be_changed_in_place_where_backward_does_not_read_it(function, dtype):
    x, *parameters = (t.to(dtype) for t in (torch.randn(6, 2, 16), *PARAMETERS["trained"](16)))
    parameters = parameters[: 2 if function is layer_norm else 1]

    def find(change, keep):
        leaves = [t.clone().requires_grad_() for t in (x, *parameters)]
        y = change(function(*leaves, keep=keep))
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    expected = find(lambda y: y * 2, "input")
    assert all(torch.equal(*pair) for pair in zip(find(lambda y: y.mul_(2), "input"), expected, strict=True))
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        find(lambda y: y.mul_(2), "output")


@pytest.mark.parametrize("mode", ["fake", "meta"])
@pytest.mark.parametrize("keep", FORMS)
@pytest.mark.parametrize("function", [layer_norm, rms_norm])
@pytest.mark.parametrize("shape", [(6, 2, 16), (2048, 2, 4096)], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=["16 bits", "a float32 residual"])
def test_shapes_and_kept_bytes_are_known_without_data(x_dtype, shape, function, keep, mode):
    parameter_dtype = {torch.bfloat16: torch.float32, torch.float32: torch.bfloat16}[x_dtype]
    with contextlib.nullcontext() if mode == "meta" else FakeTensorMode():
        device = {"fake": "cpu", "meta": "meta"}[mode]
        x = torch.empty(shape, dtype=x_dtype, device=device, requires_grad=True)
        parameters = [torch.ones(shape[-1], dtype=parameter_dtype, device=device, requires_grad=True) for _ in range(2)]
        parameters = parameters[: 2 if function is layer_norm else 1]
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = function(x, *parameters, keep=keep)
        y.sum().backward()
        assert (y.shape, y.dtype, y.device) == (x.shape, torch.bfloat16, x.device)
        for leaf in (x, *parameters):
            assert (leaf.grad.shape, leaf.grad.dtype, leaf.grad.device) == (leaf.shape, leaf.dtype, leaf.device)
    rows = shape[0] * shape[1]
    if keep == "output":
        found = sorted(t.numel() * t.element_size() for t in kept if t.numel())
        assert found == sorted([2 * rows * shape[-1], 4 * rows, 4 * len(parameters) * shape[-1]])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DTYPES[2], *exhaustive(*[[dtype] for dtype in DTYPES[:2]])])
def test_another_default_dtype_changes_nothing(dtype):
    def results():
        torch.manual_seed(0)
        leaves = [t.to(dtype).requires_grad_() for t in (torch.randn(1024, 320, dtype=torch.float32),)]
        leaves += [t.to(dtype).requires_grad_() for t in (torch.ones(320, dtype=torch.float32), torch.zeros(320))]
        outputs = [layer_norm(*leaves), rms_norm(*leaves[:2], keep="input")]
        return [*outputs, *torch.autograd.grad([y.float().square().sum() for y in outputs], leaves)]

    expected = results()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = results()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))

"""The norms' kernels while their parameters change, seen by torch or not: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, kernel_test
from norm_inputs import float32_layer_norm, float32_rms_norm
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint
from witness import assert_within_rule

from tempo_kernels.norm import function, kernel, layer_norm, reserve, rms_norm

HIDDEN = 64


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    monkeypatch.setattr(function, "choose_backend", lambda x, cpu: kernel)


def parameters(dtype, gamma=1.0, beta=0.0):
    weight, bias = torch.full((HIDDEN,), gamma), torch.full((HIDDEN,), beta)
    return [Parameter(t.to(DEVICE, dtype)) for t in (weight, bias)]


def results(norm, tensors, grad):
    """y, and the gradients of x and of the parameters."""
    x, *leaves = tensors
    x = x.detach().requires_grad_()
    y = norm(x, *leaves)
    return [y.detach().cpu(), *(t.cpu() for t in torch.autograd.grad(y, [x, *leaves], grad))]


def check_step(leaves: list[Tensor], norm=layer_norm) -> None:
    """One forward and backward with parameters that stay the same objects, by the rule of three witnesses."""
    dtype = leaves[0].dtype
    x, grad = ((torch.randn(96, HIDDEN) * scale).to(DEVICE, dtype) for scale in (3.0, 1.0))
    found = results(norm, [x, *leaves], grad)
    copies = [t.detach().cpu().requires_grad_() for t in (x, *leaves)]
    plain = float32_layer_norm if len(leaves) == 2 else float32_rms_norm
    same = results(plain, copies, grad.cpu())
    exact = results(plain, [t.detach().double().requires_grad_() for t in copies], grad.cpu().double())
    for name, *witnesses in zip(["y", "grad_x", "grad_weight", "grad_bias"], found, same, exact, strict=False):
        assert_within_rule(name, *witnesses)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_channels_pruned_under_no_grad_are_exact_from_the_next_call_on(norm, dtype):
    leaves = parameters(dtype)[: 2 if norm is layer_norm else 1]
    for call in range(5):
        if call == 3:
            with torch.no_grad():
                leaves[0][::7] = 0
        check_step(leaves, norm)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [0, 2])
def test_a_beta_of_100_gammas_is_exact_whenever_it_comes(changes, dtype):
    weight, bias = parameters(dtype)
    for call in range(4):
        if call == changes:
            with torch.no_grad():
                weight.fill_(0.01)
                bias.fill_(1.0)
        check_step([weight, bias])


@kernel_test
@parametrize_covering(each={"share": [1, 3], "gamma": [0.02, 0.01], "dtype": [torch.float32, torch.bfloat16]})
def test_gammas_that_drift_through_0_unseen_are_exact_in_every_call(share, gamma, dtype):
    weight, bias = parameters(dtype, gamma, 0.001)
    for _ in range(round(gamma / 1e-3) + 8):
        check_step([weight, bias])
        weight.data[::share] -= 1e-3


@kernel_test
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_gammas_that_an_optimizer_takes_through_0_are_exact_in_every_step(options):
    leaves = parameters(torch.float32, 0.02)
    optimizer = torch.optim.AdamW(leaves, lr=2e-3, **options)
    for _ in range(14):
        check_step(leaves)
        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf)
        optimizer.step()


def overflow(dtype, first_lost):
    """What a norm gives of which 16 more channels were lost without torch's notice, and what says so."""
    x, (weight, bias) = torch.randn(6, HIDDEN, device=DEVICE).to(dtype).requires_grad_(), parameters(dtype)
    with torch.no_grad():
        weight[:first_lost] = 0
    layer_norm(x, weight, bias).sum().backward()
    x.grad = weight.grad = bias.grad = None
    weight.data[first_lost::2][:16] = 0
    y = layer_norm(x, weight, bias)
    with pytest.raises(RuntimeError) as caught:
        (y * torch.randn_like(y)).sum().backward()
    return x, weight, bias, y, str(caught.value)


@kernel_test
@pytest.mark.parametrize(("first_lost", "beyond"), [(0, 16), (1, 9)], ids=["no room", "room for 8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_too_many_lost_channels_raise_in_their_backward_and_their_gradients_are_nan(dtype, first_lost, beyond):
    x, weight, bias, y, message = overflow(dtype, first_lost)
    assert f"(hidden size 64, {dtype}): {beyond} channels more" in message and 'set norm to "recompute"' in message
    assert x.grad.isnan().all() and int(weight.grad.isnan().sum()) == beyond
    assert y.isfinite().all() and bias.grad.isfinite().all()


@kernel_test
def test_after_an_overflow_that_was_caught_there_is_room():
    _, weight, bias, *_ = overflow(torch.float32, 1)
    check_step([weight, bias])


@kernel_test
@pytest.mark.parametrize("reentrant", [True, False])
def test_an_overflow_inside_a_checkpoint_raises_in_the_same_backward(reentrant):
    norms = [parameters(torch.float32) for _ in range(4)]

    def block(y, first):
        for leaves in norms[first : first + 2]:
            y = layer_norm(y, *leaves) + y
        return y

    def step():
        y = torch.randn(6, HIDDEN, device=DEVICE, requires_grad=True)
        for first in (0, 2):
            y = checkpoint(block, y, first, use_reentrant=reentrant)
        y.sum().backward()

    for _ in range(2):
        step()
    for changed in (0, 3):
        norms[changed][0].data[:10] = 0
        with pytest.raises(RuntimeError, match="10 channels more"):
            step()
        step()
        with torch.no_grad():
            norms[changed][0][20:50] = 0
        step()


@kernel_test
def test_a_forward_without_gradients_neither_waits_nor_complains(monkeypatch):
    leaves = parameters(torch.float32)
    check_step(leaves)
    with monkeypatch.context() as patch:
        patch.setattr(reserve, "_wait_for", None)
        with torch.no_grad():
            leaves[0][:9] = 0
            layer_norm(torch.randn(3, HIDDEN, device=DEVICE), *leaves)
    check_step(leaves)

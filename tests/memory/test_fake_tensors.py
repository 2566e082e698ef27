"""Fake and meta tensors give shapes and dtypes without any work, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from activations import ACTIVATIONS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from tempo_kernels.norm import layer_norm, rms_norm

S, B, H, V = 6, 2, 32, 11
INTEGERS = {"dtype": torch.int64}


def attend(x: Tensor, form: str, **more: Any) -> Tensor:
    q, group = x.view(S, B, 4, -1), x.view(S, B, 4, -1).narrow(2, 0, 2)
    chosen = {"causal": True, "softmax_scale": 0.3, "dropout_p": 0.1, "dropout_key": 2**64 - 1}
    return attention(q, group, group, form=form, **chosen, **more)


def lengths(x: Tensor) -> Tensor:
    return torch.ones(B, device=x.device, **INTEGERS)


def hides_nothing(x: Tensor) -> Tensor:
    return torch.zeros(B, 1, S, S, dtype=torch.bool, device=x.device)


def layer_normalize(x: Tensor, bias: Tensor, kept: str) -> Tensor:
    return layer_norm(x, x.new_ones(H).requires_grad_(), bias, keep=kept)


def rms_normalize(x: Tensor, _: Tensor, kept: str) -> Tensor:
    return rms_norm(x, x.new_ones(H).requires_grad_(), keep=kept)


def losses(x: Tensor, bias: Tensor, is_weighted: bool = False) -> Tensor:
    weight, labels = x.new_ones(V, H).requires_grad_(), torch.zeros(B, S, device=x.device, **INTEGERS)
    more = {"token_weights": torch.ones(B, S, dtype=torch.float32, device=x.device)} if is_weighted else {}
    found = linear_cross_entropy(x, weight, labels, bias=bias.narrow(0, 0, V), label_smoothing=0.1, z_loss=1e-3, **more)
    return found[0] if is_weighted else found


def log_probs(x: Tensor, bias: Tensor, return_entropy: bool) -> Tensor:
    weight, labels = x.new_ones(V, H).requires_grad_(), torch.zeros(B, S, device=x.device, **INTEGERS)
    more = {"return_entropy": return_entropy, "bias": bias.narrow(0, 0, V), "vocab_size": V - 1}
    found = linear_log_prob(x, weight, labels, 0.7, 30.0, **more)
    return torch.cat(found) if return_entropy else found


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    **ACTIVATIONS,
    "dropout": lambda x, bias: bias_dropout_add(x, bias, None, p=0.1, key=2**64 - 1, first_sample=2**40),
    "dropout by device data": lambda x, bias: bias_dropout_add(
        x, bias, x, p=0.1, key=torch.ones((), device=x.device, **INTEGERS),
        first_sample=torch.ones((), device=x.device, **INTEGERS),
    ),
    "attention": lambda x, _: attend(x, "flash"),
    "attention with key_lengths": lambda x, _: attend(x, "flash", key_lengths=lengths(x)),
    "attention with mask": lambda x, _: attend(x, "flash", mask=hides_nothing(x)),
    "attention keeping its softmax": lambda x, _: attend(x, "softmax", key_lengths=lengths(x)),
    "layer_norm": lambda x, bias: layer_normalize(x, bias, "output"),
    "layer_norm keeping its input": lambda x, bias: layer_normalize(x, bias, "input"),
    "rms_norm": lambda x, bias: rms_normalize(x, bias, "output"),
    "rms_norm keeping its input": lambda x, bias: rms_normalize(x, bias, "input"),
    "linear_cross_entropy": losses,
    "linear_cross_entropy with token_weights": lambda x, bias: losses(x, bias, True),
    "linear_log_prob": lambda x, bias: log_probs(x, bias, False),
    "linear_log_prob with entropy": lambda x, bias: log_probs(x, bias, True),
}  # fmt: skip


def run(name: str, dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    """Output and gradients, and shape, dtype and strides of what is kept."""
    x = torch.zeros(S, B, H, dtype=dtype, device=device).requires_grad_()
    bias = torch.zeros(H, dtype=dtype, device=device).requires_grad_()
    kept: list[tuple[Any, ...]] = []

    def pack(t: Tensor) -> Tensor:
        kept.append((t.shape, t.dtype, t.stride()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = OPERATIONS[name](x, bias)
    y.backward(torch.ones_like(y))
    return [t for t in (y, x.grad, bias.grad) if t is not None], kept


def described(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(t.shape, t.dtype, t.stride()) for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_returned_and_kept_has_the_shapes_of_a_real_run(name: str, kind: str, dtype: torch.dtype) -> None:
    real, real_kept = run(name, dtype, "cpu")
    if kind == "meta":
        unreal, unreal_kept = run(name, dtype, "meta")
        assert all(t.is_meta for t in unreal)
    else:
        with FakeTensorMode():
            unreal, unreal_kept = run(name, dtype, "cpu")
        assert all(type(t) is FakeTensor for t in unreal)
    assert described(unreal) == described(real)
    assert unreal_kept == real_kept


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fake_gpu_needs_neither_a_gpu_nor_triton(name: str) -> None:
    def forward(device: str) -> Tensor:  # torch without CUDA differentiates no tensor there, fake or not
        with torch.no_grad():
            return OPERATIONS[name](*(torch.zeros(n, dtype=torch.bfloat16, device=device) for n in ((S, B, H), (H,))))

    with FakeTensorMode():
        fake = forward("cuda")
    assert fake.device.type == "cuda" and described([fake]) == described([forward("cpu")])


def test_a_wrong_shape_is_named_of_fake_tensors_too() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match=r"bias is torch.float32 of shape \[5\]"):
        gelu(torch.zeros(3, 4), torch.zeros(5))

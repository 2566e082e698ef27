"""Fake and meta tensors give shapes and dtypes without any work, in forward and in backward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from covering import parametrize_covering
from every_operation import OPERATIONS, make_inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tempo_kernels.gelu import gelu

MASK = (2**64 - 1, 2**40)  # key and first sample


def give_mask(device: str, by_device_data: bool) -> tuple[Any, ...]:
    return tuple(torch.ones((), dtype=torch.int64, device=device) for _ in MASK) if by_device_data else MASK


def run(name: str, dtype: torch.dtype, device: str, by_device_data: bool) -> tuple[list[Tensor], list[Any]]:
    """Output and gradients, and shape, dtype and strides of what is kept."""
    leaves = [torch.zeros(t.shape, dtype=dtype, device=device).requires_grad_() for t in make_inputs()]
    kept: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        kept.append((t.shape, t.dtype, t.stride()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = OPERATIONS[name](*leaves, *give_mask(device, by_device_data))
    y.backward(torch.ones_like(y))
    return [t for t in (y, *(leaf.grad for leaf in leaves)) if t is not None], kept


def described(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(t.shape, t.dtype, t.stride()) for t in tensors]


@parametrize_covering(
    name=OPERATIONS.keys(),
    kind=["meta", "fake"],
    each={"dtype": [torch.float32, torch.bfloat16, torch.float64], "by_device_data": [False, True]},
)
def test_what_is_returned_and_kept_has_the_shapes_of_a_real_run(
    name: str, kind: str, dtype: torch.dtype, by_device_data: bool
) -> None:
    real, real_kept = run(name, dtype, "cpu", by_device_data)
    device, is_meant = ("meta", lambda t: t.is_meta) if kind == "meta" else ("cpu", lambda t: type(t) is FakeTensor)
    with FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else nullcontext():
        unreal, unreal_kept = run(name, dtype, device, by_device_data)
    assert all(map(is_meant, unreal))
    assert described(unreal) == described(real)
    assert unreal_kept == real_kept


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fake_gpu_needs_neither_a_gpu_nor_triton(name: str) -> None:
    def forward(device: str) -> Tensor:  # torch without CUDA differentiates no tensor there, fake or not
        inputs = (torch.zeros(t.shape, dtype=torch.bfloat16, device=device) for t in make_inputs())
        with torch.no_grad():
            return OPERATIONS[name](*inputs, *MASK)

    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = forward("cuda")
    assert fake.device.type == "cuda" and described([fake]) == described([forward("cpu")])


def test_a_wrong_shape_is_named_of_fake_tensors_too() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match=r"bias is torch.float32 of shape \[5\]"):
        gelu(torch.zeros(3, 4), torch.zeros(5))

"""Captured steps in one arena: the bits of eager mode, and no bytes beside the arena but those that are named."""

from __future__ import annotations

import functools

import pytest
import torch
from roam_steps import build_resnet, compute_image_loss, draw_images, train_both, train_gpt
from torch import Tensor, nn

from tempo_megatron import TempoConfig
from tempo_megatron.roam.arena import ArenaStep, find_out_variant


def build_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 10))


def test_a_step_whose_operations_all_write_where_told_is_an_arena_of_the_planned_height() -> None:
    def draw(number: int) -> tuple[Tensor, ...]:
        return (torch.randn(32, 64, generator=torch.Generator().manual_seed(number)),)

    trained = train_both(
        build_mlp,
        functools.partial(torch.optim.SGD, lr=0.1),
        lambda model, x: (model(x).softmax(1) - 0.5).square().mean(),
        draw,
        step_of=ArenaStep,
    )
    step = trained.step
    assert step.left_out == ()
    # The loss is returned, and lies outside; numbers become tensors of one element for a moment.
    assert step.allocated_bytes == 4 <= trained.peak_bytes <= 64
    assert step.arena_bytes == pytest.approx(trained.planned_bytes, abs=64)


def test_convolutions_are_left_to_the_allocator_and_named() -> None:
    trained = train_both(build_resnet, torch.optim.Adam, compute_image_loss, draw_images, step_of=ArenaStep)
    step = trained.step
    # Packed operands, up to 3 % by the CPU: see test_roam_execute.py.
    assert trained.peak_bytes == pytest.approx(step.allocated_bytes, rel=0.03)
    assert step.arena_bytes > 0.3 * trained.planned_bytes
    assert {"convolution", "convolution_backward"} <= set(step.left_out)
    assert not any(
        name.startswith(("add", "mm", "native_batch_norm")) and "backward" not in name for name in step.left_out
    )


@pytest.mark.slow
def test_a_stock_gpt_lies_in_the_arena_but_for_norms_embeddings_and_losses() -> None:
    trained = train_gpt(TempoConfig.off(), ArenaStep)
    step = trained.step
    assert trained.peak_bytes == pytest.approx(step.allocated_bytes, rel=0.03)
    assert step.arena_bytes > 0.8 * trained.planned_bytes
    assert {"embedding", "native_layer_norm"} <= set(step.left_out)


def test_only_kernels_that_write_to_their_result_count() -> None:
    aten = torch.ops.aten
    assert find_out_variant(aten.mm.default, "cpu") is aten.mm.out
    assert find_out_variant(aten.mul.Scalar, "cpu") is aten.mul.out
    assert find_out_variant(aten.native_batch_norm.default, "cpu") is aten.native_batch_norm.out
    # Theirs allocate, and copy.
    assert find_out_variant(aten.convolution.default, "cpu") is None
    assert find_out_variant(aten.native_layer_norm.default, "cpu") is None

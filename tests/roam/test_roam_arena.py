"""Captured steps in one arena: the bits of eager mode, and no bytes beside the arena but those that are named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocated import measure_allocated
from gpt import build_gpt, gpt_config
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from roam_steps import build_resnet, compute_image_loss, compute_token_loss, draw_images, draw_tokens
from torch import Tensor, nn

from tempo_megatron import TempoConfig, cpu
from tempo_megatron.memory.fake_tensors import simulate_layout, use_megatron_fakes
from tempo_megatron.roam.arena import ArenaStep, find_out_variant
from tempo_megatron.roam.capture import capture_step
from tempo_megatron.roam.order import OperationOrder, find_order
from tempo_megatron.slots import dropout_rng


def train_in_arena(
    build: Callable[[], nn.Module],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    compute_loss: Callable[..., Tensor],
    draw: Callable[[int], tuple[Tensor, ...]],
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> tuple[ArenaStep, int, int]:
    """Three steps beside eager mode. Returns the step, the plan's peak, and what was allocated beside the arena."""
    model, eager = build(), build()
    optimizer, eager_optimizer = make_optimizer(model.parameters()), make_optimizer(eager.parameters())
    with context():
        captured = capture_step(model, compute_loss, draw(0), optimizer)
    plan: OperationOrder = find_order(captured.graph)
    step = ArenaStep(captured, model, plan.order)
    allocated = list[int]()
    for number in range(3):
        batch = draw(number)
        torch.manual_seed(number)
        loss, peak = measure_allocated(lambda batch=batch: step(*batch))
        allocated.append(peak)
        torch.manual_seed(number)
        eager_optimizer.zero_grad()
        expected = compute_loss(eager, *batch)
        expected.backward()
        eager_optimizer.step()
        assert torch.equal(loss, expected.detach())
    for found, expected in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(found, expected)
    return step, plan.peak_bytes - captured.standing_bytes, allocated[-1]


def build_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 10))


def test_a_step_whose_operations_all_write_where_told_is_an_arena_of_the_planned_height() -> None:
    def draw(number: int) -> tuple[Tensor, ...]:
        return (torch.randn(32, 64, generator=torch.Generator().manual_seed(number)),)

    step, planned, allocated = train_in_arena(
        build_mlp,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda model, x: (model(x).softmax(1) - 0.5).square().mean(),
        draw,
    )
    assert step.left_out == ()
    # The loss is returned, and lies outside; numbers become tensors of one element for a moment.
    assert step.allocated_bytes == 4 <= allocated <= 64
    assert step.arena_bytes == pytest.approx(planned, abs=64)


def test_convolutions_are_left_to_the_allocator_and_named() -> None:
    step, planned, allocated = train_in_arena(build_resnet, torch.optim.Adam, compute_image_loss, draw_images)
    # Packed operands, up to 3 % by the CPU: see test_roam_execute.py.
    assert allocated == pytest.approx(step.allocated_bytes, rel=0.03)
    assert step.arena_bytes > 0.3 * planned
    assert {"convolution", "convolution_backward"} <= set(step.left_out)
    assert not any(
        name.startswith(("add", "mm", "native_batch_norm")) and "backward" not in name for name in step.left_out
    )


@pytest.mark.slow
def test_a_stock_gpt_lies_in_the_arena_but_for_norms_embeddings_and_losses() -> None:
    cpu.use_cpu()
    with simulate_layout(1):
        model_parallel_cuda_manual_seed(1234)
        dropout_rng.set_micro_batch(5, 0)
        step, planned, allocated = train_in_arena(
            lambda: build_gpt(gpt_config(), TempoConfig.off()),
            torch.optim.Adam,
            compute_token_loss,
            draw_tokens,
            use_megatron_fakes,
        )
    assert allocated == pytest.approx(step.allocated_bytes, rel=0.03)
    assert step.arena_bytes > 0.8 * planned
    assert {"embedding", "native_layer_norm"} <= set(step.left_out)


def test_only_kernels_that_write_to_their_result_count() -> None:
    aten = torch.ops.aten
    assert find_out_variant(aten.mm.default, "cpu") is aten.mm.out
    assert find_out_variant(aten.mul.Scalar, "cpu") is aten.mul.out
    assert find_out_variant(aten.native_batch_norm.default, "cpu") is aten.native_batch_norm.out
    # Theirs allocate, and copy.
    assert find_out_variant(aten.convolution.default, "cpu") is None
    assert find_out_variant(aten.native_layer_norm.default, "cpu") is None

"""What the tests of captured steps share: small models, their data, and training beside eager mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from allocated import measure_allocated
from gpt import SEQ_LENGTH, build_gpt, gpt_config, tokens_of
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor, nn
from torch.nn import functional as F

from tempo_megatron import TempoConfig, cpu
from tempo_megatron.memory.fake_tensors import simulate_layout, use_megatron_fakes
from tempo_megatron.roam.capture import CapturedStep, capture_step
from tempo_megatron.roam.execute import OrderedStep
from tempo_megatron.roam.order import OperationOrder, find_order
from tempo_megatron.slots import dropout_rng

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Trained(NamedTuple):
    step: Any
    captured: CapturedStep
    plan: OperationOrder
    peak_bytes: int
    eager_peak_bytes: int
    """Beside what stands, in the second step: the first one makes the optimizer's states."""

    @property
    def planned_bytes(self) -> int:
        return self.plan.peak_bytes - self.captured.graph.standing_bytes


def train_both(
    build: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    compute_loss: Callable[..., Tensor],
    draw: Callable[[int], tuple[Tensor, ...]],
    *,
    step_of: type[OrderedStep] = OrderedStep,
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Trained:
    """Train three steps in eager mode and in the planned order: the same losses and parameters, bit for bit."""
    torch.manual_seed(1)
    model = build()
    torch.manual_seed(1)
    eager = build()
    optimizer, eager_optimizer = make_optimizer(model.parameters()), make_optimizer(eager.parameters())
    with context():
        captured = capture_step(model, compute_loss, draw(0), optimizer)
    plan = find_order(captured.graph)
    step = step_of(captured, model, plan.order)

    def step_eagerly(*batch: Tensor) -> Tensor:
        expected = compute_loss(eager, *batch)
        expected.backward()
        eager_optimizer.step()
        eager_optimizer.zero_grad()
        return expected.detach()

    peaks = []
    for number in range(3):
        losses = []
        for run in (step, step_eagerly):
            torch.manual_seed(number)
            call = functools.partial(run, *draw(number))
            # Profiling each step would take longer than the steps.
            loss, peak = measure_allocated(call) if number == 1 else (call(), 0)
            losses.append(loss)
            peaks += [peak] if number == 1 else []
        assert torch.equal(*losses)
    for name, tensor in eager.state_dict().items():
        if isinstance(tensor, Tensor):
            assert torch.equal(model.state_dict()[name], tensor), name
    return Trained(step, captured, plan, *peaks)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.first_norm, self.second_norm = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)), inplace=True)
        return F.relu(self.second_norm(self.second(y)) + x, inplace=True)


def build_resnet() -> nn.Module:
    """Small: two residual blocks, batch norms, in-place ReLUs, and dropout before a wide head."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        Residual(16),
        nn.MaxPool2d(2),
        Residual(16),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64, 256),
        nn.Linear(256, 256),
        nn.Linear(256, 10),
    )


def compute_image_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def draw_rows(step: int, *shape: int) -> tuple[Tensor]:
    return (torch.randn(shape or (4, 8), generator=torch.Generator().manual_seed(step)),)


def draw_images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 3, 8, 8, generator=generator), torch.randint(10, (2,), generator=generator)


def compute_token_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    positions = torch.arange(SEQ_LENGTH).expand(tokens.size(0), -1)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    losses: Tensor = model(tokens, positions, mask, labels=labels)
    return losses.float().mean()


def draw_tokens(step: int) -> tuple[Tensor, Tensor]:
    tokens = tokens_of(2 * step, 2)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@contextlib.contextmanager
def one_rank_of_megatron() -> Iterator[None]:
    cpu.use_cpu()
    with simulate_layout(1):
        model_parallel_cuda_manual_seed(1234)
        dropout_rng.set_micro_batch(5, 0)
        yield


def train_gpt(tempo_config: TempoConfig, step_of: type[OrderedStep] = OrderedStep) -> Trained:
    with one_rank_of_megatron():
        return train_both(
            lambda: build_gpt(gpt_config(), tempo_config),
            torch.optim.Adam,
            compute_token_loss,
            draw_tokens,
            step_of=step_of,
            context=use_megatron_fakes,
        )

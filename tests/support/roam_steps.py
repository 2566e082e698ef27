"""Small models and their data for tests of captured steps."""

from __future__ import annotations

import torch
from gpt import SEQ_LENGTH, tokens_of
from torch import Tensor, nn
from torch.nn import functional as F


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

"""A transformer of plain torch modules, and how tests of tempo_torch measure a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tempo_megatron.memory.tape.scopes import record_saved

B, S, H, LAYERS = 3, 16, 32, 2


class Layer(nn.Module):
    """Pre-norm: an "attention" that mixes tokens by a linear, and an MLP."""

    def __init__(self, p: float, norm: Callable[[], nn.Module], activation: nn.Module) -> None:
        super().__init__()
        self.norm1, self.mix, self.out, self.drop1 = norm(), nn.Linear(H, H), nn.Linear(H, H), nn.Dropout(p)
        self.norm2, self.up, self.act, self.down = norm(), nn.Linear(H, 4 * H), activation, nn.Linear(4 * H, H)
        self.inner, self.drop2 = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.out(F.softmax(self.mix(self.norm1(x)), -1)))
        return x + self.drop2(self.down(self.inner(self.act(self.up(self.norm2(x))))))


class Model(nn.Module):
    """Embeddings with dropout, layers, and a head; `checkpoints` names how layers are checkpointed."""

    def __init__(self, p=0.1, norm=lambda: nn.LayerNorm(H), activation=nn.GELU, shared=False, layers=LAYERS):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(50, H), nn.Dropout(p)
        self.layers = nn.ModuleList([Layer(p, norm, activation()) for _ in range(1 if shared else layers)])
        self.calls = layers if shared else 1
        self.norm, self.head = norm(), nn.Linear(H, 50)
        self.checkpoints: dict | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embedding(ids))
        for _ in range(self.calls):
            for layer in self.layers:
                x = layer(x) if self.checkpoints is None else checkpoint(layer, x, **self.checkpoints)
        return self.head(self.norm(x))


def make_ids(num_samples: int = B, first: int = 0) -> Tensor:
    return (torch.arange(num_samples * S).view(num_samples, S) + first * S) * 7 % 50


def build(seed: int = 0, **kwargs) -> Model:
    torch.manual_seed(seed)
    return Model(**kwargs)


def loss_and_gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The loss, then every parameter's gradient."""
    out = model(ids)
    loss = F.cross_entropy(out.flatten(0, 1), ids.flatten())
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found


def kept_bytes(model: nn.Module, run: Callable[[], object], prefix: str, exclude: tuple[Tensor, ...] = ()) -> int:
    """Bytes of the distinct storages that modules under `prefix` have autograd keep after `run`."""
    _, kept = record_saved(model, run, exclude)
    return sum(saved.num_bytes for saved in kept if saved.operation.startswith(prefix))

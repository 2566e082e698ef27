"""A checkpoint that keeps what attention makes: the same gradients, bit for bit, and attention runs once."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tempo_kernels.attention import attention, cpu
from tempo_kernels.offload import Engine, Offload, move_all
from tempo_kernels.recompute import keep_attention

S, B, A, D = 32, 2, 4, 16


class Layer(nn.Module):
    def __init__(self, p: float | None) -> None:
        super().__init__()
        self.p, self.qkv, self.out = p, nn.Linear(A * D, 3 * A * D), nn.Linear(A * D, A * D)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (A, D)) for each in self.qkv(hidden_states).chunk(3, -1))
        if self.p is None:
            q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
        else:
            y = attention(q, k, v, causal=True, softmax_scale=0.25, dropout_p=self.p, dropout_key=7)
        return hidden_states + torch.tanh(self.out(y.flatten(2)))


class Model(nn.Module):
    def __init__(self, p: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(p) for _ in range(3)])
        self.more: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, **self.more)
        return x


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("p", [None, 0.0, 0.1])
def test_attention_runs_once_and_gradients_are_those_of_a_checkpoint(p: float | None, offload: bool) -> None:
    x = torch.randn(S, B, A * D, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found, calls = [], []
    for more in ({}, {"context_fn": keep_attention}):
        model = Model(p)
        model.more = more
        engine = Engine(num_groups=3)
        if offload and more:
            Offload(model, dict.fromkeys(model.layers, move_all), engine)
        with mock.patch("tempo_kernels.attention.cpu.forward", wraps=cpu.forward) as forward:
            y = model(x)
            y.square().sum().backward()
        calls.append(forward.call_count)
        # Of each layer its input and attention's output; a logsumexp of less than 4 KiB stays.
        assert engine.moved_bytes == (3 * 2 * x.nbytes if offload and more else 0)
        found.append([y, x.grad, *(each.grad for each in model.parameters())])
        x.grad = None
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert calls == ([0, 0] if p is None else [6, 3])

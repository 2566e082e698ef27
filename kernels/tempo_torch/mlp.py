"""Computes the MLPs of a model a tile of tokens at a time."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tempo_kernels.recompute import recompute_in_tiles
from tempo_torch.activation import is_activation
from tempo_torch.linear import drop_input
from tempo_torch.replace import Replaced


class TiledMLP(Replaced):
    """An MLP that keeps its input only. In forward and in backward it computes as many tokens at a time as they are
    wide; backward runs it once more. `recompute_in_tiles` says how exact that is."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the stock MLP returns for x [..., h]."""
        (x,) = (*args, *kwargs.values())
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            return self.stock_class.forward(self, x)
        return self._run_in_tiles(x)

    # A compiler would look through the tiles and keep what they make.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _run_in_tiles(self, x: Tensor) -> Tensor:
        stock = self.stock_class
        if any(hasattr(each, "ds_id") and not each.numel() for each in self.parameters()):
            raise ValueError(
                f"a weight of a {type(self).__name__} in tiles is partitioned by ZeRO-3 and not gathered; expected "
                'DeepSpeed to begin after tempoize; call tempoize first, or give it mlp="off"'
            )

        def run_tile(tile: Tensor) -> Tensor:
            return stock.forward(self, tile.unsqueeze(0)).squeeze(0)  # type: ignore[no-any-return]

        parameters = self.parameters()
        rows = recompute_in_tiles(run_tile, x.flatten(0, -2), parameters=parameters, num_rows=x.size(-1))
        y: Tensor = rows.unflatten(0, x.shape[:-1])
        drop_input(x, y)
        return y


def is_mlp(module: nn.Module) -> bool:
    """Returns whether a module is an MLP of transformers: its class is named so, and its forward takes one tensor."""
    kind = type(module)
    return kind.__name__.endswith("MLP") and len(inspect.signature(kind.forward).parameters) == 2


def find_dropout(module: nn.Module) -> str | None:
    """Names dropout inside a module, of which tiles draw no masks; None if there is none."""
    found = ((name, each.p) for name, each in module.named_modules() if isinstance(each, nn.Dropout) and each.p)
    return next((f"has dropout {p:g} in {name}, and tiles draw no masks; expected 0 there" for name, p in found), None)


def get_mlp_refusal(module: nn.Module) -> str | None:
    """Returns why an MLP cannot run in tiles; None where its modules treat each token by itself and draw nothing."""
    for child in module.modules():
        is_linear = isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"
        if child is module or is_linear or is_activation(child) or isinstance(child, nn.ReLU | nn.Tanh | nn.Sigmoid):
            continue
        if not isinstance(child, nn.Identity | nn.Dropout):
            return f"it has a {type(child).__name__}, which may mix tokens"
    return None if (why := find_dropout(module)) is None else f"it {why}"

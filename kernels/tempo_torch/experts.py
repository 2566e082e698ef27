"""Experts of transformers' mixtures: what they keep is the first product's output, neither their activation nor the
copies of the tokens that go to several experts.

Stock keeps the output of the gate's function, its product with the other half, and what the gate clamps, each as large
as the tokens of all experts, and for each of them a copy of its token. Here the model's own code makes them again. The
second product's output stays: the routing weights' gradient needs it.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tempo_kernels.recompute import drop, recompute
from tempo_torch.attention import name_implementation
from tempo_torch.linear import drop_input
from tempo_torch.replace import Replaced

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
"""Those of transformers/integrations/moe.py (5.24) in which the activation is recomputed; in any other, stock runs."""


class RecomputesExperts(Replaced):
    """Experts whose gated activation is recomputed, and whose tokens are gathered again.

    Keeps for backward: the activation's input, which is the output of gate_up_proj, and the layer's tokens.
    Error: none in the output, since stock code runs again; gradients are those of its activation module, which is
    Tempo's where that has its function.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the experts' weighted outputs [t, h] of tokens [t, h], as stock."""
        stock = self.stock_class
        is_plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
        if is_plain or name_implementation(self, "experts") not in IMPLEMENTATIONS:
            return stock.forward(self, *args, **kwargs)
        made: list[Tensor] = []

        def apply_gate(x: Tensor) -> Tensor:
            y = recompute(stock._apply_gate, self, x) if x.requires_grad else stock._apply_gate(self, x)
            made.append(y)
            return y

        # The stock forward runs on a shallow copy, so that threads do not see one another's `made`.
        stand_in: Any = copy.copy(self)
        stand_in.__class__ = stock
        stand_in.__dict__["_apply_gate"] = apply_gate
        # Ranks that have some of the experts write zeros to the others' tokens.
        is_split = getattr(self, "_is_expert_parallel", False)
        tokens = args[0] if args else kwargs["hidden_states"]
        # Eager forwards have products that drop them, expert by expert.
        copies = None if name_implementation(self, "experts") == "eager" else made
        with _DropsInputs(None if is_split else tokens, copies):
            out = stock.forward(stand_in, *args, **kwargs)
        while made:
            drop(made.pop(), after=out)
        return out


class _DropsInputs(TorchFunctionMode):
    """Lets copies of `tokens` [t, h] be made again, and products drop inputs that can be: eager forwards may write
    the gate's product out instead of calling `_apply_gate`. `copies` gets those that no product inside drops."""

    def __init__(self, tokens: Tensor | None, copies: list[Tensor] | None) -> None:
        super().__init__()
        self._tokens, self._copies = tokens, copies

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _GATHERS and args[0] is self._tokens:
            copies = recompute(function, *args, **kwargs)
            if self._copies is not None:
                self._copies.append(copies)
            return copies
        out = function(*args, **kwargs)
        if function in _PRODUCTS:
            drop_input(args[0], out)
        return out


# What experts apply to all tokens: the rows of each, by indices, or as many of each as it has experts.
_GATHERS = (Tensor.__getitem__, Tensor.repeat_interleave)
_PRODUCTS = (F.linear, Tensor.matmul, Tensor.__matmul__)


def is_experts(module: nn.Module) -> bool:
    """Returns whether a module was made by transformers' `use_experts_implementation` (5.0 and later)."""
    moe: Any = sys.modules.get("transformers.integrations.moe")
    return moe is not None and hasattr(module, "is_concatenated") and hasattr(type(module), "_apply_gate")


def get_experts_refusal(module: Any) -> str | None:
    """Returns why experts stay as they are; None where their activation can be recomputed."""
    if not module.has_gate:
        return "its experts have no gate"
    implementation = name_implementation(module, "experts")
    if implementation not in IMPLEMENTATIONS:
        return f"its experts run in {implementation}, and Tempo has {', '.join(IMPLEMENTATIONS)}"
    return None

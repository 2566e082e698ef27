"""Replaces LayerNorm and RMSNorm, also a model's own classes, by norms that keep their output or drop it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tempo_kernels.norm import fits_in_place, layer_norm, rms_norm
from tempo_torch.replace import Replaced

_EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "norm_eps")
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)
"""Tried where a class has its eps in its code."""


class Norm(Replaced):
    """LayerNorm or RMSNorm over the last dimension.

    Keeps for backward: with keep="inplace" its output, which the next linear keeps anyway, and 4 bytes per row; with
    keep="recompute" its input, and Tempo's linears drop the output. See `tempo_kernels.norm`.
    """

    keep: str
    compiled_keep: str
    """`keep` in a compiled graph: norm "auto" keeps the input there, since a graph has no room for lost channels."""
    tempo_eps: Any
    zero_centered: bool | None
    """Whether an RMSNorm multiplies by 1 + weight; None for a LayerNorm."""
    weight: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """y of the shape and dtype of the stock class. A call with more than one tensor, such as a gate, is the stock
        class's."""
        if len(args) == 1 and not kwargs:
            return self.normalise(args[0])
        return self.stock_class.forward(self, *args, **kwargs)  # type: ignore[no-any-return]

    def normalise(self, x: Tensor) -> Tensor:
        """y of the shape and dtype of the stock class."""
        weight, zero_centered = self.weight, self.zero_centered
        if zero_centered is None and torch.is_autocast_enabled(x.device.type) and weight.dtype == torch.float32:
            x = x.float()  # as autocast casts for F.layer_norm
        # Stock serves mixed dtypes, which each class promotes in its own way, and nn.TransformerEncoder's nested ones.
        if x.is_nested or x.dtype != weight.dtype or not x.is_floating_point() or x.numel() == 0:
            return self.stock_class.forward(self, x)  # type: ignore[no-any-return]
        keep = self.compiled_keep if torch.compiler.is_compiling() else self.keep
        if zero_centered is None:
            return layer_norm(x, weight, getattr(self, "bias", None), self.tempo_eps, keep=keep)  # some have no bias
        # nn.RMSNorm without eps takes torch.finfo's of the dtype in which it computes, float32 or wider.
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.tempo_eps is None else self.tempo_eps
        return rms_norm(x, weight, eps, zero_centered=zero_centered, keep=keep)


def recognise_norm(module: nn.Module) -> dict[str, Any] | str | None:
    """Returns the `tempo_eps` and `zero_centered` of a norm, the reason if Tempo has no such norm, or None if it is no
    norm."""
    name = type(module).__name__.lower()
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        if len(module.normalized_shape) != 1:
            return "it normalises over several dimensions"
        if module.weight is None:
            return "it has no weight"
        if type(module).forward is nn.LayerNorm.forward:
            return {"tempo_eps": module.eps, "zero_centered": None}
        if type(module).forward is nn.RMSNorm.forward:
            return {"tempo_eps": module.eps, "zero_centered": False}
    elif not (name.endswith("norm") or "layernorm" in name or "rmsnorm" in name) or any(module.children()):
        return None
    return _recognise_by_result(module)


def choose_keep(module: nn.Module, zero_centered: bool = False) -> str:
    """Returns what norm "auto" is: "recompute" if more channels' weights are now too small for their biases than a
    norm in place has room for, else "inplace"."""
    weight: Any = module.weight
    return "inplace" if fits_in_place(weight, getattr(module, "bias", None), zero_centered) else "recompute"


def _recognise_by_result(module: nn.Module) -> dict[str, Any] | str:
    """Finds out what a class computes by calling it on random numbers, because models write the same norm in many
    ways."""
    parameters = dict(module.named_parameters(recurse=False))
    if "weight" not in parameters or set(parameters) - {"weight", "bias"}:
        return "it has no weight, or parameters that Tempo's norms do not have"
    shape = getattr(parameters["weight"], "ds_shape", parameters["weight"].shape)
    if len(shape) != 1:
        return "its weight is no vector"
    twin = copy.copy(module)
    eps = next((value for name in _EPS_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    for each in _USUAL_EPS if eps is None else (eps,):
        generator = torch.Generator().manual_seed(1)
        made = {name: torch.rand(shape, generator=generator, dtype=torch.float32) + 0.5 for name in parameters}
        # Small enough for eps to matter, and of three dimensions, for a norm over channels is another one there.
        x = torch.randn(2, 3, *shape, generator=generator, dtype=torch.float32) * each**0.5 + each**0.5
        twin.__dict__["_parameters"] = {**module._parameters, **made}
        try:
            with torch.no_grad(), torch.device("cpu"):
                y = type(module).forward(twin, x)
        except Exception as error:  # a foreign class may raise anything
            return f"a call with one float32 tensor failed: {type(error).__name__}"
        if not isinstance(y, Tensor) or y.shape != x.shape:
            return "it does not return one tensor of its input's shape"
        size, weight, bias = x.shape[-1:], made["weight"], made.get("bias")
        results: dict[bool | None, Tensor] = {None: F.layer_norm(x, size, weight, bias, each)}
        if bias is None:
            results |= {False: F.rms_norm(x, size, weight, each), True: F.rms_norm(x, size, weight + 1.0, each)}
        for zero_centered, result in results.items():
            if torch.allclose(y, result, rtol=1e-5, atol=1e-6):
                return {"tempo_eps": each, "zero_centered": zero_centered}
    return "it computes neither LayerNorm nor RMSNorm"

"""The operations that are timed and captured in CUDA graphs. A new operation is a new entry of OPERATIONS."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, swiglu
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.squared_relu import squared_relu

KEY = 0x0123_4567_89AB_CDEF
VECTORS = ("bias", "weight", "norm_bias")
# Of the dropout probability: a function of tensors only, as torch.compile expects it.
Factory = Callable[[float], Callable[..., Any]]


class Sizes(NamedTuple):
    """[s, b] tokens, the widths of the layer, and what else a measurement depends on."""

    s: int
    b: int
    h: int
    ffn: int
    gated_ffn: int
    p: float
    dtype: torch.dtype


class Form(NamedTuple):
    """Tempo's operation in one of its forms, by what it keeps for backward."""

    keeps: str
    factory: Factory
    refills: bool = False
    """Whether its output can be dropped after forward and is computed again for backward."""


class Operation(NamedTuple):
    name: str
    inputs: tuple[str, ...]
    """x and residual [s, b, width], x_gated [s, b, 2 width], or a vector [width]."""
    width: str
    """The member of Sizes that it is."""
    forms: tuple[Form, ...]
    plain: Factory
    liger: Callable[..., Any] | None = None
    """The same by a kernel of Liger, of the same inputs; raises LookupError where the package does not have it."""
    draws: bool = False

    def tensors(self, sizes: Sizes, device: torch.device | str) -> list[Tensor]:
        """Makes random inputs, in the order of `inputs`."""
        width, found = getattr(sizes, self.width), []
        for name in self.inputs:
            if name in VECTORS:
                t = torch.randn(width, device=device) * 0.1 + (1.0 if name == "weight" else 0.0)
            else:
                t = torch.randn(sizes.s, sizes.b, width * (2 if name == "x_gated" else 1), device=device)
            found.append(t.to(sizes.dtype))
        return found


def _always(function: Callable[..., Any]) -> Factory:
    return lambda p: function


def _list_forms(tempo: Callable[..., Any]) -> tuple[Form, ...]:
    """Returns both forms of a function that takes `keep`."""
    keeping = {keep: _always(functools.partial(tempo, keep=keep)) for keep in ("inplace", "recompute")}
    return tuple(Form(keep, factory, keep == "recompute") for keep, factory in keeping.items())


def _liger(module: str, name: str, *constants: float) -> Callable[..., Tensor]:
    """Returns an autograd.Function of Liger-Kernel, of [tokens, width] and, behind the inputs, these constants."""

    def call(*tensors: Tensor) -> Tensor:
        try:
            function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
        except (ImportError, AttributeError) as error:
            raise LookupError(f"liger-kernel has no {name} here") from error
        y: Tensor = function.apply(*(t.flatten(0, -2) if t.dim() > 1 else t for t in tensors), *constants)
        return y.view(*tensors[0].shape[:-1], -1)

    return call


def _gelu(name: str, approximate: str) -> Operation:
    plain = _always(lambda x, bias: F.gelu(x + bias, approximate=approximate))
    return Operation(name, ("x", "bias"), "ffn", _list_forms(functools.partial(gelu, approximate=approximate)), plain)


def _gated(name: str, tempo: Callable[..., Any], activation: Callable[[Tensor], Tensor], liger: str) -> Operation:
    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate) * up

    form = Form("recompute", _always(tempo), refills=True)
    return Operation(name, ("x_gated",), "gated_ffn", (form,), _always(plain), _liger(name, f"LigerFusedGateUp{liger}"))


def _drop_and_add(p: float) -> Callable[..., Any]:
    return lambda x, bias, residual: bias_dropout_add(x, bias, residual, p=p, key=KEY)


OPERATIONS = [
    _gelu("gelu", "none"),
    _gelu("gelu_tanh", "tanh"),
    Operation(
        "bias_dropout_add",
        ("x", "bias", "residual"),
        "h",
        (Form("nothing", _drop_and_add),),
        lambda p: lambda x, bias, residual: residual + F.dropout(x + bias, p),
        draws=True,
    ),
    Operation(
        "layer_norm",
        ("x", "weight", "bias"),
        "h",
        _list_forms(layer_norm),
        _always(lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias)),
        _liger("layer_norm", "LigerLayerNormFunction", 1e-5),
    ),
    Operation(
        "rms_norm",
        ("x", "weight"),
        "h",
        _list_forms(rms_norm),
        _always(lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5)),
        _liger("rms_norm", "LigerRMSNormFunction", 1e-5),
    ),
    _gated("swiglu", swiglu, F.silu, "SiLUMulFunction"),
    # Liger's is the tanh form.
    _gated(
        "geglu",
        functools.partial(geglu, approximate="tanh"),
        functools.partial(F.gelu, approximate="tanh"),
        "GELUMulFunction",
    ),
    Operation(
        "squared_relu",
        ("x",),
        "ffn",
        _list_forms(squared_relu),
        _always(lambda x: F.relu(x).square()),
        _liger("relu_squared", "LigerReLUSquaredFunction"),
    ),
]

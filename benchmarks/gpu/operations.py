"""The operations of the GPU suite, one by one. A new operation is a new entry of OPERATIONS."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gpu.operation import Factory, Form, Operation, Traffic
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, swiglu
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.squared_relu import squared_relu

KEY = 0x0123_4567_89AB_CDEF


def _liger(module: str, name: str, *constants: float) -> Callable[..., Tensor]:
    """An autograd.Function of Liger-Kernel, which takes [tokens, width] and behind the inputs these constants."""

    def call(*tensors: Tensor) -> Tensor:
        try:
            function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
        except (ImportError, AttributeError) as error:
            raise LookupError(f"liger-kernel has no {name} here") from error
        y: Tensor = function.apply(*(t.flatten(0, -2) if t.dim() > 1 else t for t in tensors), *constants)
        return y.view(*tensors[0].shape[:-1], -1)

    return call


def _always(function: Callable[..., Any]) -> Factory:
    return lambda p: function


def _plain_gelu(approximate: str) -> Factory:
    return _always(lambda x, bias: F.gelu(x + bias, approximate=approximate))


def _gelu(name: str, approximate: str) -> Operation:
    return Operation(
        name,
        ("x", "bias"),
        "ffn",
        (
            Form(
                "output",
                _always(lambda x, bias: gelu(x, bias, approximate)),
                Traffic(2, 1, bits_per_element=1),
                Traffic(3, 1, bits_per_element=1),
            ),
            Form(
                "input",
                _always(lambda x, bias: gelu(x, bias, approximate, keep="recompute")),
                Traffic(2, 1),
                Traffic(3, 2),
                refill=Traffic(2, 1),
            ),
        ),
        _plain_gelu(approximate),
    )


def _gated(name: str, tempo: Callable[..., Any], activation: Callable[[Tensor], Tensor], liger: str) -> Operation:
    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate) * up

    return Operation(
        name,
        ("x_gated",),
        "gated_ffn",
        (Form("input", _always(tempo), Traffic(3), Traffic(5), refill=Traffic(3)),),
        _always(plain),
        _liger(name, f"LigerFusedGateUp{liger}"),
    )


def _squared_relu_keeping(keep: str) -> Factory:
    return _always(lambda x: squared_relu(x, keep=keep))


def _norm(
    tempo: Callable[..., Any], parameters: tuple[str, ...], plain: Callable[..., Any], liger: Callable[..., Any]
) -> Operation:
    # As many statistics of a row as parameters: mean and rstd beside weight and bias, or rstd beside weight. The form
    # that keeps its output keeps rstd only, and the parameters in float32.
    count = len(parameters)
    all_statistics, float32_parameters = 4 * count, 4 * count
    return Operation(
        tempo.__name__,
        ("x", *parameters),
        "h",
        (
            Form(
                "output",
                _always(functools.partial(tempo, keep="inplace")),
                Traffic(2, count, row_bytes=4, column_bytes=float32_parameters),
                Traffic(3, count, row_bytes=4, column_bytes=float32_parameters),
            ),
            Form(
                "input",
                _always(functools.partial(tempo, keep="recompute")),
                Traffic(2, count, all_statistics),
                Traffic(3, count + 1, all_statistics),
                refill=Traffic(2, count, all_statistics),
            ),
        ),
        _always(plain),
        liger,
    )


def _tempo_bias_dropout_add(p: float) -> Callable[..., Any]:
    return lambda x, bias, residual: bias_dropout_add(x, bias, residual, p=p, key=KEY)


def _plain_bias_dropout_add(p: float) -> Callable[..., Any]:
    return lambda x, bias, residual: residual + F.dropout(x + bias, p)


OPERATIONS = [
    _gelu("gelu", "none"),
    _gelu("gelu_tanh", "tanh"),
    Operation(
        "bias_dropout_add",
        ("x", "bias", "residual"),
        "h",
        # The residual's gradient is the output's own.
        (Form("nothing", _tempo_bias_dropout_add, Traffic(3, 1), Traffic(2, 1)),),
        _plain_bias_dropout_add,
        kept_output=None,
        draws=True,
    ),
    _norm(
        layer_norm,
        ("weight", "bias"),
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
        _liger("layer_norm", "LigerLayerNormFunction", 1e-5),
    ),
    _norm(
        rms_norm,
        ("weight",),
        lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5),
        _liger("rms_norm", "LigerRMSNormFunction", 1e-5),
    ),
    _gated("swiglu", swiglu, F.silu, "SiLUMulFunction"),
    # Liger's is the tanh form.
    _gated(
        "geglu",
        lambda x: geglu(x, approximate="tanh"),
        lambda gate: F.gelu(gate, approximate="tanh"),
        "GELUMulFunction",
    ),
    Operation(
        "squared_relu",
        ("x",),
        "ffn",
        (
            Form("output", _squared_relu_keeping("output"), Traffic(2), Traffic(3)),
            Form("input", _squared_relu_keeping("input"), Traffic(2), Traffic(3), refill=Traffic(2)),
        ),
        _always(lambda x: F.relu(x).square()),
        _liger("relu_squared", "LigerReLUSquaredFunction"),
    ),
]

"""Every activation as a function of x and bias, for tests that hold of all of them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, reglu, swiglu
from tempo_kernels.squared_relu import squared_relu

ACTIVATIONS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "gelu": gelu,
    "gelu tanh": lambda x, bias: gelu(x, bias, approximate="tanh"),
    "gelu of its input": lambda x, bias: gelu(x, bias, keep="input"),
    "squared_relu": squared_relu,
    "squared_relu of its input": lambda x, bias: squared_relu(x, bias, keep="input"),
    "swiglu": swiglu,
    "geglu": geglu,
    "reglu": reglu,
}

"""Puts the stand-ins of te_stand_ins.py where Megatron looks for the package transformer_engine.

`install()` must come before anything imports megatron.core.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from te_norm_and_attention import DotProductAttention, LayerNorm, RMSNorm
from te_stand_ins import LayerNormLinear, Linear, TransformerEngineBaseModule
from torch import Tensor
from torch.nn import functional as F

VERSION = "2.6.0"


class _Activation(torch.nn.Module):
    """An operation of `ops`; its GELU is the tanh form."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None or state.numel() == 0


class GELU(_Activation):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class SwiGLU(_Activation):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class _Absent:
    """In the place of what no test here uses."""


class _Package(types.ModuleType):
    """A module whose unknown names are classes that do nothing, as far as Megatron imports them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _TRIED:
            raise AttributeError(name)
        return _Absent


# Names that Megatron tries, with a way to do without.
_TRIED = {"_SplitAlongDim", "cpu_offload", "cpu_offload_v1", "parallel_cross_entropy", "general_gemm", "ep"}

_MODULES = (
    "common common.recipe pytorch pytorch.attention pytorch.attention.rope pytorch.constants pytorch.cpp_extensions "
    "pytorch.distributed pytorch.float8_tensor pytorch.fp8 pytorch.graph pytorch.module pytorch.module.base "
    "pytorch.ops pytorch.optimizers pytorch.tensor pytorch.tensor.utils pytorch.utils pytorch.quantization "
    "pytorch.permutation"
).split()


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def install() -> None:
    """Put the stand-in into sys.modules. Before anything imports megatron.core."""
    assert "megatron.core" not in sys.modules, "install the stand-in before megatron.core is imported"
    root = _Package("transformer_engine")
    root.__version__ = VERSION  # type: ignore[attr-defined]
    found = {"": root}
    for name in _MODULES:
        found[name] = module = _Package(f"transformer_engine.{name}")
        parent, _, last = name.rpartition(".")
        setattr(found[parent], last, module)
    for cls in (Linear, LayerNormLinear, LayerNorm, RMSNorm, DotProductAttention):
        setattr(found["pytorch"], cls.__name__, cls)
    for activation in (GELU, SwiGLU):
        setattr(found["pytorch.ops"], activation.__name__, activation)
    found["pytorch.module.base"].TransformerEngineBaseModule = TransformerEngineBaseModule  # type: ignore[attr-defined]
    for name in ("pytorch.fp8", "pytorch.quantization"):
        found[name].FP8GlobalStateManager = FP8GlobalStateManager  # type: ignore[attr-defined]
    found["pytorch.utils"].torch_version = torch.__version__  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in found.values()})
    tex = _Package("transformer_engine_torch")
    sys.modules["transformer_engine_torch"] = tex

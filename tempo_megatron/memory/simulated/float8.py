"""Lets a chunk's linears keep their inputs in float8, as Transformer Engine's do, on fake tensors.

Of each input one byte an element is kept, with a scale for all of it, for the product of the weight's gradient: as it
is, or on Hopper, whose products read along the sum only, transposed (pytorch/module/linear.py:600-620 and
tensor/float8_tensor.py:418-430 of Transformer Engine). Two linears keep what they are given, which others keep anyway,
but for delayed scaling: the projection behind attention (core/transformer/attention.py:379 of megatron-core 0.16.1) and
the first one of shared experts (moe/shared_experts.py:90). Embedding, router and output layer compute as without.

Not counted: what a product makes of its inputs and frees again, and the tokens that fill an expert's up to a multiple
of 16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from tempo_megatron.memory.simulated.experts import LocalExperts


def keep_float8_inputs(layers: Iterable[torch.nn.Module], recipe: str, *, is_fused: bool) -> None:
    """Let the linears of the layers keep float8.

    Args:
        layers: transformer layers, and those of multi-token prediction.
        recipe: Megatron's --fp8-recipe, "tensorwise" or "delayed", of one scale for a tensor.
        is_fused: whether core attention is one kernel, which keeps its output.
    """
    for layer in layers:
        keeping = _find_sharing(layer)
        for module in layer.modules():
            if isinstance(module, LocalExperts):
                module.keep_input = keep_in_float8
            elif isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                if module not in keeping:
                    _wrap(module, keeps_both=False)
                elif recipe == "delayed":
                    _wrap(module, keeps_both=is_fused or isinstance(module, ColumnParallelLinear))


def count_float8_weights(layer: torch.nn.Module) -> int:
    """Elements of the weights that a layer multiplies with in float8."""
    weights = [w for m in layer.modules() if isinstance(m, LocalExperts) for w in (m.fc1, m.fc2)]
    weights += [m.weight for m in layer.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear))]
    return sum(weight.numel() for weight in weights)


@contextlib.contextmanager
def keep_in_float8(x: Tensor, *, keeps_both: bool = False) -> Iterator[None]:
    """Keep one byte an element of `x` for whatever inside keeps it, in its place or beside it."""
    storage = x.untyped_storage()._cdata

    def pack(t: Tensor) -> Any:
        if t.untyped_storage()._cdata != storage:
            return t
        return torch.empty(t.shape, dtype=torch.uint8), t.dtype, t if keeps_both else None

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        data, dtype, _ = packed
        # The product reads float8: what stands for it here takes no memory.
        found: Tensor = torch.empty(1, dtype=dtype).expand(data.shape)
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _wrap(linear: torch.nn.Module, *, keeps_both: bool) -> None:
    forward = linear.forward

    def run(x: Tensor, *others: Any, **named: Any) -> Any:
        with keep_in_float8(x, keeps_both=keeps_both):
            return forward(x, *others, **named)

    linear.forward = run


def _find_sharing(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """The linears whose inputs are kept by others anyway: what attention keeps of its output stands for both."""
    projections = [m.get_submodule("linear_proj") for m in layer.modules() if hasattr(m, "core_attention")]
    return projections + [m.get_submodule("linear_fc1") for m in layer.modules() if isinstance(m, SharedExpertMLP)]

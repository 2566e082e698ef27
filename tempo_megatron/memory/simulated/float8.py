"""Lets a chunk's linears keep their inputs in float8, as Transformer Engine's do, on fake tensors.

Of each input one byte an element is kept, and its scales, for the product of the weight's gradient: as it is, or on
Hopper, whose products read along the sum only, transposed (pytorch/module/linear.py:690-712, layernorm_linear.py:
478-487 and tensor/float8_tensor.py:418-430 of Transformer Engine 2.20). Scales of blocks are of the copy that is kept:
a float32 for 128 elements, or a byte for 32 (get_scale_shape of tensor/float8_blockwise_tensor.py and
mxfp8_tensor.py). Two linears keep what they are given, which others keep anyway, but for delayed scaling: the
projection behind attention (core/transformer/attention.py:379 of megatron-core 0.16.1) and the first one of shared
experts (moe/shared_experts.py:90). Embedding, router and output layer compute as without.

Not counted: what a product makes of its inputs and frees again, and the tokens that fill an expert's up to a multiple
of 16.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from tempo_megatron.memory.simulated.experts import LinearsOfExperts, LocalExperts

_SCALED_BY_BLOCKS = ("blockwise", "mxfp8")
_PER_SCALE_BYTE = 32
"""Elements of an input for each byte of its scales, which in both recipes of blocks are as large."""


def count_float8_bytes(num_weights: int, recipe: str, gpu: str) -> int:
    """Of weights in float8, as they stand beside those of the run from a step's first micro batch on.

    With one scale each, before Blackwell transposed too (layernorm_linear.py:1763-1823 of
    transformer_engine/pytorch/module, tensor/float8_tensor.py:418-430, of 2.20). With scales of blocks everywhere along
    both sizes: of weights a float32 for 128 x 128 elements ("blockwise"), or a byte for 32 ("mxfp8").
    """
    if recipe == "blockwise":
        return 2 * num_weights + 2 * 4 * num_weights // 128**2
    if recipe == "mxfp8":
        return 2 * num_weights + 2 * num_weights // _PER_SCALE_BYTE
    return (1 if gpu == "gb200" else 2) * num_weights


def keep_float8_inputs(layers: Iterable[torch.nn.Module], recipe: str, *, is_fused: bool) -> None:
    """Let the linears of the layers keep float8.

    Args:
        layers: transformer layers, and those of multi-token prediction.
        recipe: Megatron's --fp8-recipe: "tensorwise" or "delayed", of one scale for a tensor, "blockwise" or "mxfp8".
        is_fused: whether core attention is one kernel, which keeps its output.
    """
    has_blocks = recipe in _SCALED_BY_BLOCKS
    for layer in layers:
        modules = [*layer.modules()]
        # Whose inputs are kept by others anyway: what attention keeps of its output stands for both.
        sharing = [m.get_submodule("linear_proj") for m in modules if hasattr(m, "core_attention")]
        sharing += [m.get_submodule("linear_fc1") for m in modules if isinstance(m, SharedExpertMLP)]
        for module in modules:
            keep = functools.partial(keep_in_float8, has_blocks=has_blocks)
            if isinstance(module, LocalExperts):
                module.keep_input = keep
            elif isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                if module in sharing and recipe == "delayed":
                    keeps_both = is_fused or isinstance(module, ColumnParallelLinear)
                    keep = functools.partial(keep_in_float8, keeps_both=keeps_both)
                if module not in sharing or recipe == "delayed":
                    module.forward = functools.partial(_run_keeping, keep, module.forward)


def _run_keeping(keep_input: Any, forward: Callable[..., Any], x: Tensor, *others: Any, **named: Any) -> Any:
    with keep_input(x):
        return forward(x, *others, **named)


def list_float8_weights(layer: torch.nn.Module) -> list[Tensor]:
    """The weights that a layer multiplies with in float8."""
    linears = ColumnParallelLinear, RowParallelLinear, LinearsOfExperts
    return [module.weight for module in layer.modules() if isinstance(module, linears)]


@contextlib.contextmanager
def keep_in_float8(x: Tensor, *, keeps_both: bool = False, has_blocks: bool = False) -> Iterator[None]:
    """Keep one byte an element of `x` for whatever inside keeps it, in its place or beside it, and scales of blocks."""
    storage = x.untyped_storage()._cdata

    def pack(t: Tensor) -> Any:
        if t.untyped_storage()._cdata != storage:
            return t
        scales = torch.empty(t.numel() // _PER_SCALE_BYTE, dtype=torch.uint8) if has_blocks else None
        return torch.empty(t.shape, dtype=torch.uint8), t.dtype, (scales, t if keeps_both else None)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        data, dtype, _ = packed
        # The product reads float8: what stands for it here takes no memory.
        return torch.empty(1, dtype=dtype).expand(data.shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield

"""Stands in for a kernel, of which it makes results and gradients and keeps what it keeps, and for a recomputation.

`DroppedOutput` recomputes an output that its users keep for backward, as Megatron's selective recomputation does.
megatron-core's CheckpointWithoutOutput (core/tensor_parallel/random.py of 0.16.1) takes the memory of the output away
and gives it back, which nobody sees who follows storages, and asks Transformer Engine whether float8 is on. Here the
users keep a place instead of a tensor. The output lives from forward to the last use of forward, and from the gradient
of what follows until its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor

Made = tuple[Any, Sequence[Tensor]]
"""A kernel's result, or several, and what it keeps."""


def stand_in(
    make: Callable[..., Made],
    *inputs: Tensor,
    differentiate: Callable[..., Sequence[Tensor]] | None = None,
) -> Tensor:
    """What `make` returns of the inputs without what is kept, on autograd's graph.

    Args:
        make: called with the inputs.
        inputs: with a gradient each.
        differentiate: called with the kept tensors and the gradients of the results, returns those of the inputs; None
            makes new tensors. It must hold no tensor, which would be kept.
    """
    result: Tensor = _StandIn.apply(make, differentiate, *inputs)
    return result


def make_column_linear(config: Any, num_inputs: int, num_outputs: int, linear: Any, **group: Any) -> Any:
    """A `linear` without bias, ColumnParallelLinear or Tempo's."""
    common = {"init_method": config.init_method, "bias": False, "gather_output": False}
    return linear(num_inputs, num_outputs, config=config, **common, **group)


def make_row_linear(config: Any, num_inputs: int, num_outputs: int, *, bias: bool) -> RowParallelLinear:
    common = {"init_method": config.output_layer_init_method, "input_is_parallel": True, "skip_bias_add": True}
    return RowParallelLinear(num_inputs, num_outputs, config=config, bias=bias, **common)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Made], differentiate: Any, *inputs: Tensor) -> Any:
        result, kept = make(*inputs)
        ctx.save_for_backward(*kept)
        ctx.differentiate, ctx.sizes = differentiate, [(x.shape, x.dtype) for x in inputs]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        if ctx.differentiate is not None:
            return (None, None, *ctx.differentiate(kept, *grads))
        return (None, None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.sizes))


class DroppedOutput:
    """One call of a function, whose outputs are dropped; where `drops` is False, they are kept as usual."""

    def __init__(self, *, drops: bool = True) -> None:
        self._drops = drops
        self._places: dict[int, int] = {}
        self.make: Callable[[], tuple[Tensor, ...]] | None = None
        """Makes the outputs again; None before the forward, and when it has."""
        self.recomputed: tuple[Tensor, ...] | None = None

    def run(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """What `function` returns, one tensor or several. Of them nothing is kept but the inputs."""
        if not self._drops:
            return function(*inputs)
        found = _Run.apply(self, function, *inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        self._places = {output.untyped_storage()._cdata: place for place, output in enumerate(outputs)}
        return found

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Inside run those who keep the outputs."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with hooks if self._drops else contextlib.nullcontext():
            yield
        self._places = {}

    def recompute_for(self, result: Tensor) -> None:
        """Recompute when the gradient of `result`, which was made of the outputs, is there."""
        if self._drops and result.requires_grad:
            result.register_hook(lambda _: self.recompute())

    def recompute(self) -> None:
        if self.recomputed is None and self.make is not None:
            self.recomputed, self.make = self.make(), None

    def _pack(self, tensor: Tensor) -> Any:
        place = self._places.get(tensor.untyped_storage()._cdata)
        return tensor if place is None else (place, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.recompute()
        assert self.recomputed is not None
        place, size, stride, offset = packed
        found: Tensor = self.recomputed[place].detach().as_strided(size, stride, offset)
        return found


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dropped: DroppedOutput, function: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.dropped = dropped
        ctx.save_for_backward(*inputs)
        ctx.inputs = None

        def recompute() -> tuple[Tensor, ...]:
            ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
            with torch.enable_grad():
                found = function(*ctx.inputs)
            return found if isinstance(found, tuple) else (found,)

        dropped.make = recompute
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.dropped.recompute()
        pairs = [pair for pair in zip(ctx.dropped.recomputed, grads, strict=True) if pair[1] is not None]
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        ctx.dropped.recomputed = None
        found, ctx.inputs = [x.grad for x in ctx.inputs], None
        return None, None, *found

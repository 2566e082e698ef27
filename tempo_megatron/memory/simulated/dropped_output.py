"""Recomputes an output that its users keep for backward, as Megatron's selective recomputation does, on fake tensors.

megatron-core's CheckpointWithoutOutput (core/tensor_parallel/random.py of 0.16.1) takes the memory of the output away
and gives it back, which nobody sees who follows storages, and asks Transformer Engine whether float8 is on. Here the
users keep a place instead of a tensor. The output lives from forward to the last use of forward, and from the gradient
of what follows until its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class DroppedOutput:
    """One call of a function, whose outputs are dropped."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._recompute: Callable[[], tuple[Tensor, ...]] | None = None
        self.recomputed: tuple[Tensor, ...] | None = None

    def run(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """What `function` returns, one tensor or several. Of them nothing is kept but the inputs."""
        found = _Run.apply(self, function, *inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        self._places = {output.untyped_storage()._cdata: place for place, output in enumerate(outputs)}
        return found

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Inside run those who keep the outputs."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._places = {}

    def recompute_for(self, result: Tensor) -> None:
        """Recompute when the gradient of `result`, which was made of the outputs, is there."""
        if result.requires_grad:
            result.register_hook(lambda _: self.recompute())

    def recompute(self) -> None:
        if self.recomputed is None and self._recompute is not None:
            self.recomputed, self._recompute = self._recompute(), None

    def note_inputs(self, recompute: Callable[[], tuple[Tensor, ...]]) -> None:
        self._recompute = recompute

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

        dropped.note_inputs(recompute)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.dropped.recompute()
        pairs = [pair for pair in zip(ctx.dropped.recomputed, grads, strict=True) if pair[1] is not None]
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        ctx.dropped.recomputed = None
        found, ctx.inputs = [x.grad for x in ctx.inputs], None
        return None, None, *found

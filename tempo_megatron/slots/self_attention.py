"""Megatron's self attention that keeps the input of its projection and neither queries nor keys nor values."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from tempo_kernels.recompute import drop
from tempo_megatron.slots.linear import LinearCall, Return, is_in_backward, replace_modules


class TempoSelfAttention(SelfAttention):
    """SelfAttention whose core attention does not keep q, k and v: the projection runs again just before its backward,
    and with it what lies between (split, norms of q and k, rotary embeddings), which is Megatron's own code.

    Exact: the same kernels on the same input. What core attention keeps beside q, k and v stays, such as its output.
    Where Megatron recomputes the layer, all of it goes anyway, and the projection runs no third time.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(output, bias) of hidden_states, as SelfAttention."""
        if not torch.is_grad_enabled() or is_in_backward():
            return super().forward(hidden_states, *args, **kwargs)
        linear_qkv = LinearCall(self.linear_qkv)
        core_attention, linear_proj = _Watched(self.core_attention), _Watched(self.linear_proj)
        attention = replace_modules(self, linear_qkv=linear_qkv, core_attention=core_attention, linear_proj=linear_proj)
        result = SelfAttention.forward(attention, hidden_states, *args, **kwargs)

        def make() -> tuple[Tensor, ...]:
            """The projection's output, q, k and v: Megatron's forward up to core attention."""
            mixed = linear_qkv.repeat()
            core_attention = _Watched(_Flatten())
            attention = replace_modules(
                self, linear_qkv=Return(*mixed), core_attention=core_attention, linear_proj=Return()
            )
            attention.checkpoint_core_attention = False
            SelfAttention.forward(attention, mixed[0], *args, **kwargs)
            return mixed[0], *core_attention.take_inputs(3)

        # What is between the projection and core attention keeps views of the projection, such as a norm of q.
        made = linear_qkv.take_output(), *core_attention.take_unwritten_inputs(3)
        drop(made, after=linear_proj.take_inputs(1), make=make)
        return result


class _Watched(torch.nn.Module):
    """A module that remembers what it was given first."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self._inputs: tuple[Any, ...] | None = None
        self._versions: list[int] = []
        self._is_taken = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_taken:
            self._inputs = args
            self._versions = [arg._version for arg in args if isinstance(arg, Tensor)]
        return self.module(*args, **kwargs)

    def take_inputs(self, num: int) -> tuple[Tensor, ...]:
        """The first `num` arguments, which it then no longer holds; what follows is not remembered."""
        inputs, self._inputs, self._is_taken = self._inputs, None, True
        assert inputs is not None
        return inputs[:num]

    def take_unwritten_inputs(self, num: int) -> tuple[Tensor, ...]:
        """As take_inputs; ValueError where one of them was written to since the module was called."""
        inputs = self.take_inputs(num)
        if any(t._version != version for t, version in zip(inputs, self._versions, strict=False)):
            raise ValueError(
                f"queries, keys or values were written to in place inside a {type(self.module).__name__}, as by a hook "
                "under no_grad, and would be made again without that; expected them as they were given; let the hook "
                'return other tensors, or set tempo.linear_qkv to "off"'
            )
        return inputs


class _Flatten(torch.nn.Module):
    """A core attention that returns its queries, in the shape of its output."""

    def forward(self, query: Tensor, *_: Any, **__: Any) -> Tensor:
        return query.flatten(2)

"""Moves what Megatron's modules keep to the host and back, as --fine-grained-activation-offloading does.

Megatron's own modules say where a group of saved tensors begins and ends. The order in which groups leave and come back
is that of core/pipeline_parallel/fine_grained_activation_offload.py (megatron-core 0.16.1) behind its first step, in
which it learns the groups; memory counts as freed when the host frees it, whatever the copying stream still does.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from tempo_megatron.memory.simulated.phases import OffloadedBytes

try:
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron
except ImportError:  # before 0.16
    megatron = None


def begin_group(is_asked: bool, x: Tensor, name: str) -> contextlib.AbstractContextManager[Tensor]:
    """A group of tensors, which those of the context are; it gives x on. Where it is not asked for there is none."""
    if not is_asked:
        return contextlib.nullcontext(x)
    found: contextlib.AbstractContextManager[Tensor] = megatron.FineGrainedActivationOffloadingInterface(True, x, name)
    return found


def end_group(x: Tensor, name: str, released: Sequence[Tensor]) -> Tensor:
    """x, behind the group that leaves, with the memory of `released`."""
    interface = megatron.FineGrainedActivationOffloadingInterface
    found: Tensor = interface.group_commit(x, name=name, forced_released_tensors=list(released))
    return found


@dataclasses.dataclass(frozen=True)
class _OnHost:
    """A saved tensor that left; of a view the whole memory."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    num_elements: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def load(self) -> Tensor:
        return torch.empty(self.num_elements, dtype=self.dtype).as_strided(self.size, self.stride, self.offset)


def _send(x: Tensor) -> _OnHost:
    """A view that is not contiguous leaves as its whole memory where it covers half of it, and else as a copy."""
    storage_size = int(x.untyped_storage().nbytes()) // x.element_size()
    if not x.is_contiguous() and 2 * x.numel() >= storage_size:
        return _OnHost(x.size(), x.stride(), int(x.storage_offset()), storage_size, x.dtype)
    stride = torch.empty(x.size(), dtype=x.dtype, device="meta").stride()
    return _OnHost(x.size(), stride, 0, x.numel(), x.dtype)


class ActivationOffload:
    """In place of Megatron's manager and of its handler of one chunk, for one micro batch of it.

    Of the micro batch whose backward is next the last group of each module is on the device: it stayed there, or came
    back while the micro batch before it ended its backward. So each backward ends with those of the next one.

    Args:
        min_size: elements that a tensor has at least which leaves.
        parameters: of the model, which stay.
        last: places of the last group of each module; of none for a run that finds them.
        turns_at_once: whether backward follows the forward, so that the last groups stay.
        loads_ahead: whether there is a micro batch whose forward is over when this one's backward ends.
        count_times: how many layers the one that runs stands for.
        release: takes a tensor's memory away.
    """

    def __init__(
        self,
        min_size: int,
        parameters: Iterable[Tensor],
        last: Collection[int],
        turns_at_once: bool,
        loads_ahead: bool,
        count_times: Callable[[], int],
        release: Callable[[Tensor], None],
    ) -> None:
        self._min_size, self._last, self._turns_at_once = min_size, last, turns_at_once
        self._loads_ahead, self._count_times, self._release = loads_ahead, count_times, release
        self._parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
        self.input_tensor: Tensor | None = None
        """The hidden states that the chunk was sent."""
        self._names: list[str] = []
        self._open: list[tuple[int, list[Any]]] = []
        self._sent: list[list[Any]] = []
        # Of the last group of each module, this micro batch's tensors and what is like the next one's.
        self._first_back: list[list[Any]] = []
        self._sent_last: list[list[_OnHost]] = []
        self._ahead: list[list[Tensor]] = []
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._host_bytes = self._ahead_bytes = 0
        self._releases_input = False

    @contextlib.contextmanager
    def manage(self) -> Iterator[None]:
        """Be Megatron's manager."""
        manager: Any = megatron.PipelineOffloadManager
        before = manager.OFFLOAD_MGR
        manager.OFFLOAD_MGR = self
        try:
            yield
        finally:
            manager.OFFLOAD_MGR = before
            self.input_tensor = None
            self._ahead.clear()

    def list_offloaded(self) -> OffloadedBytes:
        return OffloadedBytes(tuple(self._names), self._host_bytes, self._releases_input, self._ahead_bytes)

    def init_model_chunk_offload_handler(self, *_: Any, **__: Any) -> None:
        """Megatron makes a handler; there is one micro batch."""

    def mark_not_offloadable(self, _: Tensor) -> None:
        """Megatron marks the model's parameters, which are known."""

    def pop_forward_chunk(self, name: str | None = None) -> ActivationOffload:
        return self

    def cur_forward_chunk(self) -> ActivationOffload:
        return self

    def __enter__(self) -> None:
        self._hooks.append(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
        self._hooks[-1].__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.pop().__exit__()

    def on_group_start_forward(self, name: str) -> None:
        self._open.append((len(self._names), []))
        self._names.append(name)

    def on_group_commit_forward(self, released: Sequence[Tensor]) -> None:
        number, tensors = self._open.pop()
        if number in self._last:
            if self._loads_ahead:
                self._sent_last.append([_send(x) for x in tensors if self._leaves(x)])
            if self._turns_at_once:
                return
        for place, x in enumerate(tensors):
            if self._leaves(x):
                tensors[place] = _send(x)
                self._host_bytes += tensors[place].num_bytes * self._count_times()
                self._ahead_bytes += tensors[place].num_bytes * (number in self._last)
        (self._first_back if number in self._last else self._sent).append(tensors)
        for x in filter(self._leaves, released):
            self._releases_input |= self.input_tensor is not None and _share_memory(x, self.input_tensor)
            self._release(x)

    def on_group_start_backward(self) -> None:
        if self._sent:
            _load(self._sent.pop())
        elif self._sent_last:
            self._ahead.append([x.load() for x in self._sent_last.pop()])

    def begin_backward(self) -> None:
        """Bring back what came while the micro batch before this one ended its backward."""
        while self._first_back:
            _load(self._first_back.pop())

    def on_group_commit_backward(self, _: str) -> None:
        """Megatron waits for the group, which is there already."""

    def _leaves(self, x: Tensor) -> bool:
        return x.numel() >= self._min_size and x.untyped_storage()._cdata not in self._parameters

    def _pack(self, x: Tensor) -> tuple[list[Any], int]:
        tensors = self._open[-1][1]
        tensors.append(x)
        return tensors, len(tensors) - 1


def _load(tensors: list[Any]) -> None:
    tensors[:] = [x.load() if isinstance(x, _OnHost) else x for x in tensors]


def _unpack(packed: tuple[list[Any], int]) -> Tensor:
    tensors, place = packed
    x, tensors[place] = tensors[place], None
    found: Tensor = x.load() if isinstance(x, _OnHost) else x
    return found


def _share_memory(x: Tensor, other: Tensor) -> bool:
    return bool(x.untyped_storage()._cdata == other.untyped_storage()._cdata)


def leave_fused_norms(model: torch.nn.Module, *, has_latent_attention: bool) -> None:
    """Let only norms that are modules of their own send their inputs away (transformer_layer.py: the others are
    IdentityOp), which are those before latent attention and before experts."""
    for layer in model.modules():
        if isinstance(layer, TransformerLayer):
            layer.offload_attn_norm &= has_latent_attention
            layer.offload_mlp_norm &= isinstance(layer.mlp, MoELayer)

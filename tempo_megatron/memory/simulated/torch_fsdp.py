"""Makes and frees, in a chunk that is simulated, what torch's FSDP does with its weights and gradients (fully_shard).

Megatron's TorchFullyShardedDataParallel makes a unit of the embedding, of each layer and, but for its local modules, of
the output layer; the model itself has the rest (core/distributed/torch_fully_sharded_data_parallel.py:52-137 of
megatron-core 0.16.1). References are to torch 2.13, torch/distributed/fsdp/_fully_shard/. A unit's rows are padded so
that ranks divide them (_fsdp_param.py: _init_sharded_param).

- Before a unit's forward its weights are gathered into one buffer, which is copied into weights
  (_fsdp_collectives.py: foreach_all_gather and foreach_all_gather_copy_out). The buffer stays until the next unit's
  weights are there, gathered through one of its own; the weights go after the forward (_fsdp_param_group.py:
  wait_for_unshard, post_forward).
- Before its backward they are gathered again; the buffer is then free at once, and the one of the unit before it is
  made (pre_backward, _backward_prefetch). Under recomputation Megatron names that unit itself, and names the one that
  comes before it in the order of the modules, which is a table of rotary embeddings before the first layer, and before
  each layer of latent attention, so that nothing is gathered ahead there.
- Behind its backward its gradients are copied into a buffer, which stays until the next unit's, and reduced into this
  rank's part of them (post_backward; _fsdp_collectives.py: foreach_reduce). Of what gets no gradient for its input, the
  embedding and the model itself, that is at the end of backward (_fsdp_state.py: _root_post_backward_final_callback).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclasses.dataclass(eq=False)
class _Unit:
    """The parameters that are gathered together, and what is there of them beside this rank's part."""

    module: torch.nn.Module
    parameters: Sequence[Tensor]
    is_resharded: bool
    """Behind its forward."""

    gathered_ahead: _Unit | None = None
    """Under recomputation, which one is gathered while its backward runs."""

    in_backward: bool = False
    is_reduced: bool = False
    buffer: Tensor | None = None
    """Gathered, and not copied yet."""

    weights: Tensor | None = None
    place: int | None = None
    """In the order of forwards."""


class ShardedUnits:
    """What torch's FSDP has made and not freed; it hears of forwards and backwards from hooks, which it adds.

    Args:
        model: the whole one, without gradients.
        units: modules that are units, in the order of the modules; None is one without parameters.
        ranks: that share each parameter.
        is_resharded: whether weights go behind a unit's forward.
        names_ahead: whether Megatron says which unit is gathered ahead in backward.
        accumulates: whether this rank has gradients before the micro batch, to which it adds.
        numbers: id of each parameter that is several in one -> how many.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        units: Iterable[torch.nn.Module | None],
        *,
        ranks: int,
        is_resharded: bool,
        names_ahead: bool,
        accumulates: bool,
        numbers: Mapping[int, int],
    ) -> None:
        self._ranks, self._names_ahead, self._accumulates = ranks, names_ahead, accumulates
        self._numbers = numbers
        listed: set[int] = set()
        found: list[_Unit] = []
        before: _Unit | None = None
        for module in units:
            if module is None:
                before = None
                continue
            parameters = [*module.parameters()]
            listed.update(map(id, parameters))
            before = _Unit(module, parameters, is_resharded, before)
            found.append(before)
        rest = [parameter for parameter in model.parameters() if id(parameter) not in listed]
        self._units = [_Unit(model, rest, is_resharded), *found]
        self._retained: Tensor | None = None
        self._reduced_from: Tensor | None = None
        self._order: list[_Unit] = []
        self._gradients: list[Tensor] = []

    def add_hooks(self) -> None:
        for unit in self._units:
            unit.module.register_forward_pre_hook(
                lambda _, args, kwargs, unit=unit: self._begin_forward(unit, args, kwargs), with_kwargs=True
            )
            unit.module.register_forward_hook(lambda _, __, output, unit=unit: self._end_forward(unit, output))

    def list_gradients(self) -> Sequence[Tensor]:
        """This rank's parts of gradients, where it had none before the micro batch."""
        return self._gradients

    def list_buffers(self) -> list[Tensor]:
        """Weights that are gathered, and buffers."""
        of_units = (tensor for unit in self._units for tensor in (unit.buffer, unit.weights))
        return [tensor for tensor in (*of_units, self._retained, self._reduced_from) if tensor is not None]

    def end_backward(self) -> None:
        """Reduce what no input's gradient has told of."""
        for unit in self._units:
            if not unit.is_reduced:
                self._reduce(unit)
            unit.buffer = None
        self._reduced_from = None

    def _begin_forward(self, unit: _Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._gather(unit)
        self._copy_out(unit, in_forward=True)
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, spec = tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if places:
            passed = _TellBackward.apply(lambda: self._reduce(unit), *(leaves[place] for place in places))
            for place, tensor in zip(places, passed, strict=True):
                leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, spec)
        return args, kwargs

    def _end_forward(self, unit: _Unit, output: Any) -> None:
        is_again = torch._C._current_graph_task_id() != -1
        if not is_again:
            # A forward that is run again in backward leaves its weights there.
            if unit.is_resharded:
                unit.weights = None
            unit.place = len(self._order)
            self._order.append(unit)
        if unit is self._units[0] or is_again:
            # What runs again is the outermost that runs then (_fsdp_state.py: _post_forward).
            self._retained = None
        for tensor in tree_flatten(output)[0] if torch.is_grad_enabled() else ():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin_backward(unit))

    def _begin_backward(self, unit: _Unit) -> None:
        if unit.in_backward:
            return
        unit.in_backward = True
        self._gather(unit)
        self._copy_out(unit, in_forward=False)
        if self._names_ahead and unit.gathered_ahead is not None:
            self._gather(unit.gathered_ahead)
        elif (not self._names_ahead or unit in self._units[:2]) and unit.place:
            self._gather(self._order[unit.place - 1])

    def _gather(self, unit: _Unit) -> None:
        if unit.buffer is None and unit.weights is None and unit.parameters:
            # One rank copies its weights without a buffer.
            unit.buffer = _make(self._count(unit.parameters) if self._ranks > 1 else 0)

    def _copy_out(self, unit: _Unit, *, in_forward: bool) -> None:
        if unit.buffer is None:
            return
        unit.weights = _make(self._count(unit.parameters))
        if in_forward:
            # A variable has the one before for as long (prev_all_gather_state).
            self._retained = unit.buffer
        unit.buffer = None

    def _reduce(self, unit: _Unit) -> None:
        unit.is_reduced = True
        gradients = [parameter for parameter in unit.parameters if parameter.grad is not None]
        unit.weights = self._reduced_from = None
        if not gradients:
            return
        size = self._count(gradients)
        self._reduced_from = _make(size)
        # Of several ranks a variable has the last one for longer (foreach_reduce: unsharded_grad).
        last = gradients[-1].grad if self._ranks > 1 else None
        for parameter in gradients:
            parameter.grad = None
        own = _make(size // self._ranks)
        del last
        if not self._accumulates:
            self._gradients.append(own)

    def _count(self, parameters: Iterable[Tensor]) -> int:
        """Bytes of the parameters with padding."""
        return sum(
            count_padded(parameter.shape[1:], self._ranks) * number * parameter.element_size()
            if (number := self._numbers.get(id(parameter)))
            else count_padded(parameter.shape, self._ranks) * parameter.element_size()
            for parameter in parameters
        )


def count_padded(shape: Sequence[int], ranks: int) -> int:
    """Elements of a parameter whose rows are padded so that ranks divide them."""
    rows, *rest = shape
    return -(-rows // ranks) * ranks * torch.Size(rest).numel()


def _make(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


class _TellBackward(torch.autograd.Function):
    """Passes tensors through, and calls `tell` where all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.tell = tell
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.tell()
        return None, *gradients

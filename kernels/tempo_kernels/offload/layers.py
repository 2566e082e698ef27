"""Finds what the layers of a model keep for backward, and tells the engine when.

Inside of a layer its graph is read when its forward ends, and hooks are put on those saved tensors alone that move.
Hooks around the forward (saved_tensors_hooks) would see weights too: autograd.Functions would get another object in a
weight's place, without the attributes that Megatron's linear looks for, and a weight that ZeRO-3 has gathered would
stay. What `drop` has promised to make again has hooks already, and so has what a checkpointed region keeps; both stay
as they are.

A region that torch.utils.checkpoint runs again keeps its inputs in no node of the graph. Hooks around the forward see
them, whether a region has several layers, or one, or a layer makes one of its own forward. So such hooks are there from
the end of each layer to the call of the first module in the next one. A layer's input is moved by them, and everything
else stays.

Never moved are parameters, buffers, the layers' other arguments (masks, rotary positions, an encoder's output), which
the next layer needs as well, and tensors that are too small. A layer's output that the layer keeps is moved with the
next layer, whose input it is; the last one's stays.

The backward is followed by hooks on the layers' inputs: a gradient of one is complete when its layer's backward ends,
and the backward of the layer before begins.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from tempo_kernels.offload.engine import Engine, Group, Unit
from tempo_kernels.saved import Kept, check_saved, find_nodes_since, find_saved_tensors, follow_held

Moves = Callable[[str], bool]
"""Whether a layer moves what it saves in a module of this name ("" for the layer itself) first, or INPUT."""

INPUT = "input"
"""The name of the input of a layer that is recomputed as a whole."""

MIN_BYTES = 4096
"""A storage that has fewer stays."""


def move_all(_: str) -> bool:
    """Moves everything."""
    return True


class _Pass:
    """One forward of the model, and its backward.

    Args:
        context: the hooks on what is kept between the layers.
    """

    def __init__(self, context: torch.autograd.graph.saved_tensors_hooks) -> None:
        self.context = context
        self.groups: list[Group] = []
        """One for each call of a layer."""
        self.pending: dict[int, Unit] = {}
        """Units of the last group, which is not committed yet, by storage."""
        self.inputs: dict[int, StorageWeakRef] = {}
        """Of the layers so far, by storage."""
        self.outputs: tuple[int, ...] = ()
        """Storages of the last layer's outputs."""
        self.between: dict[int, list[weakref.ref[Kept]]] = {}
        """What was kept between the layers so far, by storage."""
        self.moves: Moves = move_all
        """Of the last layer."""
        self.device: torch.device | None = None
        self.units: dict[int, tuple[StorageWeakRef, weakref.ref[Unit]]] = {}
        """Every unit, by storage."""
        self.call: _Call | None = None


class _Call:
    """One call of a layer that runs.

    Args:
        given: what never moves.
        context: of the _Pass; it is left when the first module in the layer is called.
    """

    def __init__(self, given: Any, context: torch.autograd.graph.saved_tensors_hooks) -> None:
        self.first_node = torch._C._autograd._get_sequence_nr()
        self.known = {tensor.untyped_storage()._cdata for tensor in given}
        self.scopes: list[tuple[int, str]] = [(-1, "")]
        self.names: list[str] = [""]
        self.held: list[tuple[int, Kept]] = []
        self.notes = contextlib.ExitStack()
        self.notes.enter_context(follow_held(self._note))
        self._context, self._has_left_context = context, False

    def _note(self, held: Kept) -> None:
        self.held.append((torch._C._autograd._get_sequence_nr(), held))

    def enter(self, name: str) -> None:
        self.names.append(name)
        self.scopes.append((torch._C._autograd._get_sequence_nr(), name))
        if not self._has_left_context and _is_on_top(self._context):
            self._context.__exit__()
            self._has_left_context = True

    def leave(self) -> None:
        self.names.pop()
        self.scopes.append((torch._C._autograd._get_sequence_nr(), self.names[-1]))

    def end(self) -> None:
        self.notes.close()
        if self._has_left_context:
            self._context.__enter__()

    def get_name(self, number: int) -> str:
        """Returns the module that ran when autograd gave a node this sequence number."""
        return self.scopes[bisect.bisect_right(self.scopes, number, key=lambda change: change[0]) - 1][1]


class Offload:
    """Moves what layers of a model keep for backward to the host and back, until `remove` is called.

    Args:
        root: the module that calls the layers, as a block or a whole model; its forward, under a gradient, begins.
        layers: the layers in `root` -> what each moves; a layer that moves nothing may be among them, or not. All
            layers should be: a layer's forward and backward are when the others' copies are made.
        engine: the same one may serve several roots.
        ahead: how many layers' groups are copied back before the backward reaches them.
        min_bytes: a storage that has fewer stays on the device.

    Raises ValueError for a layer that is not in `root`.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Mapping[nn.Module, Moves],
        engine: Engine,
        *,
        ahead: int = 1,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        inside = set(root.modules())
        if any(layer not in inside for layer in layers):
            raise ValueError("a layer to offload is not in the model; expected modules of it; name others")
        self.engine, self._ahead, self._min_bytes = engine, ahead, min_bytes
        self._layers = layers
        self._pass: _Pass | None = None
        self._hooks = [
            root.register_forward_pre_hook(self._begin_pass),
            root.register_forward_hook(self._end_pass, always_call=True),
        ]
        for layer in layers:
            self._hooks.append(layer.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(self._end, always_call=True))
            for name, module in layer.named_modules():
                if name:
                    self._hooks.append(module.register_forward_pre_hook(functools.partial(self._note, name)))
                    self._hooks.append(
                        module.register_forward_hook(functools.partial(self._note, None), always_call=True)
                    )

    def remove(self) -> None:
        """Lets the model keep everything again; what has been moved comes back when it is needed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._pass is not None:  # KeyboardInterrupt has ended the last forward
            self._leave(self._pass)

    def _note(self, name: str | None, *_: Any) -> None:
        """Notes that a module of this name in a layer is called, or, with None, that one returns: which module saves a
        tensor."""
        if torch.compiler.is_compiling() or self._pass is None or self._pass.call is None or _is_in_backward():
            return
        if name is None:
            self._pass.call.leave()
        else:
            self._pass.call.enter(name)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _begin_pass(self, root: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or _is_in_backward():
            return
        if self._pass is not None:  # KeyboardInterrupt, which calls no hooks, has ended the last forward
            self._leave(self._pass)
        context = torch.autograd.graph.saved_tensors_hooks(self._keep_between, Kept.unpack)
        self._pass = _Pass(context)
        self.engine.release()
        context.__enter__()

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _end_pass(self, root: nn.Module, args: Any, output: Any) -> None:
        now = self._pass
        if now is None or _is_in_backward():
            return
        self._leave(now)
        if output is None:  # an exception leaves the model
            return
        for key in now.outputs:  # what comes after the layers needs them
            now.pending.pop(key, None)
        self._commit(now)
        # What leaves last is needed first, so it stays until another forward takes the memory.
        last = len(now.groups) - 1
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                self._follow_backward(tensor, now, last)

    def _leave(self, now: _Pass) -> None:
        self._pass = None
        if now.call is not None:  # something that is no Exception has left it
            now.call.notes.close()
        if _is_on_top(now.context):
            now.context.__exit__()

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _begin(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        now = self._pass
        if now is None or now.call is not None or _is_in_backward():
            return
        first = kwargs.get("hidden_states")
        given = [tensor for tensor in pytree.tree_leaves((first, args, kwargs)) if isinstance(tensor, Tensor)]
        if not given or type(given[0]) is not Tensor:  # fake tensors have no bytes to move
            return
        self.engine.choose_device(given[0])
        x, storage = given[0], given[0].untyped_storage()
        others = [tensor for tensor in given if tensor is not x]
        moves = self._layers[layer]
        # What the last layer keeps of its output is this layer's.
        carried = now.pending.pop(storage._cdata, None)
        self._commit(now)
        if x.grad_fn is not None:
            self._follow_backward(x, now, len(now.groups) - 1)
        now.groups.append(Group(layer))
        now.moves, now.device = moves, x.device
        if carried is not None and moves is not move_nothing:
            now.pending[storage._cdata] = carried
        now.inputs[storage._cdata] = StorageWeakRef(storage)
        now.call = _Call((*layer.parameters(), *layer.buffers(), *others), now.context)
        if moves(INPUT):
            for reference in now.between.pop(storage._cdata, ()):
                if (kept := reference()) is not None and kept.tensor is not None:
                    self._replace(now, kept, INPUT)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _end(self, layer: nn.Module, args: Any, output: Any) -> None:
        now = self._pass
        if now is None or now.call is None or _is_in_backward():
            return
        call, now.call = now.call, None
        call.end()
        if output is None or not torch.is_grad_enabled():
            return
        outputs = [tensor for tensor in pytree.tree_leaves(output) if isinstance(tensor, Tensor)]
        now.outputs = tuple(tensor.untyped_storage()._cdata for tensor in outputs)
        nodes = sorted(find_nodes_since(call.first_node, outputs), key=lambda node: node._sequence_nr())
        for node in nodes:
            self._move_saved(now, call, node)
        for number, held in call.held:
            if held.tensor is not None and self._may_move(now, call, held.tensor):
                self._replace(now, held, call.get_name(number))

    def _move_saved(self, now: _Pass, call: _Call, node: Any) -> None:
        """Puts hooks on what a node of a layer keeps and its layer moves."""
        name = call.get_name(node._sequence_nr())
        is_checked = False
        for saved, kept in find_saved_tensors(node):
            tensor = kept.tensor if isinstance(kept, Kept) else kept
            if tensor is None or not self._may_move(now, call, tensor):
                continue
            if not is_checked:
                check_saved(node)
                is_checked = True
            if isinstance(kept, Kept):
                self._replace(now, kept, name)
            elif (unit := self._get_unit(now, tensor, name)) is not None:
                take = unit.keep(tensor)
                saved.register_hooks(lambda _, take=take: take, lambda take: take())

    def _replace(self, now: _Pass, kept: Kept, name: str) -> None:
        assert kept.tensor is not None
        if (unit := self._get_unit(now, kept.tensor, name)) is not None:
            kept.replace(unit.keep(kept.tensor))

    def _may_move(self, now: _Pass, call: _Call | None, tensor: Tensor) -> bool:
        if (
            type(tensor) is not Tensor  # a parameter, or a subclass with a storage of its own
            or tensor.device != now.device
            or tensor.layout is not torch.strided
            or (tensor.requires_grad and tensor.grad_fn is None)  # a leaf
            or tensor.is_conj()
            or tensor.is_neg()
            or not tensor.numel()
        ):
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._min_bytes and (call is None or storage._cdata not in call.known)

    def _get_unit(self, now: _Pass, tensor: Tensor, name: str) -> Unit | None:
        """Returns the unit that moves a tensor; makes one if there is none and the layer moves what a module of this
        name saves."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = now.units.get(key)
        unit = None if found is None or found[0].expired() else found[1]()
        if unit is not None and unit.include(tensor):
            return unit
        if not now.moves(name):
            return None
        unit = Unit(self.engine, tensor, name)
        now.units[key], now.pending[key] = (StorageWeakRef(storage), weakref.ref(unit)), unit
        return unit

    def _commit(self, now: _Pass) -> None:
        """Begins to move what the last layer keeps out, and lets go of what the layer before has moved."""
        if now.pending:
            now.groups[-1].add(now.pending.values())
            now.pending.clear()
            self.engine.commit(now.groups[-1])
        self.engine.release(but=now.groups[-1:])

    def _keep_between(self, tensor: Tensor) -> Kept:
        """Keeps a tensor that is saved between the layers; autograd does not check whether it was written to since."""
        kept, now = Kept(tensor, "which is needed for backward"), self._pass
        if now is None or type(tensor) is not Tensor:
            return kept
        key = tensor.untyped_storage()._cdata
        reference = now.inputs.get(key)
        if reference is not None and not reference.expired():
            if now.moves(INPUT) and self._may_move(now, None, tensor):
                self._replace(now, kept, INPUT)
        else:
            now.between.setdefault(key, []).append(weakref.ref(kept))
        return kept

    def _follow_backward(self, tensor: Tensor, now: _Pass, last: int) -> None:
        groups, engine, ahead = now.groups, self.engine, self._ahead

        def reach(_: Tensor) -> None:
            """The backward of the call numbered `last` begins."""
            engine.release(but=groups)
            for group in reversed(groups[max(0, last - ahead) : last + 1]):
                group.load()

        tensor.register_hook(reach)


def move_nothing(_: str) -> bool:
    return False


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_on_top(context: torch.autograd.graph.saved_tensors_hooks) -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0] is context.pack_hook

"""Names the operations of a model: which one runs, which one made a node of autograd, and what its graph keeps."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tempo_kernels.saved import find_nodes_since, find_saved_tensors
from tempo_megatron.memory.tape.tape import Tape
from tempo_megatron.settings.operations import DISPATCHER, MASK, OPERATIONS, STACKS

_Output = TypeVar("_Output")
ACCUMULATION = "gradient accumulation"
# AccumulateGrad has the highest sequence number.
_NO_OPERATION = 2**63
_BDA = OPERATIONS["dropout"].slots
# In the order in which a mixture of experts calls them.
_OF_DISPATCHERS = (
    *("dispatch_preprocess", "token_dispatch", "dispatch_postprocess"),
    *("combine_preprocess", "token_combine", "combine_postprocess"),
)


@dataclasses.dataclass(frozen=True)
class SavedStorage:
    """One storage that autograd keeps alive, under the operation that saved it first."""

    operation: str
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_on_host: bool = False
    """Whether offload has moved it there."""


class Scopes:
    """Notes which operation runs: the innermost module, or what is no module and has a name all the same.

    These are bias-dropout-add functions, dispatchers of experts and attention masks. The run is not changed.

    Args:
        models: the names of their modules become the names of operations.
        exclude: tensors whose storages `list_saved` does not count, such as the micro batch's. Parameters and buffers
            do not count either: they exist anyway.
    """

    def __init__(self, *models: Any, exclude: Iterable[Tensor] = ()) -> None:
        self._models = models
        self._scopes: list[str] = [""]
        # (sequence number of autograd's next node, operation), where the operation changed.
        self._changes: list[tuple[int, str]] = [(-1, "")]
        known = (*(t for model in models for t in (*model.parameters(), *model.buffers())), *exclude)
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._owners: dict[int, str] = {}
        self._is_in_forward = False
        self._tape = Tape()

    @property
    def operation(self) -> str:
        """The operation that runs now; empty outside of submodules."""
        return self._scopes[-1]

    def list_saved(self, outputs: Iterable[Tensor]) -> list[SavedStorage]:
        """The distinct storages that the graph behind `outputs` holds, each under the operation whose node is first."""
        nodes = sorted(find_nodes_since(0, outputs), key=lambda node: node._sequence_nr())
        storages: dict[int, SavedStorage] = {}
        for node in nodes:
            for _, held in find_saved_tensors(node):
                if not isinstance(held, Tensor) or isinstance(held, torch.nn.Parameter):
                    continue
                if held.dim() == 0 and held.dtype in (torch.int64, torch.float64):
                    continue  # a Python number, for which torch has such a tensor in the host's memory
                storage = held.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in storages:
                    owner = self._owners.get(storage._cdata) or self._find_operation(node)
                    storages[storage._cdata] = SavedStorage(owner, storage.nbytes(), held.dtype, tuple(held.shape))
        return list(storages.values())

    def find_place(self) -> tuple[str, str]:
        """The phase and the operation that run now; in backward it is the operation that made autograd's node."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ("forward" if self._is_in_forward else "", self.operation)
        self._tape.begin("backward")
        if self.operation:
            return "recomputation", self.operation
        if node._sequence_nr() >= _NO_OPERATION:
            return "backward", ACCUMULATION
        return "backward", self._find_operation(node)

    @contextlib.contextmanager
    def follow(self, tape: Tape | None = None, note_gradient: Callable[[Tensor], None] | None = None) -> Iterator[None]:
        """Note inside this context which operation runs.

        Args:
            tape: is told where the forward of a model begins and ends, and where a backward begins.
            note_gradient: is called with each parameter whose gradient is complete.
        """
        self._tape = tape or self._tape
        trained = (p for model in self._models for p in model.parameters() if p.requires_grad and note_gradient)
        hooks: list[Any] = [p.register_post_accumulate_grad_hook(note_gradient) for p in trained]
        with contextlib.ExitStack() as undo:
            for model in self._models:
                for stack in STACKS:
                    if (block := getattr(model, stack, None)) is not None:
                        hooks.append(block.register_forward_pre_hook(self._claim_masks, with_kwargs=True))
                for name, module in model.named_modules():
                    self._name_functions(name, module, undo)
                    if name:  # the root module has no name: whatever runs outside of submodules belongs to it
                        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)))
                        hooks.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
                hooks.append(model.register_forward_pre_hook(lambda *_: self._begin_forward()))
                hooks.append(model.register_forward_hook(lambda *_: self._end_forward(), always_call=True))
            for hook in hooks:
                undo.callback(hook.remove)
            yield

    def _name_functions(self, name: str, module: Any, undo: contextlib.ExitStack) -> None:
        for slot in _BDA:
            if not isinstance(get_function := getattr(module, slot, None), (torch.nn.Module, type(None))):
                setattr(module, slot, functools.partial(self._name_results, f"{name}.{slot}", get_function))
                undo.callback(setattr, module, slot, get_function)
        dispatcher = getattr(module, DISPATCHER, None)
        if dispatcher is not None:
            stock, operation = type(dispatcher), f"{name}.{DISPATCHER}"
            # A class, since a dispatcher may be copied.
            methods = {each: self._run(operation)(getattr(stock, each)) for each in _OF_DISPATCHERS}
            dispatcher.__class__ = type(stock.__name__, (stock,), methods)
            undo.callback(setattr, dispatcher, "__class__", stock)

    def _claim_masks(self, _: Any, __: Any, keywords: dict[str, Any]) -> None:
        for name in ("attention_mask", "context_mask"):
            if (mask := keywords.get(name)) is not None:
                self._owners[mask.untyped_storage()._cdata] = MASK

    def _name_results(self, operation: str, get_function: Any, *args: Any) -> Any:
        return self._run(operation)(get_function(*args))

    @contextlib.contextmanager
    def _run(self, operation: str) -> Iterator[None]:
        self._enter(operation)
        try:
            yield
        finally:
            self._leave()

    def _begin_forward(self) -> None:
        if not self._is_in_forward and torch._C._current_autograd_node() is None:
            self._is_in_forward = True
            self._tape.begin("forward")

    def _end_forward(self) -> None:
        if self._is_in_forward:
            self._is_in_forward = False
            self._tape.forward_ends.append(self._tape.num_steps)

    def _enter(self, name: str) -> None:
        self._scopes.append(name)
        self._changes.append((torch._C._autograd._get_sequence_nr(), name))

    def _leave(self) -> None:
        self._scopes.pop()
        self._changes.append((torch._C._autograd._get_sequence_nr(), self.operation))

    def _find_operation(self, node: Any) -> str:
        """The operation that ran when autograd made this node, by its sequence number."""
        number = node._sequence_nr()
        return self._changes[bisect.bisect_right(self._changes, number, key=lambda change: change[0]) - 1][1]


def record_saved(
    model: Any, forward: Callable[[], _Output], exclude: Iterable[Tensor] = ()
) -> tuple[_Output, list[SavedStorage]]:
    """What `forward` of a model returns, and the storages that its graph holds, as `Scopes.list_saved` returns them."""
    scopes = Scopes(model, exclude=exclude)
    with scopes.follow():
        output = forward()
    return output, scopes.list_saved(t for t in tree_leaves(output) if isinstance(t, Tensor))

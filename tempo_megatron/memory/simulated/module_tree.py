"""Says which modules of a chunk made what one micro batch keeps for backward, and what attention holds inside."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tempo_megatron.memory.storages import MadeStorage, PeakBytes


@dataclasses.dataclass(frozen=True)
class ModuleMemory:
    """A module, or several layers alike, and the modules in it."""

    name: str
    """Its own name, or of layers their numbers from 0 over the whole model: `4-7`."""

    times: int
    """How many layers alike it stands for."""

    kept_bytes: int
    """Of one of them: what it and the modules in it made, and one micro batch keeps from forward to backward."""

    workspace_bytes: int
    """Of the attention in one of them: what it holds inside itself at most, beside its results."""

    num_parameters: int
    """Of one of them, on one rank."""

    children: tuple[ModuleMemory, ...] = ()


@dataclasses.dataclass(eq=False)
class _MadeByModule(MadeStorage):
    module: str


class Makers(PeakBytes):
    """Notes of each storage, and of attention's workspaces, which module of a model made it: the innermost one whose
    forward runs, or ran where its backward does."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__(*known)
        self._running = [""]
        self.workspaces: dict[str, int] = collections.Counter()
        """Name of a module -> the most that a call of its attention held inside itself."""

    def watch(self, model: torch.nn.Module) -> None:
        """Name modules as `model.named_modules()`."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name), prepend=True)
            module.register_forward_hook(lambda *_: self._finish())

    def _finish(self) -> None:
        self._running.pop()

    def describe(self, storage: torch.UntypedStorage, inputs: Any) -> MadeStorage:
        made = super().describe(storage, inputs)
        return _MadeByModule(made.reference, made.num_bytes, made.number, self._running[-1])

    def note_workspaces(self, num_bytes: int, level: int, kept: Tensor | None) -> None:
        made = None if kept is None else self._alive.get(kept.untyped_storage()._cdata)
        name = made.module if isinstance(made, _MadeByModule) else self._running[-1]
        self.workspaces[name] = max(self.workspaces[name], num_bytes)

    def sum_by_module(self) -> dict[str, int]:
        """Name of a module -> bytes that are alive now."""
        self.drop_freed()
        found: dict[str, int] = collections.Counter()
        for made in self._alive.values():
            assert isinstance(made, _MadeByModule)
            found[made.module] += made.num_bytes
        return found


def build_tree(
    module: torch.nn.Module,
    kept: Mapping[str, int],
    workspaces: Mapping[str, int],
    layers: Mapping[int, Sequence[tuple[int, int]]],
    *,
    name: str = "",
    path: str = "",
    counted: set[int] | None = None,
) -> ModuleMemory:
    """The tree of a module; what neither keeps anything nor has parameters is left out.

    Args:
        module: the chunk's model, or a module in it.
        kept, workspaces: of `Makers`.
        layers: id of a ModuleList -> (number of the first, how many) of the layers that each of its modules is.
        name, path: of the module itself, and with those around it.
        counted: ids of parameters that count elsewhere: one of several modules, as of tied embeddings, counts once.
    """
    counted = set() if counted is None else counted
    own = {id(p): p.numel() for p in module.parameters(recurse=False) if id(p) not in counted}
    counted.update(own)
    children = [
        build_tree(child, kept, workspaces, layers, name=each, path=f"{path}.{each}" if path else each, counted=counted)
        for each, child in module.named_children()
    ]
    if id(module) in layers:
        children = _merge(children, layers[id(module)])
    total = kept.get(path, 0) + sum(child.times * child.kept_bytes for child in children)
    number = sum(own.values()) + sum(child.times * child.num_parameters for child in children)
    held = max([workspaces.get(path, 0), *(child.workspace_bytes for child in children)])
    used = tuple(child for child in children if child.kept_bytes or child.num_parameters)
    return ModuleMemory(name, 1, total, held, number, used)


def _merge(children: Sequence[ModuleMemory], numbers: Sequence[tuple[int, int]]) -> list[ModuleMemory]:
    """Layers, those next to one another that are alike as one."""
    found: list[tuple[int, ModuleMemory]] = []
    for child, (first, times) in zip(children, numbers, strict=True):
        if found and dataclasses.replace(found[-1][1], times=1) == dataclasses.replace(child, name=""):
            first, times = found[-1][0], found[-1][1].times + times
            found.pop()
        found.append((first, dataclasses.replace(child, name="", times=times)))
    return [
        dataclasses.replace(each, name=str(first) if each.times == 1 else f"{first}-{first + each.times - 1}")
        for first, each in found
    ]

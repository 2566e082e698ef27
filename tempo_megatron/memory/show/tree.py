"""The breakdown of `estimate --tree`: which module made what one micro batch of a stage keeps, and its workspaces."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

from tempo_megatron.memory.routing import assume_routing
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk import count_by_module

_WIDTH = 54


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
    """Of the attention in one of them: the most that a call holds inside itself, beyond its results."""
    num_parameters: int
    """Of one of them, on one rank."""
    children: tuple[ModuleMemory, ...] = ()


def list_trees(run: Run, stage: int) -> list[ModuleMemory]:
    """One tree for each chunk of a stage, in the order of the model."""
    run, chunks = assume_routing(run, stage), zip(run.list_chunks(stage), run.list_ends(stage), strict=True)
    return [list_modules(run, layers, **ends) for layers, ends in chunks]


def list_modules(run: Run, layers: range, **ends_given: bool) -> ModuleMemory:
    """The tree of a chunk; what neither keeps anything nor has parameters is left out.

    Its arguments are those of `memory.simulated.chunk.simulate_chunk`.
    """
    found = count_by_module(run, layers, **ends_given)
    # A module in two places, as a T5's position embeddings, has the name of the first.
    modules = {name for name, _ in found.model.named_modules()}

    def name_module(operation: str) -> str:
        """An operation that is no module belongs to the module around it."""
        while operation not in modules:
            operation = operation.rpartition(".")[0]
        return operation

    kept, held = collections.Counter[str](), collections.Counter[str]()
    for operation, num_bytes in found.kept.items():
        kept[name_module(operation)] += num_bytes
    for operation, num_bytes in found.workspaces.items():
        held[name_module(operation)] = max(held[name_module(operation)], num_bytes)
    # Ids of parameters: one of several modules, as of tied embeddings, counts once.
    counted: set[int] = set()

    def build(module: torch.nn.Module, name: str, path: str) -> ModuleMemory:
        own = {id(p): p.numel() for p in module.parameters(recurse=False) if id(p) not in counted}
        counted.update(own)
        children = [build(child, each, f"{path}.{each}".lstrip(".")) for each, child in module.named_children()]
        if id(module) in found.layers:
            children = _merge(children, found.layers[id(module)])
        return ModuleMemory(
            name,
            1,
            kept[path] + sum(child.times * child.kept_bytes for child in children),
            max([held[path], *(child.workspace_bytes for child in children)]),
            sum(own.values()) + sum(child.times * child.num_parameters for child in children),
            tuple(child for child in children if child.kept_bytes or child.num_parameters),
        )

    return build(found.model, "", "")


def _merge(children: Sequence[ModuleMemory], numbers: Sequence[tuple[int, int]]) -> list[ModuleMemory]:
    """Layers, those next to one another that are alike as one."""
    found = []
    counted = zip((dataclasses.replace(child, name="") for child in children), numbers, strict=True)
    for alike, layers in itertools.groupby(counted, key=lambda each: each[0]):
        firsts, times = zip(*(number for _, number in layers), strict=True)
        first, last = firsts[0], firsts[0] + sum(times) - 1
        name = f"{first}" if first == last else f"{first}-{last}"
        found.append(dataclasses.replace(alike, name=name, times=sum(times)))
    return found


def format_trees(title: str, trees: list[ModuleMemory]) -> str:
    """A table; a number of layers alike stands in front of what one of them has."""
    lines = [
        title,
        f"{'MiB that one micro batch keeps for backward':<{_WIDTH}}{'kept':>12}{'workspaces':>12}{'parameters':>16}",
    ]
    for place, tree in enumerate(trees):
        name = "model" if len(trees) == 1 else f"chunk {place}"
        lines += [
            f"{'  ' * depth + label:<{_WIDTH}}{kept / 2**20:>12.2f}{held / 2**20:>12.2f}{number:>16,}"
            for depth, label, kept, held, number in _list_rows(tree, name, 0)
        ]
    return "\n".join(lines)


def _list_rows(tree: ModuleMemory, label: str, depth: int) -> Iterator[tuple[int, str, int, int, int]]:
    yield depth, label, tree.kept_bytes, tree.workspace_bytes, tree.num_parameters
    own = tree.kept_bytes
    for child in tree.children:
        name = f"{child.name}, each of {child.times}" if child.times > 1 else child.name
        yield from _list_rows(child, name, depth + 1)
        own -= child.times * child.kept_bytes
    if own and tree.children:
        yield depth + 1, "itself", own, 0, 0

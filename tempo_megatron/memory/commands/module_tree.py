"""The breakdown of `estimate --tree`: chunks of a pipeline stage, their layers, and the modules of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tempo_megatron.memory.routing import assume_routing
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk import list_modules
from tempo_megatron.memory.simulated.module_tree import ModuleMemory

_WIDTH = 54


def list_trees(run: Run, stage: int) -> list[ModuleMemory]:
    """One tree for each chunk of a stage, in the order of the model.

    Raises ValueError as `memory.rank.estimate.estimate_ranks`, which has run before.
    """
    run, chunks = assume_routing(run, stage), run.list_chunks(stage)
    ends = run.list_ends(stage)
    return [list_modules(run, layers, **beside) for layers, beside in zip(chunks, ends, strict=True)]


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


def describe_tree(tree: ModuleMemory) -> dict[str, Any]:
    """As JSON has it, in bytes."""
    return {
        "name": tree.name,
        "times": tree.times,
        "kept_bytes": tree.kept_bytes,
        "workspace_bytes": tree.workspace_bytes,
        "num_parameters": tree.num_parameters,
        "children": [describe_tree(child) for child in tree.children],
    }

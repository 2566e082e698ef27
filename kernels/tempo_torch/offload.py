"""Finds the layers of a model, which move what they keep for backward to the host, for the `offload` of `tempoize`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn

from tempo_kernels.offload import INPUT, Engine, Moves, Offload, move_all

_LAYER = "layer"
"""Names what a layer keeps outside of its modules."""


def offload_layers(model: nn.Module, value: str, ahead: int) -> list[Offload]:
    """Lets the layers of a model move what `value` says, and copies back `ahead` layers early; returns what moves it.

    Raises ValueError for a model without such layers, and for a name that none of them has.
    """
    if value == "off":
        return []
    stacks = list(_find_stacks(model))
    if not stacks:
        raise ValueError(
            f'offload is "{value}", and {type(model).__name__} has no nn.ModuleList of several layers; expected one; '
            'set offload to "off"'
        )
    moves: Moves = move_all if value == "all" else _read_names(value, stacks)
    engine = Engine(num_groups=sum(len(layers) for _, layers in stacks))
    return [Offload(root, dict.fromkeys(layers, moves), engine, ahead=ahead) for root, layers in stacks]


def _moves_some(names: frozenset[str], name: str) -> bool:
    """Returns whether a module `name` of a layer, or one that it is in, is among `names`."""
    name = name or _LAYER
    return any(name == each or name.startswith(f"{each}.") for each in names)


def _read_names(value: str, stacks: list[tuple[nn.Module, list[nn.Module]]]) -> Moves:
    names = frozenset(str(value).split("+"))
    known = {name for _, layers in stacks for layer in layers for name, _ in layer.named_modules() if name}
    for name in sorted(names - {INPUT, _LAYER} - known):
        raise ValueError(
            f'offload has "{name}", which is no module of a layer; expected "off", "all", or names joined by "+", '
            f"such as {', '.join(sorted(known)[:3])}, {INPUT} (of a checkpointed layer) or {_LAYER} (outside of its "
            "modules)"
        )
    return partial(_moves_some, names)


def _find_stacks(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yields (the module that calls them, layers) of the outermost nn.ModuleLists of several layers, as models of
    transformers have them; of several in one module the layers of all."""
    found: list[nn.Module] = []
    for child in module.children():
        layers = list(child) if isinstance(child, nn.ModuleList) else []
        if len(layers) > 1 and all(next(layer.parameters(), None) is not None for layer in layers):
            found.extend(layers)
        else:
            yield from _find_stacks(child)
    if found:
        yield module, found

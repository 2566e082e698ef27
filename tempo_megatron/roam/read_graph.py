"""Reads a StepGraph from a traced step: which node makes, reads and writes which storage."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from tempo_kernels.opaque import Opaque
from tempo_megatron.memory.simulated.device import PLACES, describe_sizes, on_device
from tempo_megatron.memory.tape.follower import Follower, count_span, count_storage_bytes
from tempo_megatron.roam.graph import Operation, StepGraph, count_bytes
from tempo_megatron.roam.refusals import BatchStructure

# These write to running statistics although their schemas do not say so: the indices of the statistics among the
# arguments, and of the flag that switches the writing on.
_WRITE_STATISTICS = {"aten::native_batch_norm": ((3, 4), 5), "aten::cudnn_batch_norm": ((3, 4), 5)}


# Namespaces of collectives, which keep their order, because all ranks must call them in the same one.
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


@dataclasses.dataclass(frozen=True)
class Update:
    """The update of one parameter by the optimizer, as metadata of its node."""

    parameter: str
    placeholder: fx.Node
    scratch_bytes: int
    state_bytes: int


@dataclasses.dataclass(frozen=True)
class CapturedStep:
    """A step as a module that runs, and as a graph to order."""

    module: fx.GraphModule
    """Takes parameters, buffers and the micro batch's tensors, each tensor once; returns the loss, and the gradients
    where no optimizer uses them."""
    graph: StepGraph
    nodes: tuple[tuple[fx.Node, ...], ...]
    """For each operation of the graph its call, then the views of the call's results."""
    standing_bytes: int
    """Bytes that exist before and after: parameters, buffers, optimizer states, constants and the micro batch."""
    batch: BatchStructure = dataclasses.field(default_factory=lambda: BatchStructure(()))
    """The structure of the micro batch."""
    recomputes_draws: bool = False
    """Whether backward draws new random numbers, where eager mode would repeat those of forward."""

    def make_eager_graph(self) -> StepGraph:
        """Makes the graph of an eager step, which keeps every gradient until the step is over."""
        operations = zip(self.graph.operations, self.nodes, strict=True)
        gradients = {s for operation, nodes in operations if nodes[0].meta.get("update") for s in operation.reads}
        return dataclasses.replace(self.graph, kept=self.graph.kept | gradients)

    def count_eager_bytes(self) -> list[int]:
        """Counts the bytes that are alive at each operation of an eager step."""
        return count_bytes(self.make_eager_graph(), range(len(self.nodes)))


class StepReader:
    """Reads the storages of a module's nodes from their fake tensors `val`, which share storages as real ones will.

    Args:
        module: the traced step.
        opaque: operations of tempo_kernels by name, whose scratch memory is measured.
    """

    def __init__(self, module: fx.GraphModule, opaque: dict[str, Opaque]) -> None:
        self._module, self._opaque = module, opaque
        self._numbers = dict[int, int]()
        self._sizes = list[int]()
        self._standing = set[int]()
        self._operations = list[Operation]()
        self._nodes = list[list[fx.Node]]()
        self._places = dict[fx.Node, int]()
        self._last_random: int | None = None
        self._last_collective: int | None = None
        self._scratch = dict[Any, int]()

    def read(self) -> CapturedStep:
        """Returns the captured step.

        Raises ValueError if a storage was resized during the trace, for a sparse tensor, and for mkldnn's recurrent
        layers.
        """
        kept = set[int]()
        for node in self._module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                if node.op == "get_attr":
                    node.meta.setdefault("val", getattr(self._module, node.target))
                self._standing.update(self._number(node))
            elif node.op == "output":
                kept.update(s for each in node.all_input_nodes for s in self._number(each))
            elif self._joins(node):
                place = self._places[node] = self._places[node.all_input_nodes[0]]
                self._nodes[place].append(node)
            else:
                self._operations.append(self._read_node(node))
                self._places[node] = len(self._nodes)
                self._nodes.append([node])
        graph = StepGraph(tuple(self._operations), tuple(self._sizes), frozenset(kept | self._standing))
        return CapturedStep(
            self._module,
            graph,
            tuple(map(tuple, self._nodes)),
            sum(self._sizes[storage] for storage in self._standing),
        )

    def _joins(self, node: fx.Node) -> bool:
        """Whether a node is a view or a part of one operation's results, and so runs with that operation."""
        inputs = node.all_input_nodes
        if len(inputs) != 1 or inputs[0] not in self._places:
            return False
        if is_part(node):
            return True
        known = {t.untyped_storage()._cdata for t in list_tensors(inputs[0])}
        return (
            not list_written(node)
            and all(t.untyped_storage()._cdata in known for t in list_tensors(node))
            and bool(list_tensors(node))
        )

    def _read_node(self, node: fx.Node) -> Operation:
        if update := node.meta.get("update"):
            return self._read_update(node, update)
        _check_workspace(node)
        writes = {s for each in list_written(node) for s in self._number(each)}
        reads = {s for each in node.all_input_nodes for s in self._number(each)} - writes
        known = len(self._sizes)
        made = [s for s in self._number(node) if s >= known]
        # Storages do not tell of views of parameters, which make none and yet exist only after their node has run.
        after = sorted({self._places[each] for each in node.all_input_nodes if each in self._places})
        if is_random(node):
            after += [self._last_random] if self._last_random is not None else []
            self._last_random = len(self._operations)
        if _get_name(node).partition("::")[0] in _COLLECTIVES:
            after += [self._last_collective] if self._last_collective is not None else []
            self._last_collective = len(self._operations)
        return Operation(
            name=node.name,
            makes=tuple(made),
            reads=tuple(sorted(reads)),
            writes=tuple(sorted(writes)),
            after=tuple(after),
            scratch_bytes=self._count_scratch(node),
        )

    def _read_update(self, node: fx.Node, update: Update) -> Operation:
        state = len(self._sizes)
        self._sizes.append(update.state_bytes)
        self._standing.add(state)
        return Operation(
            name=f"update of {update.parameter}",
            reads=tuple(s for each in node.all_input_nodes for s in self._number(each)),
            after=tuple(self._places[each] for each in node.all_input_nodes if each in self._places),
            writes=(*self._number(update.placeholder), state),
            scratch_bytes=update.scratch_bytes,
        )

    def _number(self, node: fx.Node) -> list[int]:
        """Returns the indices of a node's storages; new storages get new indices."""
        found = []
        for t in list_tensors(node):
            if t.layout != torch.strided:
                raise ValueError(
                    f"{node.name} makes a tensor of layout {t.layout}; expected torch.strided ones only (of "
                    "embeddings: sparse=False)"
                )
            storage = t.untyped_storage()
            if storage._cdata not in self._numbers:
                if storage.nbytes() < count_span(t):
                    raise ValueError(
                        f"{node.name} makes a storage that is resized later, which the graph does not show; expected "
                        'operations that leave storages as they are (of Tempo: no "recompute")'
                    )
                self._numbers[storage._cdata] = len(self._sizes)
                self._sizes.append(storage.nbytes())
            found.append(self._numbers[storage._cdata])
        return list(dict.fromkeys(found))

    def _count_scratch(self, node: fx.Node) -> int:
        """Measures on fake tensors what an operation of tempo_kernels holds inside beside its results."""
        space, _, name = _get_name(node).partition("::")
        if space != "tempo_kernels" or name not in self._opaque:
            return 0
        args: Any = fx.map_arg(node.args, lambda each: each.meta["val"])
        names = (argument.name for argument in node.target._schema.arguments)  # type: ignore[union-attr]
        sizes = [value for argument, value in zip(names, args, strict=True) if argument not in PLACES]
        key = name, describe_sizes(sizes)
        if key not in self._scratch:
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            with (
                tensors[0].fake_mode,  # type: ignore[attr-defined]
                torch.no_grad(),
                Follower(*tensors) as seen,
                on_device("cpu", seen),
            ):
                results, rise = seen.measure(lambda: self._opaque[name].call(*args))
            self._scratch[key] = max(0, rise - count_storage_bytes(results))
        return self._scratch[key]


def is_part(node: fx.Node) -> bool:
    """Whether a node takes one result of an operation that has several."""
    return getattr(node.target, "__name__", "") == "getitem"


def list_written(node: fx.Node) -> list[fx.Node]:
    """Lists the arguments that a node changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    found = list[Any]()
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(node.args[place] if place < len(node.args) else node.kwargs.get(argument.name))
    places, training = _WRITE_STATISTICS.get(schema.name, ((), 0))
    if places and node.args[training]:
        found += [node.args[place] for place in places]
    return [each for each in tree_leaves(found) if isinstance(each, fx.Node)]


def get_arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of an operation by the names of its schema."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _check_workspace(node: fx.Node) -> None:
    """Raises ValueError for an operation that keeps more for backward than its fake kernel shows."""
    if _get_name(node) == "aten::mkldnn_rnn_layer":
        raise ValueError(
            f"{node.name} keeps a workspace of which a trace sees nothing; expected recurrent layers without mkldnn "
            "(torch.backends.mkldnn.flags(enabled=False))"
        )


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _get_name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema else str(node.target)


def list_tensors(node: fx.Node) -> list[Tensor]:
    """Lists the fake tensors that a node results in."""
    return [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]

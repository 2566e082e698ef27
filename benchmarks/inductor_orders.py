"""Finds the orders that Inductor's own memory pass would choose for a graph of ours, for comparison.

`torch._inductor.memory` orders the nodes of Inductor's scheduler by three list schedules. These read only a few fields
of a node, so operations of any graph can take the place of nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch._inductor import memory

from tempo_megatron.roam.graph import StepGraph


@dataclasses.dataclass(eq=False)
class _Buffer:
    name: str
    mpi_buffer: memory.MemoryPlanningInfoForBuffer

    def get_name(self) -> str:
        return self.name


@dataclasses.dataclass(eq=False)
class _Node:
    outputs: list[_Buffer]
    unmet_dependencies: list[_Buffer]
    mpi_node: memory.MemoryPlanningInfoForNode

    def get_outputs(self) -> Sequence[_Buffer]:
        return self.outputs

    def get_buffer_names(self) -> list[str]:
        return [buffer.name for buffer in self.outputs]


def count_inductor_peak(graph: StepGraph) -> int:
    """Returns the peak of the best of Inductor's orders, including the given one."""
    return min(max(graph.count_bytes(order)) for order in list_inductor_orders(graph))


def list_inductor_orders(graph: StepGraph) -> Iterator[Sequence[int]]:
    """Yields the given order, and those of topological_sort_lpmf, _bfs and _dfs."""
    yield range(len(graph.operations))
    nodes = [
        _Node([], [], memory.MemoryPlanningInfoForNode(index=place, size=made))
        for place, made in enumerate(graph.made_bytes)
    ]
    outputs = set[str]()
    buffers, inputs = dict[str, _Buffer](), dict[str, memory.FreeableInputBuffer]()

    def add(name: str, size: int, maker: int | None, users: Sequence[int]) -> None:
        info = memory.MemoryPlanningInfoForBuffer(size, size)
        info.succ_nodes.update(nodes[user] for user in users if user != maker)
        info.succ_nodes_for_ordering.update(info.succ_nodes)
        if maker is None:
            found = inputs[name] = memory.FreeableInputBuffer(name, info)
        else:
            found = buffers[name] = _Buffer(name, info)
            nodes[maker].outputs.append(found)
        for node in info.succ_nodes:
            node.mpi_node.pred_buffers.add(found)

    for storage, users in enumerate(graph.users):
        name = f"storage {storage}"
        if users:
            add(name, graph.sizes[storage], graph.makers.get(storage), users)
        if storage in graph.kept:
            outputs.add(name)
    # A buffer of no bytes says that one operation comes after another.
    for place, after in enumerate(graph.successors):
        add(f"order {place}", 0, place, after)
        for other in after:
            nodes[place].mpi_node.succ_nodes.add(nodes[other])
            nodes[other].mpi_node.pred_nodes.add(nodes[place])
            nodes[other].unmet_dependencies.append(buffers[f"order {place}"])
    places = {node: place for place, node in enumerate(nodes)}
    for found in (
        memory.topological_sort_lpmf(nodes, inputs, buffers, outputs),
        memory.topological_sort_bfs(nodes),
        memory.topological_sort_dfs(nodes),
    ):
        yield [places[node] for node in found]

"""A backend of torch.compile: Inductor, with its fused kernels in the order of least peak memory.

    model = torch.compile(model, backend="tempo_order")

Inductor turns each graph, forward or backward, into fused kernels and calls of libraries. It orders them by three list
schedules (`reorder_for_peak_memory`) and takes the best. This backend adds our order as a fourth choice, so the peak
that Inductor estimates is never above that of its own choice. Only the order of the kernels changes, so results are
the same bit for bit.

It cannot change the split into forward and backward (torch.compile cuts the step there, and keeps every gradient until
backward is over), nor the fusion. On a CPU it cannot reorder between two calls of libraries: Inductor makes one
function of all kernels there, which frees nothing until it returns.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor import memory
from torch._inductor.custom_graph_pass import CustomSchedulerPass, get_hash_for_files
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from tempo_megatron.roam.graph import Operation, StepGraph
from tempo_megatron.roam.order import find_order
from tempo_megatron.words.argument_types import format_bytes

# The name among the entry points of setup.py, by which torch.compile finds the backend.
NAME = "tempo_order"
# Operations that the exact search of each range examines; few, so that a compilation does not wait for it.
WORK_LIMIT = 30_000
_HOOK = "_post_fusion_custom_pass"
_log = logging.getLogger(__name__)


def compile_ordered(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compiles a graph that torch.compile traced by Inductor, with its kernels in our order.

    Inputs, mode and options are those of the backend "inductor".

    Raises ValueError if the options name another function that orders Inductor's kernels.
    """
    from torch._inductor.compile_fx import compile_fx

    settings = torch._TorchCompileInductorWrapper(mode, options, None).config
    if settings.get(_HOOK) is not None:
        raise ValueError(
            f'{_HOOK} is set, through which the backend "{NAME}" orders; expected it unset, or backend="inductor"'
        )
    return compile_fx(module, inputs, config_patches={**settings, _HOOK: OrderKernels()})


class OrderKernels(CustomSchedulerPass):
    """The pass that Inductor calls with its scheduler's nodes after fusion."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Returns the nodes in the order of least peak that it finds, or as given if none is better."""
        if not nodes:
            return nodes
        scheduler = nodes[0].scheduler
        # This counts the bytes of all buffers, calls our method, and compares the peaks.
        return memory.reorder_for_peak_memory(
            nodes,
            scheduler.name_to_buf,
            scheduler.name_to_fused_node,
            OrderedSet(V.graph.graph_inputs),
            OrderedSet(V.graph.get_output_names()),
            methods=[order_nodes],
        )

    def uuid(self) -> Any:
        """Identifies this version of the pass to Inductor's cache."""
        return get_hash_for_files(tuple(map(str, sorted(Path(__file__).parent.glob("*.py")))), str(WORK_LIMIT))


def order_nodes(nodes: Sequence[Any]) -> list[Any]:
    """Orders nodes of Inductor's scheduler, whose memory it has counted, for least peak."""
    plan = find_order(read_nodes(nodes, frozenset(V.graph.get_output_names())), work_limit=WORK_LIMIT)
    _log.info(
        "%d kernels: peak %s, of Inductor's order before %s, of no order less than %s",
        len(nodes),
        *map(format_bytes, (plan.peak_bytes, plan.given_peak_bytes, plan.lower_bound)),
    )
    return [nodes[place] for place in plan.order]


def read_nodes(nodes: Sequence[Any], output_names: frozenset[str]) -> StepGraph:
    """Makes a graph of scheduler nodes, with their buffers as its storages.

    A buffer that is changed in place has no bytes under its new name, whose users count as users of the old name, too.
    A call with several results allocates them, but Inductor lists their bytes at buffers of separate nodes.
    """
    places = {node: place for place, node in enumerate(nodes)}
    sizes, kept = list[int](), set[int]()
    makes, reads = (collections.defaultdict[int, list[int]](list) for _ in range(2))

    def add(buffer: Any, maker: int | None) -> None:
        storage = len(sizes)
        sizes.append(buffer.mpi_buffer.size_free)
        if maker is not None:
            makes[maker].append(storage)
        for user in buffer.mpi_buffer.succ_nodes:
            if places[user] != maker:
                reads[places[user]].append(storage)
        if buffer.get_name() in output_names:
            kept.add(storage)

    made = set[str]()
    for place, node in enumerate(nodes):
        # The call of whose results this node takes one, if there is one.
        calls = (
            before
            for before in node.mpi_node.pred_nodes
            if any(each.mpi_buffer.size_alloc > each.mpi_buffer.size_free for each in before.get_outputs())
        )
        call = places[next(calls, node)]
        for buffer in node.get_outputs():
            made.add(buffer.get_name())
            add(buffer, place if buffer.mpi_buffer.size_alloc else call)
    inputs = {buffer.get_name(): buffer for node in nodes for buffer in node.mpi_node.pred_buffers}
    for name, buffer in inputs.items():
        if name not in made:
            add(buffer, None)
    operations = (
        Operation(
            name=node.get_name(),
            makes=tuple(makes[place]),
            reads=tuple(reads[place]),
            after=tuple(sorted(places[before] for before in node.mpi_node.pred_nodes)),
        )
        for place, node in enumerate(nodes)
    )
    return StepGraph(tuple(operations), tuple(sizes), frozenset(kept))

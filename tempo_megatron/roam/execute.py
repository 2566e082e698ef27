"""Runs a captured step in a given order, and frees each tensor as soon as nothing needs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tempo_megatron.roam.capture import CapturedStep, get_arguments, is_random
from tempo_megatron.roam.graph import check_order


class OrderedStep:
    """Forward, backward and update of a model in a given order.

    It calls the operations that eager mode calls, on the same numbers, so losses and parameters are the same bit for
    bit. A gradient is freed as soon as its parameter is updated; none is left in `.grad`.

    Args:
        captured: the step.
        model: the model that was captured, with real tensors.
        order: an order of the captured graph's operations; None is the order of eager mode.

    Raises ValueError if dropout draws from a state that is not part of the trace.
    """

    def __init__(self, captured: CapturedStep, model: torch.nn.Module, order: Sequence[int] | None = None) -> None:
        _check_draws(captured, model)
        self._batch = captured.batch
        self._order = range(len(captured.graph)) if order is None else order
        self._module = reorder(captured, self._order)
        self._state: list[Tensor] = [*dict(model.named_parameters()).values(), *dict(model.named_buffers()).values()]
        inputs = zip(self._module.graph.find_nodes(op="placeholder"), self._state, strict=False)
        self._updated = [tensor for node, tensor in inputs if any(user.op == "call_module" for user in node.users)]

    def __call__(self, *batch: Any) -> Tensor:
        """Runs one step with a micro batch of the captured shapes, and returns the loss.

        Raises ValueError for a structure, shapes or numbers that differ from the captured ones, and if a parameter has
        a gradient already, to which eager mode would add.
        """
        tensors = self._batch.list_tensors(batch)
        if any(parameter.grad is not None for parameter in self._updated):
            raise ValueError(
                "a parameter has a gradient before the step, to which eager mode would add the step's own; expected "
                "none (call optimizer.zero_grad())"
            )
        with torch.no_grad():
            loss: Tensor = self._module(*self._state, *tensors)[0]
        return loss


def reorder(captured: CapturedStep, order: Iterable[int]) -> fx.GraphModule:
    """Returns the module with its calls in this order. Its code drops each name behind its last use."""
    order = list(order)
    check_order(captured.graph, order)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    output = graph.output(graph.graph_copy(captured.module.graph, copies))
    for node in (node for place in order for node in captured.nodes[place]):
        output.prepend(copies[node])
    graph.lint()
    return fx.GraphModule(captured.module, graph)


def _check_draws(captured: CapturedStep, model: torch.nn.Module) -> None:
    """Raises ValueError if a run would draw other random numbers than eager mode."""
    found, nodes = None, list(captured.module.graph.nodes)
    if any(map(is_random, nodes[nodes.index(nodes[-1].args[0][0]) :])):  # behind the loss
        found = "the model recomputes what draws random numbers, and a trace draws others the second time"
    is_megatron = any(type(each).__module__.startswith("megatron.") for each in model.modules())
    for node in nodes:
        arguments = get_arguments(node)
        if arguments.get("key_low") is not None and (arguments.get("p") or arguments.get("dropout_p")):
            found = found or f"{node.name} has the dropout masks of the micro batch that was captured"
        elif is_megatron and is_random(node):
            found = found or f"{node.name} draws from one of Megatron's random states, which are no part of the trace"
    if found:
        raise ValueError(f"{found}; expected a model without dropout to run it (to plan it is possible)")

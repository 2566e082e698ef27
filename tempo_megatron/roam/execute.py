"""Runs a captured step in a given order, and frees each tensor as soon as nothing needs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tempo_megatron.roam.capture import CapturedStep, ParameterUpdate, get_arguments, is_random
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
        self._module = reorder(captured, range(len(captured.nodes)) if order is None else order)
        self._state: list[Tensor] = [*dict(model.named_parameters()).values(), *dict(model.named_buffers()).values()]
        self._updates = [each for each in captured.module.children() if isinstance(each, ParameterUpdate)]

    def __call__(self, *batch: Any) -> Tensor:
        """Runs one step with a micro batch of the captured shapes, and returns the loss.

        Raises ValueError for a structure, shapes or numbers that differ from the captured ones, and if a parameter has
        a gradient already, to which eager mode would add.
        """
        tensors = self._batch.list_tensors(batch)
        _check_shapes(self._module, len(self._state), tensors)
        if any(update.has_gradient() for update in self._updates):
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
    calls = [node for place in order for node in captured.nodes[place]]
    others = [node for node in captured.module.graph.nodes if node.op in ("placeholder", "get_attr")]
    (output,) = (node for node in captured.module.graph.nodes if node.op == "output")
    for node in (*others, *calls, output):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.lint()
    return fx.GraphModule(captured.module, graph)


def _check_draws(captured: CapturedStep, model: torch.nn.Module) -> None:
    """Raises ValueError if a run would draw other random numbers than eager mode."""
    if captured.recomputes_draws:
        raise ValueError(
            "the model recomputes what draws random numbers, and a trace draws others the second time; expected no "
            "dropout, or no recomputation, to run it (to plan it is possible)"
        )
    is_megatron = any(type(each).__module__.startswith("megatron.") for each in model.modules())
    for node in (node for nodes in captured.nodes for node in nodes):
        arguments = get_arguments(node)
        if arguments.get("key_low") is not None and (arguments.get("p") or arguments.get("dropout_p")):
            raise ValueError(
                f"{node.name} has the dropout masks of the micro batch that was captured; expected a model without "
                "dropout to run it (to plan it is possible)"
            )
        if is_megatron and is_random(node):
            raise ValueError(
                f"{node.name} draws from one of Megatron's random states, which are no part of the trace; expected a "
                "model without dropout to run it (to plan it is possible)"
            )


def _check_shapes(module: fx.GraphModule, num_state: int, tensors: Sequence[Tensor]) -> None:
    """Raises ValueError unless the micro batch has the shapes that were captured."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"][num_state:]
    expected = [(tuple(node.meta["val"].shape), node.meta["val"].dtype) for node in placeholders]
    given = [(tuple(t.shape), t.dtype) for t in tensors]
    if given != expected:
        raise ValueError(f"the micro batch has {given}; expected {expected}, for which the step was captured")

"""Random graphs, small enough that every order of their operations can be tried, and training steps of any length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tempo_megatron.roam.graph import Operation, StepGraph


@st.composite
def graphs(draw: Any, max_operations: int = 7) -> StepGraph:
    """Operations that make, share, change and keep storages; some of them inputs, some with scratch."""
    sizes = [draw(st.integers(0, 9)) for _ in range(draw(st.integers(0, 2)))]
    operations = []
    for place in range(draw(st.integers(1, max_operations))):
        used = draw(st.lists(st.sampled_from(range(len(sizes))), max_size=3, unique=True)) if sizes else []
        num_written = draw(st.integers(0, 1)) if used else 0
        made = range(len(sizes), len(sizes) + draw(st.integers(0, 2)))
        sizes += [draw(st.integers(0, 9)) for _ in made]
        operations.append(
            Operation(
                name=f"op{place}",
                makes=tuple(made),
                reads=tuple(used[num_written:]),
                writes=tuple(used[:num_written]),
                after=(draw(st.integers(0, place - 1)),) if place and draw(st.integers(0, 4)) == 0 else (),
                scratch_bytes=draw(st.integers(0, 5)),
            )
        )
    kept = draw(st.frozensets(st.sampled_from(range(len(sizes))), max_size=2)) if sizes else frozenset()
    return StepGraph(tuple(operations), tuple(sizes), kept)


def list_orders(graph: StepGraph) -> Iterator[list[int]]:
    """Every order that is allowed."""
    predecessors = graph.predecessors

    def extend(order: list[int]) -> Iterator[list[int]]:
        if len(order) == len(predecessors):
            yield order
        for place, before in enumerate(predecessors):
            if place not in order and all(other in order for other in before):
                yield from extend([*order, place])

    return extend([])


def find_least_peak(graph: StepGraph) -> int:
    """By trying every order."""
    return min(max(graph.count_bytes(order)) for order in list_orders(graph))


def make_training_graph(num_layers: int, seed: int) -> StepGraph:
    """Forward, backward, then an update of every weight, as eager mode runs them; a skip over every layer."""
    sizes, operations, rng = [], [], random.Random(seed)

    def make(size: int) -> int:
        sizes.append(size)
        return len(sizes) - 1

    weights = [make(rng.randrange(50, 200)) for _ in range(num_layers)]
    kept = [make(100)]
    for layer in range(num_layers):
        hidden = make(rng.randrange(100, 400))
        operations.append(Operation(name=f"up{layer}", makes=(hidden,), reads=(kept[-1], weights[layer])))
        kept.append(make(100))
        operations.append(Operation(name=f"down{layer}", makes=(kept[-1],), reads=(hidden, kept[-2])))
    grad, grads = make(100), []
    operations.append(Operation(name="loss", makes=(grad,), reads=(kept[-1],)))
    for layer in reversed(range(num_layers)):
        grads.append(make(sizes[weights[layer]]))
        operations.append(Operation(name=f"dw{layer}", makes=(grads[-1],), reads=(grad, kept[layer])))
        below = make(100)
        operations.append(Operation(name=f"dx{layer}", makes=(below,), reads=(grad, weights[layer])))
        grad = below
    for weight, of_weight in zip(reversed(weights), grads, strict=True):
        operations.append(
            Operation(name=f"update{weight}", reads=(of_weight,), writes=(weight,), scratch_bytes=2 * sizes[weight])
        )
    return StepGraph(tuple(operations), tuple(sizes), frozenset(weights))

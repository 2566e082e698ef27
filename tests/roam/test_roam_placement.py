"""Addresses in an arena: compared with every placement there is of few rectangles, and with the bound of many."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roam_cases import graphs, make_training_graph

from tempo_megatron.roam.graph import Operation, StepGraph, check_order, count_bytes
from tempo_megatron.roam.order import find_order, flatten_order
from tempo_megatron.roam.placement import (
    Filler,
    Rectangle,
    check_placement,
    find_arena,
    find_most_alive,
    find_placement,
    list_rectangles,
)


@st.composite
def rectangles(draw: st.DrawFn, most: int) -> list[Rectangle]:
    found = []
    for _ in range(draw(st.integers(0, most))):
        first = draw(st.integers(0, 5))
        found.append(Rectangle(draw(st.integers(0, 4)), first, first + draw(st.integers(0, 3))))
    return found


def find_lowest(given: list[Rectangle]) -> int:
    """By trying every offset of every rectangle."""
    total, least = sum(each.size for each in given), find_most_alive(given)
    for height in range(least, total + 1):
        for offsets in itertools.product(*(range(height - each.size + 1) for each in given)):
            if all(
                a.last < b.first or b.last < a.first or x + a.size <= y or y + b.size <= x
                for (a, x), (b, y) in itertools.combinations(zip(given, offsets, strict=True), 2)
            ):
                return height
    return total


@settings(max_examples=100, deadline=None)
@given(rectangles(most=5))
def test_the_layout_of_few_is_as_low_as_any(given: list[Rectangle]) -> None:
    placement = find_placement(given)
    assert placement.lower_bound <= find_lowest(given) == placement.height


@settings(max_examples=100, deadline=None)
@given(rectangles(most=30), st.sampled_from([1, 4]))
def test_layouts_of_many_overlap_nowhere_and_keep_their_bound(given: list[Rectangle], alignment: int) -> None:
    placement = find_placement(given, alignment=alignment)
    check_placement(given, placement.offsets)
    assert all(offset % alignment == 0 for offset in placement.offsets)
    stacked = sum(-(-r.size // 4) * 4 for r in given)
    assert find_most_alive(given) <= placement.lower_bound <= placement.height <= stacked
    assert placement == find_placement(given, alignment=alignment)


@settings(max_examples=50, deadline=None)
@given(rectangles(most=30), st.integers(0, 20), st.randoms(use_true_random=False))
def test_an_arena_of_a_given_height_is_filled_without_overlaps(
    given: list[Rectangle], more: int, rng: random.Random
) -> None:
    given = [each for each in given if each.size]
    height = find_most_alive(given) + more - 2
    ranks = rng.sample(range(len(given)), len(given))
    filler = Filler([r.size for r in given], [r.first for r in given], [r.last for r in given], height)
    offsets = filler.place(np.array(ranks, np.int64)).tolist()
    placed = [(each, offset) for each, offset in zip(given, offsets, strict=True) if offset >= 0]
    check_placement([each for each, _ in placed], [offset for _, offset in placed])
    assert all(offset + each.size <= height for each, offset in placed)
    if more < 2:
        assert len(placed) < len(given) or not given


@pytest.mark.parametrize("seed", [0, 3])
def test_the_arena_of_a_training_step_is_filled_at_once(seed: int) -> None:
    graph = make_training_graph(300, seed)
    placement = find_placement(list_rectangles(graph, find_order(graph, work_limit=0).order)[1])
    assert placement.is_optimal


@settings(max_examples=80, deadline=None)
@given(graphs(max_operations=10), st.integers(0, 30), st.sampled_from([1, 4]))
def test_a_flatter_orders_peak_is_no_higher_nor_is_an_arena_that_may_take_one(
    graph: StepGraph, depth: int, alignment: int
) -> None:
    order = find_order(graph).order
    flat = flatten_order(graph, order, depth, work_limit=1000)
    check_order(graph, flat)
    assert max(count_bytes(graph, flat)) == max(count_bytes(graph, order))
    assert flat == flatten_order(graph, order, depth, work_limit=1000)
    alone = find_placement(list_rectangles(graph, order)[1], alignment=alignment)
    taken, placement = arena = find_arena(graph, order, alignment=alignment)
    assert placement.height <= alone.height
    check_placement(list_rectangles(graph, taken)[1], placement.offsets)
    assert arena == find_arena(graph, order, alignment=alignment)


def test_a_flatter_order_has_fewer_steps_near_its_peak() -> None:
    graph = make_training_graph(25, seed=0)
    order = find_order(graph, work_limit=0).order
    flat = flatten_order(graph, order, 500, work_limit=10_000)
    before, after = (sorted(count_bytes(graph, each), reverse=True) for each in (order, flat))
    # From the highest step on, the first that differs is lower.
    assert after < before and after[0] == before[0]
    assert flatten_order(graph, order, 500, work_limit=-1) == list(order)


@pytest.mark.parametrize("num_layers, seed", [(8, 11), (12, 24), (25, 0), (25, 16), (25, 17)])
def test_the_arena_of_a_flatter_order_is_tight_where_that_of_the_first_is_not(num_layers: int, seed: int) -> None:
    graph = make_training_graph(num_layers, seed)
    order = find_order(graph, work_limit=0).order
    assert not find_placement(list_rectangles(graph, order)[1]).is_optimal
    flat, placement = find_arena(graph, order)
    assert placement.is_optimal
    check_order(graph, flat)
    rectangles = list_rectangles(graph, flat)[1]
    check_placement(rectangles, placement.offsets)
    assert placement.height == find_most_alive(rectangles) == find_most_alive(list_rectangles(graph, order)[1])


def test_an_overlap_is_found() -> None:
    with pytest.raises(AssertionError, match="rectangle 0 overlaps another"):
        check_placement([Rectangle(4, 0, 2), Rectangle(4, 2, 3)], [0, 3])


def test_rectangles_are_what_is_alive_with_scratch() -> None:
    graph = StepGraph(
        (
            Operation(name="a", makes=(1,), reads=(0,), scratch_bytes=3),
            Operation(name="b", makes=(2,), reads=(1,)),
        ),
        (10, 4, 5),
        frozenset({0, 2}),
    )
    storages, found = list_rectangles(graph, (0, 1))
    assert storages == [1, 2, None]
    assert found == [Rectangle(4, 0, 1), Rectangle(5, 1, 1), Rectangle(3, 0, 0)]
    assert find_most_alive(found) + 10 == max(count_bytes(graph, (0, 1)))

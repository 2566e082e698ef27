"""The order of least peak and addresses in an arena: compared with all there are of small graphs, and with bounds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roam_cases import find_least_peak, graphs, make_training_graph

from tempo_megatron.roam.graph import Operation, StepGraph, check_order, cut, restrict
from tempo_megatron.roam.order import advance_frees, find_order, flatten_order, list_by_memory, list_depth_first
from tempo_megatron.roam.placement import Rectangle, check_placement, find_arena, find_placement, list_rectangles
from tempo_megatron.roam.search import search_order


@settings(max_examples=120, deadline=None)
@given(graphs())
def test_the_order_is_of_the_least_peak_that_any_order_has_and_the_search_alone_finds_it(graph: StepGraph) -> None:
    plan, least = find_order(graph), find_least_peak(graph)
    check_order(graph, plan.order)
    assert max(graph.count_bytes(plan.order)) == plan.peak_bytes == least
    assert plan.is_optimal
    result = search_order(graph, 1 << 40, 1 << 40)
    assert result.order is not None
    assert graph.count_peak(result.order) == result.lower_bound == least


@settings(max_examples=80, deadline=None)
@given(graphs(max_operations=10))
def test_without_work_the_plan_is_valid_and_its_bound_is_one(graph: StepGraph) -> None:
    best, plan = find_order(graph), find_order(graph, work_limit=0)
    check_order(graph, plan.order)
    assert plan.lower_bound <= best.peak_bytes <= plan.peak_bytes <= plan.given_peak_bytes
    assert plan == find_order(graph, work_limit=0)


@settings(max_examples=80, deadline=None)
@given(graphs(max_operations=10))
def test_frees_that_move_forward_raise_no_peak_and_ranges_have_the_steps_of_the_whole(graph: StepGraph) -> None:
    given_order = range(len(graph))
    steps = graph.count_bytes(given_order)
    order = advance_frees(graph, given_order)
    check_order(graph, order)
    assert max(graph.count_bytes(order)) <= max(steps)
    check_order(graph, list_by_memory(graph))
    check_order(graph, list_depth_first(graph))
    parts = [restrict(graph, inside) for inside in cut(graph)]
    assert [step for part in parts for step in part.count_bytes(range(len(part)))] == steps


@pytest.mark.parametrize("seed", [0, 3])
def test_the_order_of_a_large_training_step_is_proven_best_and_its_arena_filled_at_once(seed: int) -> None:
    graph = make_training_graph(300, seed)
    plan = find_order(graph)
    assert plan.is_optimal
    assert plan.peak_bytes < 0.95 * plan.given_peak_bytes
    assert find_placement(list_rectangles(graph, find_order(graph, work_limit=0).order)[1]).is_optimal


def rectangles(most: int) -> st.SearchStrategy[list[Rectangle]]:
    numbers = st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 3))
    return st.lists(numbers.map(lambda drawn: Rectangle(drawn[0], drawn[1], drawn[1] + drawn[2])), max_size=most)


def find_most_alive(given: list[Rectangle]) -> int:
    steps = range(1 + max((each.last for each in given), default=0))
    return max(sum(each.size for each in given if each.first <= step <= each.last) for step in steps)


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


@settings(max_examples=80, deadline=None)
@given(graphs(max_operations=10), st.integers(0, 30), st.sampled_from([1, 4]))
def test_a_flatter_orders_peak_is_no_higher_nor_is_an_arena_that_may_take_one(
    graph: StepGraph, depth: int, alignment: int
) -> None:
    order = find_order(graph).order
    flat = flatten_order(graph, order, depth, work_limit=1000)
    check_order(graph, flat)
    assert max(graph.count_bytes(flat)) == max(graph.count_bytes(order))
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
    before, after = (sorted(graph.count_bytes(each), reverse=True) for each in (order, flat))
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
    """What is kept stays to the end, whoever used it last."""
    first = Operation(name="a", makes=(1,), reads=(0,), scratch_bytes=3)
    others = Operation(name="b", makes=(2,), reads=(1,)), Operation(name="c", reads=(2,))
    graph = StepGraph((first, *others), (10, 4, 5), frozenset({0, 1}))
    storages, found = list_rectangles(graph, (0, 1, 2))
    assert storages == [1, 2, None]
    assert found == [Rectangle(4, 0, 2), Rectangle(5, 1, 2), Rectangle(3, 0, 0)]
    assert find_most_alive(found) + 10 == max(graph.count_bytes((0, 1, 2)))

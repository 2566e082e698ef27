"""Addresses in an arena: compared with every layout there is of few rectangles, and with the bound of many."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roam_cases import make_training_graph

from tempo_megatron.memory.roam.fill import Filler
from tempo_megatron.memory.roam.graph import Operation, StepGraph, count_bytes
from tempo_megatron.memory.roam.layout import (
    BranchAndBound,
    Rectangle,
    check_layout,
    find_layout,
    find_most_alive,
    list_rectangles,
    place_longest_first,
)
from tempo_megatron.memory.roam.order import find_order


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
                not a.meets(b) or x + a.size <= y or y + b.size <= x
                for (a, x), (b, y) in itertools.combinations(zip(given, offsets, strict=True), 2)
            ):
                return height
    return total


@settings(max_examples=100, deadline=None)
@given(rectangles(most=5))
def test_the_layout_is_as_low_as_any(given: list[Rectangle]) -> None:
    layout = find_layout(given)
    assert layout.height == find_lowest(given) == layout.lower_bound


@settings(max_examples=100, deadline=None)
@given(rectangles(most=30), st.sampled_from([1, 4]))
def test_layouts_of_many_overlap_nowhere_and_keep_their_bound(given: list[Rectangle], alignment: int) -> None:
    layout = find_layout(given, alignment=alignment, work_limit=2000)
    check_layout(given, layout.offsets)
    assert all(offset % alignment == 0 for offset in layout.offsets)
    assert find_most_alive(given) <= layout.lower_bound <= layout.height <= sum(-(-r.size // 4) * 4 for r in given)
    assert layout == find_layout(given, alignment=alignment, work_limit=2000)


@settings(max_examples=100, deadline=None)
@given(rectangles(most=5))
def test_branch_and_bound_alone_finds_the_lowest(given: list[Rectangle]) -> None:
    stacked = [sum(other.size for other in given[:i]) for i in range(len(given))]
    offsets, height = BranchAndBound(given, stacked, sum(r.size for r in given), goal=find_most_alive(given)).run()
    check_layout(given, offsets)
    assert height == find_lowest(given) == max((o + r.size for o, r in zip(offsets, given, strict=True)), default=0)


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
    check_layout([each for each, _ in placed], [offset for _, offset in placed])
    assert all(offset + each.size <= height for each, offset in placed)
    if more < 2:
        assert len(placed) < len(given) or not given


@pytest.mark.parametrize("seed", [0, 3])
def test_the_arena_of_a_training_step_is_filled_at_once(seed: int) -> None:
    graph = make_training_graph(300, seed)
    layout = find_layout(list_rectangles(graph, find_order(graph, work_limit=0).order)[1], work_limit=1)
    assert layout.is_optimal


def test_what_the_paper_compares_with_is_never_lower() -> None:
    rng = random.Random(1)
    given = [Rectangle(rng.randint(1, 50), first := rng.randint(0, 60), first + rng.randint(0, 20)) for _ in range(80)]
    layout = find_layout(given)
    assert find_most_alive(given) <= layout.height <= place_longest_first(given)


def test_an_overlap_is_found() -> None:
    with pytest.raises(AssertionError, match="rectangle 0 overlaps another"):
        check_layout([Rectangle(4, 0, 2), Rectangle(4, 2, 3)], [0, 3])


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

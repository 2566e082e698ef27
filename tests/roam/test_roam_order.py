"""The order of least peak memory: compared with every order there is, on graphs small enough for that."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from roam_cases import find_least_peak, graphs, make_training_graph

from tempo_megatron.roam.graph import Operation, StepGraph, check_order, count_bytes, cut, make_problem, restrict
from tempo_megatron.roam.order import advance_frees, find_order, list_by_memory, list_depth_first
from tempo_megatron.roam.search import find_least_state, search_order


@settings(max_examples=120, deadline=None)
@given(graphs())
def test_the_order_is_of_the_least_peak_that_any_order_has_and_the_search_alone_finds_it(graph: StepGraph) -> None:
    plan, least = find_order(graph), find_least_peak(graph)
    check_order(graph, plan.order)
    assert max(count_bytes(graph, plan.order)) == plan.peak_bytes == least
    assert plan.is_optimal
    problem = make_problem(graph)
    result = search_order(problem, 1 << 40, 1 << 40)
    assert result.order is not None
    assert problem.count_peak(result.order) == result.lower_bound == least


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
    problem, given_order = make_problem(graph), range(len(graph.operations))
    steps = count_bytes(graph, given_order)
    order = advance_frees(problem, given_order)
    check_order(graph, order)
    assert max(count_bytes(graph, order)) <= max(steps)
    check_order(graph, list_by_memory(problem))
    check_order(graph, list_depth_first(problem))
    parts = [restrict(problem, inside) for inside in cut(problem)]
    assert [step for part in parts for step in part.count_steps(range(len(part)))] == steps


@settings(max_examples=80, deadline=None)
@given(graphs())
def test_the_least_state_is_the_least_of_all_states_before_an_operation(graph: StepGraph) -> None:
    problem = make_problem(graph)
    n = len(problem)
    states = [s for s in range(1 << n) if all(problem.ancestors[i] & ~s == 0 for i in range(n) if s >> i & 1)]

    def count_alive(state: int) -> int:
        made = [
            s
            for s, users in enumerate(problem.users)
            if users and (state << 1 | 1) >> 1 + problem.makers.get(s, -1) & 1
        ]
        alive = (s for s in made if s in problem.kept or any(not state >> user & 1 for user in problem.users[s]))
        return problem.base_bytes + sum(problem.sizes[s] for s in alive)

    for place in range(n):
        allowed = [s for s in states if problem.ancestors[place] & ~s == 0 and not s >> place & 1]
        least = find_least_state(problem, place)
        assert least.bytes_before == min(map(count_alive, allowed))
        assert least.smallest & ~least.largest == 0
        for state in (least.smallest, least.largest):
            assert state in allowed
            assert count_alive(state) == least.bytes_before


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_a_large_training_step_is_proven_best(seed: int) -> None:
    graph = make_training_graph(300, seed)
    plan = find_order(graph)
    assert plan.is_optimal
    assert plan.peak_bytes < 0.95 * plan.given_peak_bytes


def test_an_update_is_delayed_where_its_scratch_would_be_the_peak() -> None:
    sizes = (10, 10, 100, 100)  # weight, its gradient, an activation, another gradient
    graph = StepGraph(
        (
            Operation(name="forward", makes=(2,), reads=(0,)),
            Operation(name="dw", makes=(1,), reads=(2,)),
            Operation(name="update", reads=(1,), writes=(0,), scratch_bytes=150),
            Operation(name="dx", makes=(3,), reads=(2,)),
        ),
        sizes,
        frozenset({0}),
    )
    plan = find_order(graph)
    assert [graph.operations[place].name for place in plan.order] == ["forward", "dx", "dw", "update"]
    assert (plan.given_peak_bytes, plan.peak_bytes) == (270, 210)

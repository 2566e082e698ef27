"""The solver of the planner finds what trying everything finds, in a fraction of a second."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from tempo_megatron.memory.plan_solver import Kind, Mode, Solution, Solver, Stage, count_peak


def draw_problem(seed: int) -> tuple[list[Mode[str]], list[Stage], int]:
    """A few stages of at most three layers, and a budget that some fit; byte and cost figures collide often."""
    draw = random.Random(seed)
    top = draw.choice((4, 30, 1000))

    def draw_kinds(num: int, has_replay: bool) -> tuple[Kind[str], ...]:
        return tuple(
            Kind(f"k{index}", draw.randrange(top), draw.randrange(top), draw.randrange(top) if has_replay else 0)
            for index in range(num)
        )

    modes = [Mode(draw_kinds(draw.randint(1, 4), draw.random() < 0.5), (), draw.randrange(3))]
    modes.append(Mode(draw_kinds(draw.randint(1, 3), True)))
    modes.append(Mode(draw_kinds(draw.randint(1, 3), False), draw_kinds(draw.randint(1, 2), True), draw.randrange(3)))
    num_stages = draw.randint(1, 3)
    stages = [
        Stage(draw.randint(1, 3), num_stages - index, draw.randrange(top), draw.randrange(top))
        for index in range(num_stages)
    ]
    return modes, stages, draw.randrange(1, 8 * top)


def try_everything(modes: list[Mode[str]], stages: list[Stage], budget: int) -> tuple[int, int] | None:
    """Cost of the slowest stage and of all together, of the best of all assignments of kinds to layers."""
    best = None
    for mode in modes:
        longest = max(stage.num_layers for stage in stages)
        for num_full in range(1, longest + 1) if mode.full_kinds else (0,):
            costs = []
            for stage in stages:
                n = min(num_full, stage.num_layers)
                fitting = [
                    stage.base_cost + sum(kind.cost for kind in kinds)
                    for full in (mode.full_kinds if n else (None,))
                    for others in itertools.product(mode.kinds, repeat=stage.num_layers - n)
                    for kinds in [[full] * n + list(others)]
                    if count_peak(mode, stage, kinds, n) <= budget
                ]
                costs.append(min(fitting, default=None))
            if None not in costs:
                key = max(costs), sum(costs)
                best = key if best is None else min(best, key)
    return best


def weigh(found: Solution[str]) -> tuple[int, int]:
    return found.cost, sum(stage.cost for stage in found.stages)


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_the_solution_is_that_of_trying_everything(first: int) -> None:
    num_solved = 0
    for seed in range(first, first + 100):
        modes, stages, budget = draw_problem(seed)
        found, expected = Solver(modes, stages).solve(budget), try_everything(modes, stages, budget)
        assert (found and weigh(found)) == expected, seed
        if found is not None:
            num_solved += 1
            assert found.peak_bytes <= budget
            assert [len(stage.names) for stage in found.stages] == [stage.num_layers for stage in stages]
    assert 30 < num_solved < 100


def test_the_smallest_solution_fits_its_own_size_and_nothing_fits_a_byte_less() -> None:
    for seed in range(200):
        modes, stages, _ = draw_problem(seed)
        smallest = Solver(modes, stages).find_smallest()
        assert Solver(modes, stages).solve(smallest.peak_bytes) is not None
        assert Solver(modes, stages).solve(smallest.peak_bytes - 1) is None
        assert try_everything(modes, stages, smallest.peak_bytes - 1) is None


def test_a_larger_budget_costs_no_more() -> None:
    for seed in range(50):
        modes, stages, _ = draw_problem(seed)
        smallest = Solver(modes, stages).find_smallest().peak_bytes
        costs = [weigh(found) for more in range(40) if (found := Solver(modes, stages).solve(smallest + 3 * more))]
        assert len(costs) == 40 and costs == sorted(costs, reverse=True)


def test_the_same_problem_has_the_same_answer_and_of_equal_kinds_the_first() -> None:
    modes, stages, budget = draw_problem(1)
    assert Solver(modes, stages).solve(budget) == Solver(list(modes), list(stages)).solve(budget)
    one, other = Kind("first", 5, 5), Kind("second", 5, 5)
    found = Solver([Mode((one, other))], [Stage(2, 1, 0)]).solve(100)
    assert found is not None and found.stages[0].names == ("first", "first")


def test_128_layers_on_each_of_64_stages_take_less_than_a_second() -> None:
    draw = random.Random(0)

    def draw_kinds(num: int) -> tuple[Kind[str], ...]:
        bytes_of = sorted((draw.randrange(10**7, 10**9) for _ in range(num)), reverse=True)
        return tuple(
            Kind(f"k{index}", kept, index * 10**9 + draw.randrange(10**9), 10**8 if index % 2 else 0)
            for index, kept in enumerate(bytes_of)
        )

    modes = [Mode(draw_kinds(5)), Mode(draw_kinds(4)), Mode(draw_kinds(4)), Mode(draw_kinds(4), draw_kinds(3))]
    stages = [Stage(128, 64 - index, 10**9 * (index + 1), 10**12) for index in range(64)]
    smallest = Solver(modes, stages).find_smallest().peak_bytes
    start = time.process_time()
    found = Solver(modes, stages).solve(smallest * 11 // 10)
    assert time.process_time() - start < 1
    assert found is not None

"""Finds an order of the same peak that is near it at fewer steps, and so easier to lay out in one arena."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence

from tempo_megatron.roam.graph import StepGraph, make_problem, renumber, restrict
from tempo_megatron.roam.layout import WORK_LIMIT, Layout, Rectangle, find_layout, list_rectangles
from tempo_megatron.roam.order import solve_range

# Steps within this part of an arena's height below its peak are made lower, in turn, until the arena is tight.
_DEPTHS = (20, 14, 10, 7)
# Of the work of a layout, these parts are spent on the given order at first, and on each flatter one.
_FIRST_SHARE, _FLAT_SHARE = 12, 24


@dataclasses.dataclass(frozen=True)
class ArenaPlan:
    """An order, and addresses of what `list_rectangles` lists of it."""

    order: tuple[int, ...]
    layout: Layout


def find_arena(
    graph: StepGraph,
    order: Sequence[int],
    *,
    alignment: int = 1,
    work_limit: int = WORK_LIMIT,
    note_progress: Callable[[int, int], None] | None = None,
) -> ArenaPlan:
    """The lowest arena that is found for this order, or for one whose peak is no higher.

    At the peak an arena of its height has no room to lose, and near it little. Where the layout of the given order
    does not get down to its bound soon, those of flatter orders are tried, and then all work is spent on the given one.

    Args:
        graph: the step.
        order: of its operations.
        alignment, note_progress: those of `find_layout`.
        work_limit: that of `find_layout` for the given order. Of each flatter one a 24th as many operations are put in
            order, and as many rectangles filled in.
    """

    def lay_out(order: Sequence[int], rectangles: Sequence[Rectangle], **limits: int) -> ArenaPlan:
        layout = find_layout(rectangles, alignment=alignment, note_progress=note_progress, **limits)
        return ArenaPlan(tuple(order), layout)

    rectangles, share = list_rectangles(graph, order)[1], work_limit // _FLAT_SHARE
    best = lay_out(order, rectangles, work_limit=work_limit // _FIRST_SHARE)
    for part in _DEPTHS:
        if not best.layout.is_optimal:
            flat = flatten_order(graph, order, best.layout.lower_bound // part, work_limit=share)
            of_flat = list_rectangles(graph, flat)[1]
            found = lay_out(flat, of_flat, work_limit=0, num_fills=share // len(of_flat))
            best = min(best, found, key=lambda plan: plan.layout.height)
    if not best.layout.is_optimal:
        best = min(best, lay_out(order, rectangles, work_limit=work_limit), key=lambda plan: plan.layout.height)
    return best


def flatten_order(graph: StepGraph, order: Sequence[int], depth: int, work_limit: int) -> list[int]:
    """An order whose peak is no higher, in which fewer steps need almost as much.

    The operation at the peak stays where it is. What comes before it and what comes after it are problems of their own,
    and the peak of each is made as low as `find_order` makes it without a search. Then the same is done where most is
    alive now, until all of it is `depth` bytes below the first peak, or more than `work_limit` operations were put in
    order again.
    """
    problem = renumber(make_problem(graph), order)
    steps = problem.count_steps(range(len(problem)))
    enough = max(steps, default=0) - depth
    found, work = list(order), 0
    waiting = [(-max(steps, default=0), 0, problem)]
    while waiting and work <= work_limit:
        _, start, part = heapq.heappop(waiting)
        steps = part.count_steps(range(len(part)))
        place = steps.index(max(steps))
        for inside in (range(place), range(place + 1, len(part))):
            if len(inside) < 2 or max(steps[inside.start : inside.stop]) <= enough:
                continue
            side = restrict(part, inside)
            solved = solve_range(side, enough, work_limit=0).order
            work += len(side)
            first = start + inside.start
            found[first : first + len(side)] = [found[first + each] for each in solved]
            side = renumber(side, solved)
            heapq.heappush(waiting, (-side.count_peak(range(len(side))), first, side))
    return found

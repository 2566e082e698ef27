"""The order of least peak of a small problem, or of one whose states are few: best first, over states."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from functools import reduce
from operator import or_

from tempo_megatron.roam.problem import Problem


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search knows when it ends, or when its work is spent."""

    order: list[int] | None
    """One whose peak is below the limit; None where none was found."""
    lower_bound: int
    """No order's peak is below it. The limit itself where there is no better order."""
    work: int


class Search:
    """Looks for an order whose peak is below a limit.

    The state that needs the lowest peak so far is looked at first, and of equals the one in which most has run. All
    that follows from it is then of that peak or a higher one, so that the first complete order is of the least peak.
    An operation that fits below the peak so far, and leaves no more alive than there was, is run at once and nothing
    else tried beside it: no order is better without (see shift.py).
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        masks = [reduce(or_, (1 << each for each in users), 0) for users in problem.users]
        # What an operation frees where all others of a mask have run.
        self._frees = [
            [(masks[s] & ~(1 << place), problem.sizes[s]) for s in used if s not in problem.kept and problem.sizes[s]]
            for place, used in enumerate(problem.uses)
        ]
        self._before = [reduce(or_, (1 << each for each in before), 0) for before in problem.predecessors]

    def run(self, limit: int, work_limit: int, note_share: Callable[[float], None] | None = None) -> SearchResult:
        """Search until an order is found, none is left, or `work_limit` operations have been looked at.

        `note_share` is called with the share of the work limit that is spent, now and then.
        """
        problem = self._problem
        roots = tuple(place for place, before in enumerate(problem.predecessors) if not before)
        first = self._run_free(_Front(0, problem.start_bytes, roots, problem.start_bytes))
        trail: dict[int, tuple[int, list[int]]] = {first.state: (-1, first.path)}
        lowest = {first.state: first.peak}
        work, heap = len(first.path), [(first.peak, -first.state.bit_count(), first.state, first)]
        while heap:
            level, _, state, front = heapq.heappop(heap)
            if level > lowest[state]:
                continue
            if level >= limit:
                break
            if not front.ready:
                return SearchResult(_read_trail(trail, state), level, work)
            if work > work_limit:
                return SearchResult(None, level, work)
            if note_share:
                note_share(work / max(work_limit, 1))
            for place in front.ready:
                work += 1
                if front.alive + problem.transient_bytes[place] >= limit:
                    continue
                following = self._run_free(self._run(dataclasses.replace(front, path=[]), place))
                work += len(following.path)
                if following.peak < lowest.get(following.state, limit):
                    lowest[following.state] = following.peak
                    trail[following.state] = state, following.path
                    key = following.peak, -following.state.bit_count(), following.state
                    heapq.heappush(heap, (*key, following))
        return SearchResult(None, limit, work)

    def _run(self, front: _Front, place: int) -> _Front:
        problem, state = self._problem, front.state | 1 << place
        freed = sum(size for others, size in self._frees[place] if not others & ~front.state)
        enabled = (each for each in problem.successors[place] if not self._before[each] & ~state)
        return _Front(
            state,
            front.alive + problem.made_bytes[place] - freed,
            (*(each for each in front.ready if each != place), *enabled),
            max(front.peak, front.alive + problem.transient_bytes[place]),
            [*front.path, place],
        )

    def _run_free(self, front: _Front) -> _Front:
        """Run what fits below the peak so far and leaves no more alive than there was."""
        is_changed = True
        while is_changed:
            is_changed = False
            for place in front.ready:
                if front.alive + self._problem.transient_bytes[place] > front.peak:
                    continue
                following = self._run(front, place)
                if following.alive <= front.alive:
                    front, is_changed = following, True
        return front


@dataclasses.dataclass(frozen=True, slots=True)
class _Front:
    """A state, what is alive in it, what can run next, the peak until it, and the operations since the last branch."""

    state: int
    alive: int
    ready: tuple[int, ...]
    peak: int
    path: list[int] = dataclasses.field(default_factory=list)


def _read_trail(trail: dict[int, tuple[int, list[int]]], state: int) -> list[int]:
    parts = list[list[int]]()
    while state >= 0:
        state, path = trail[state]
        parts.append(path)
    return [place for part in reversed(parts) for place in part]

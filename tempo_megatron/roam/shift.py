"""Moves operations without raising a peak: those that only free run early, those that only allocate run late.

Why they raise none: what is alive, M, is submodular over states, M(S & T) + M(S | T) <= M(S) + M(T). Let X be a state
behind S of which M(X) <= M(S), reached at once by an operation that fits below the limit. Any order that goes on from
S over states T may go on from X over T | X instead, and M(T | X) <= M(T) + M(X) - M(T & X) <= M(T), because T & X is S
or X. The same holds from the end backward.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence

from tempo_megatron.roam.graph import Problem


class State:
    """Which operations of a problem have run, what is alive, and which can run next."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.alive = problem.start_bytes
        self.order = list[int]()
        self._left = [len(users) + (s in problem.kept) for s, users in enumerate(problem.users)]
        self._waiting = [len(before) for before in problem.predecessors]
        self.ready = {place for place, number in enumerate(self._waiting) if not number}

    def find_change(self, place: int) -> int:
        """How many bytes more are alive after this operation than before."""
        problem, left = self.problem, self._left
        freed = sum(problem.sizes[s] for s in problem.uses[place] if left[s] == 1)
        return problem.made_bytes[place] - freed

    def run(self, place: int) -> list[int]:
        """Run a ready operation. Returns those that it makes ready."""
        self.alive += self.find_change(place)
        self.order.append(place)
        self.ready.remove(place)
        for storage in self.problem.uses[place]:
            self._left[storage] -= 1
        enabled = []
        for other in self.problem.successors[place]:
            self._waiting[other] -= 1
            if not self._waiting[other]:
                enabled.append(other)
        self.ready.update(enabled)
        return enabled

    def list_last_users(self, place: int) -> list[int]:
        """Operations that are alone with a storage since this one has run: their change is another now."""
        problem = self.problem
        alone = (s for s in problem.uses[place] if self._left[s] == 1)
        return [other for s in alone for other in problem.users[s] if other in self.ready]


def advance_frees(problem: Problem, order: Sequence[int]) -> list[int]:
    """Run each operation as soon as it is ready, fits below the order's peak and leaves no more alive than before."""
    limit = problem.count_peak(order)
    state, waits = State(problem), dict[int, None]()
    for place in order:
        while place in state.ready:
            free = next((each for each in waits if _fits(state, each, limit)), None)
            if free is None:
                free = place
            waits.pop(free, None)
            changed = [*state.run(free), *state.list_last_users(free)]
            waits.update((each, None) for each in changed if state.find_change(each) <= 0)
    return state.order


def _fits(state: State, place: int, limit: int) -> bool:
    return place in state.ready and state.alive + state.problem.transient_bytes[place] <= limit


def delay_makes(problem: Problem, order: Sequence[int]) -> list[int]:
    """From the end backward: put last what may be last, fits, and has no more alive before it than behind it."""
    state, limit = _StateFromEnd(problem), problem.count_peak(order)
    for wished in reversed(order):
        while not state.is_placed[wished]:
            state.place(next((each for _, each in state.frees if state.fits(each, limit)), wished))
    return state.order[::-1]


class _StateFromEnd:
    """Which operations of a problem are placed, from the end backward, and which may be placed next."""

    def __init__(self, problem: Problem) -> None:
        self._problem, n = problem, len(problem)
        self.order, self.is_placed = list[int](), [False] * n
        self.frees = list[tuple[int, int]]()
        """Of those that may be placed the ones that have no more alive before them, as they came: (number, place)."""
        self._alive = problem.base_bytes + sum(
            problem.sizes[s] for s in problem.kept if s in problem.makers or problem.users[s]
        )
        self._is_used_later = [s in problem.kept for s in range(len(problem.sizes))]
        self._waiting = [len(after) for after in problem.successors]
        self._numbers = dict[int, int]()
        # What is alive before each operation beyond what is behind it: users add what they alone use, makers take away.
        self._rises = [
            sum(problem.sizes[s] for s in problem.uses[place] if not self._is_used_later[s])
            - sum(problem.sizes[s] for s in problem.makes[place])
            for place in range(n)
        ]
        for place in range(n):
            if not self._waiting[place]:
                self._admit(place)

    def fits(self, place: int, limit: int) -> bool:
        return self._alive + self._rises[place] + self._problem.transient_bytes[place] <= limit

    def place(self, place: int) -> None:
        problem = self._problem
        self._alive += self._rises[place]
        self.order.append(place)
        self.is_placed[place] = True
        if self._rises[place] <= 0:
            self.frees.remove((self._numbers[place], place))
        for storage in problem.uses[place]:
            if not self._is_used_later[storage]:
                self._is_used_later[storage] = True
                for other in problem.users[storage]:
                    self._lower(other, problem.sizes[storage])
        for other in problem.predecessors[place]:
            self._waiting[other] -= 1
            if not self._waiting[other]:
                self._admit(other)

    def _admit(self, place: int) -> None:
        self._numbers[place] = len(self._numbers)
        if self._rises[place] <= 0:
            insort(self.frees, (self._numbers[place], place))

    def _lower(self, place: int, size: int) -> None:
        before = self._rises[place]
        self._rises[place] -= size
        if before > 0 >= self._rises[place] and place in self._numbers and not self.is_placed[place]:
            insort(self.frees, (self._numbers[place], place))


def list_by_memory(problem: Problem) -> list[int]:
    """LESCEA's list schedule, with which the paper compares.

    Of the ready operations that do not exceed the peak so far, it takes the one that leaves least alive; where all do,
    the one with the smallest new peak.
    """
    state, peak = State(problem), problem.start_bytes
    changes = {place: state.find_change(place) for place in state.ready}
    by_change = [(change, place) for place, change in changes.items()]
    heapq.heapify(by_change)
    while state.ready:
        place = _pop_lowest(by_change, changes, peak - state.alive, problem)
        if place is None:
            place = min(state.ready, key=lambda each: (problem.transient_bytes[each], changes[each], each))
        peak = max(peak, state.alive + problem.transient_bytes[place])
        del changes[place]
        for other in [*state.run(place), *state.list_last_users(place)]:
            changes[other] = state.find_change(other)
            heapq.heappush(by_change, (changes[other], other))
    return state.order


def list_depth_first(problem: Problem) -> list[int]:
    """Each operation right behind those that it needs; of several the one that touches the fewest bytes first."""
    touched = [sum(problem.sizes[storage] for storage in used) for used in problem.uses]
    by_bytes = sorted(range(len(problem)), key=lambda place: (touched[place], place))
    ranks = {place: rank for rank, place in enumerate(by_bytes)}
    order = dict[int, None]()
    for last in by_bytes:
        waiting = [last]
        while waiting:
            missing = [each for each in problem.predecessors[waiting[-1]] if each not in order]
            if missing:
                waiting += sorted(missing, key=ranks.__getitem__, reverse=True)
            else:
                order[waiting.pop()] = None
    return list(order)


def _pop_lowest(entries: list[tuple[int, int]], changes: dict[int, int], room: int, problem: Problem) -> int | None:
    """The first entry that is up to date and fits; those that do not fit stay."""
    passed, found = [], None
    while entries:
        entry = heapq.heappop(entries)
        if changes.get(entry[1]) != entry[0]:
            continue
        passed.append(entry)
        if problem.transient_bytes[entry[1]] <= room:
            found = passed.pop()[1]
            break
    for entry in passed:
        heapq.heappush(entries, entry)
    return found

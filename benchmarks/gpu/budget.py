"""Wall-clock seconds: what may still begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Budget:
    """A kind of step begins only where there is time for the longest of its kind so far."""

    def __init__(
        self, seconds: float, first_guess_s: dict[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self._clock, self._start = seconds, clock, clock()
        self._longest_s = dict(first_guess_s)
        self._measured: set[str] = set()

    @property
    def spent_s(self) -> float:
        return self._clock() - self._start

    @property
    def left_s(self) -> float:
        return self.seconds - self.spent_s

    def allows(self, kind: str) -> bool:
        return self.left_s >= self._longest_s[kind]

    @contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Notes how long it took."""
        start = self.spent_s
        try:
            yield
        finally:
            took = self.spent_s - start
            self._longest_s[kind] = max(took, self._longest_s[kind]) if kind in self._measured else took
            self._measured.add(kind)

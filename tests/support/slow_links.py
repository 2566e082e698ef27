"""A device of threads whose copies take as long as a seed says, and one that forgets to wait."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from tempo_kernels.offload import Direction, ThreadDevice

_DIRECTIONS: tuple[Direction, ...] = ("out", "in")


class SlowLink(ThreadDevice):
    """Each copy takes none, some or many of the microseconds that a layer of a small model takes; `begin_pattern`
    draws anew, for each direction, how often it is late and how late at most."""

    def __init__(self) -> None:
        super().__init__(self._draw)
        self.begin_pattern(0)

    def begin_pattern(self, seed: int) -> None:
        self._random = {direction: random.Random(f"{seed} {direction}") for direction in _DIRECTIONS}
        self._late = {
            direction: (draw.choice((0.0, 0.1, 0.5, 1.0)), draw.choice((20e-6, 200e-6, 2000e-6)))
            for direction, draw in self._random.items()
        }

    def _draw(self, direction: Direction, num_bytes: int) -> float:
        share, most = self._late[direction]
        draw = self._random[direction]
        return draw.uniform(0.0, most) if draw.random() < share else 0.0


class Careless(SlowLink):
    """Forgets to wait for copies of some directions, or for a share of these, which take longer than several layers:
    else whoever does not wait is seldom too early."""

    def __init__(self, forgets: Collection[Direction], share: float = 1.0) -> None:
        self._forgets, self._share, self._which = forgets, share, random.Random(0)
        super().__init__()

    def begin_pattern(self, seed: int) -> None:
        super().begin_pattern(seed)
        # A busy machine takes longer for its layers: later patterns are late enough for it, too.
        self._late |= dict.fromkeys(self._forgets, (1.0, min(1.0, 50e-3 * 2 ** (seed // 10))))

    def copy(self, direction: Direction, source: Tensor, target: Tensor, after: Sequence[Any]) -> Any:
        event = super().copy(direction, source, target, [event for event in after if not self._is_forgotten(event)])
        if direction in self._forgets and self._which.random() < self._share:
            event.is_forgotten = True  # type: ignore[attr-defined]
        return event

    def wait(self, stream: None, event: Future[None]) -> None:
        if not self._is_forgotten(event):
            super().wait(stream, event)

    def _is_forgotten(self, event: Any) -> bool:
        return getattr(event, "is_forgotten", False)

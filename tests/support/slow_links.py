"""A device of threads whose copies take as long as a seed says, and one that forgets to wait."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from tempo_kernels.offload import Direction, ThreadDevice


class SlowLink(ThreadDevice):
    """Each copy takes none, some or many of the microseconds that a layer of a small model takes; `begin_pattern`
    draws anew how often, for each direction."""

    def __init__(self) -> None:
        super().__init__(self._draw)
        self.begin_pattern(0)

    def begin_pattern(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._shares = {direction: self._random.choice((0.0, 0.1, 0.5)) for direction in ("out", "in")}

    def _draw(self, direction: Direction, num_bytes: int) -> float:
        if self._random.random() > self._shares[direction]:
            return 0.0
        return self._random.choice((1e-4, 5e-4, 2e-3))


class Careless(ThreadDevice):
    """Forgets to wait for copies of some directions, which are late; the other direction's are at once."""

    def __init__(self, forgets: Collection[Direction]) -> None:
        super().__init__(lambda direction, _: 2e-3 if direction in forgets else 0.0)
        self._forgets = forgets

    def copy(self, direction: Direction, source: Tensor, target: Tensor, after: Sequence[Any]) -> Any:
        event = super().copy(direction, source, target, [event for event in after if not self._is_forgotten(event)])
        event.direction = direction  # type: ignore[attr-defined]
        return event

    def wait(self, stream: None, event: Future[None]) -> None:
        if not self._is_forgotten(event):
            super().wait(stream, event)

    def _is_forgotten(self, event: Any) -> bool:
        return getattr(event, "direction", None) in self._forgets

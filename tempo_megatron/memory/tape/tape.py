"""The tape: every storage that a run makes and frees, in order, with the operation of the model that made it."""

from __future__ import annotations

import dataclasses

Event = tuple[int, int]
"""(number, bytes) where a storage is made, (number, FREED) where it is freed; other marks have numbers below 0."""
FREED = -1
ENGINE_PRODUCT, TORCH_PRODUCT = -2, -3
"""A matrix product begins, of Transformer Engine's handle of cuBLAS or of torch's."""
GRADIENT = -4
"""A parameter's gradient is complete."""


@dataclasses.dataclass(eq=False)
class Storage:
    """One storage."""

    num_bytes: int
    phase: str
    """What ran when it was made: forward, backward or recomputation; empty outside of these."""
    operation: str
    """The operation of the model that made it; empty outside of the model's modules."""
    born: int
    """The step of the tape that made it; 0 where it was there before."""
    freed: int | None = None
    """The first step at which it is no longer there; None while somebody holds it."""
    is_gradient: bool = False


@dataclasses.dataclass(frozen=True)
class Workspaces:
    """What one call of attention holds inside itself, beyond its results."""

    num_bytes: int
    operation: str
    """The operation of the model that called it, also for its backward."""
    storage: int
    """The number of the last storage that is made when they are alive."""


class Tape:
    """What a `Follower` records. A step is an operation that makes memory; steps count from 1."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.storages: list[Storage] = []
        """By number."""
        self.events: list[Event] = []
        """In order. Which products are torch's though they are no batch, the reader knows."""
        self.gradients: dict[int, tuple[int, int]] = {}
        """Number of each GRADIENT -> the parameter's elements, and the bytes that are new."""
        self.workspaces: list[Workspaces] = []
        self.begins: list[tuple[int, str]] = []
        """(step, "forward" or "backward") where each begins."""
        self.forward_ends: list[int] = []
        """The last step of each forward."""
        self.on_host: list[int] = []
        """Bytes on the host before the first step and at each step; empty where nobody counts them."""
        self._num_marks = 0

    def add(self, storage: Storage) -> int:
        """Record that a storage is made. Returns its number."""
        self.storages.append(storage)
        self.events.append((len(self.storages) - 1, storage.num_bytes))
        return len(self.storages) - 1

    def free(self, number: int) -> None:
        """Record that a storage is freed."""
        self.storages[number].freed = self.num_steps + 1
        self.events.append((number, FREED))

    def mark(self, kind: int) -> int:
        """Record a product or a gradient. Returns the mark's number."""
        self._num_marks += 1
        self.events.append((-self._num_marks, kind))
        return -self._num_marks

    def begin(self, phase: str) -> None:
        """Record that a forward begins with the next step, or a backward unless one is under way."""
        if phase == "forward" or not self.begins or self.begins[-1][1] != phase:
            self.begins.append((self.num_steps + 1, phase))

"""Lists what one micro batch of a chunk makes and frees: the only record from which its memory is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tempo_megatron.memory.simulated.chunk_memory import ENGINE_PRODUCT, FREED, GRADIENT, TORCH_PRODUCT, Event
from tempo_megatron.memory.storages import MadeStorage, PeakBytes

_Result = TypeVar("_Result")
_PRODUCTS = {
    torch.ops.aten.mm.default: ENGINE_PRODUCT,
    torch.ops.aten.addmm.default: ENGINE_PRODUCT,
    torch.ops.aten.bmm.default: TORCH_PRODUCT,
    torch.ops.aten.baddbmm.default: TORCH_PRODUCT,
}


class ChunkTrace(PeakBytes):
    """Lists when each storage is made and freed; a free is seen when memory is next made, or a product begins.

    What is recorded once and replayed (`memory.simulated.device`) is one storage for a moment, as large as all that was
    alive inside at most, and then its results.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__(*known)
        self.events: list[Event] = []
        """The numbers of marks are negative. Which products are torch's though they are no batch, the reader knows."""
        self.gradients: dict[int, tuple[int, int]] = {}
        """As `chunk_memory.divide_blocks` takes them."""
        self.workspaces: dict[int, int] = {}
        self._of_gradients: set[int] = set()
        self._num_marks = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            self.drop_freed()
            self._mark(_PRODUCTS[func])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note(self, new: dict[int, torch.UntypedStorage], inputs: Any) -> None:
        self.drop_freed()
        super().note(new, inputs)

    def describe(self, storage: torch.UntypedStorage, inputs: Any) -> MadeStorage:
        made = super().describe(storage, inputs)
        self.events.append((made.number, made.num_bytes))
        self._sizes[made.number] = made.num_bytes
        return made

    def note_freed(self, made: MadeStorage) -> None:
        self.events.append((made.number, FREED))

    def note_gradient(self, gradient: Tensor) -> None:
        """Hear that the gradient of a parameter is complete; of those in one storage the first one's bytes are new."""
        if not self.gradients:
            self.drop_freed()
        storage = gradient.untyped_storage()
        is_new = storage._cdata not in self._known and storage._cdata not in self._of_gradients
        self._of_gradients.add(storage._cdata)
        self.gradients[self._mark(GRADIENT)] = gradient.numel(), storage.nbytes() if is_new else 0

    def measure(self, function: Callable[[], _Result]) -> tuple[_Result, int]:
        begin, number = len(self.events), self._num_made
        result, rise = super().measure(function)
        self.drop_freed()
        inside = self.events[begin:]
        del self.events[begin:]
        self.note_rise(rise)
        alive = {key: made.number for key, made in self._alive.items() if made.number >= number}
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        results = [alive.pop(key) for t in tensors if (key := t.untyped_storage()._cdata) in alive]
        self.events += [(each, self._sizes[each]) for each in [*results, *alive.values()]]
        self.events += [(each, FREED) for each, size in inside if size == FREED and each < number]
        return result, rise

    def note_rise(self, num_bytes: int) -> None:
        super().note_rise(num_bytes)
        if num_bytes:
            self._sizes[self._num_made] = num_bytes
            self.events += [(self._num_made, num_bytes), (self._num_made, FREED)]
            self._num_made += 1

    def note_workspaces(self, num_bytes: int, level: int, kept: Tensor | None) -> None:
        alive = self.count_alive()
        for number, size in reversed(self.events):
            if size == FREED:
                alive += self._sizes[number]
            elif size >= 0:
                if alive == level:
                    self.workspaces[number] = num_bytes
                    return
                alive -= size

    def _mark(self, kind: int) -> int:
        self._num_marks += 1
        self.events.append((-self._num_marks, kind))
        return -self._num_marks

"""Follows the memory of one training step: what is alive at each event, and what made it.

An event is an operation of torch's dispatcher that makes memory. A storage belongs to the operation of the model that
ran when it was made: in forward the innermost module, in backward the module whose forward made autograd's node. It
counts until nobody holds it. Results do not change; each operation takes some microseconds more.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tempo_megatron.memory.kept.attribution import attribute_all, find_row, name_row
from tempo_megatron.memory.kept.recorder import Scopes
from tempo_megatron.memory.kept.standing_bytes import GRADIENTS, STATES, WEIGHTS, find_storages
from tempo_megatron.slots.mlp import describe_activation

LOSS_HEAD, OTHERS, TRANSIENTS = "loss head", "micro batch and others", "transients"
STANDING = (WEIGHTS, STATES, GRADIENTS)
_HEAD_ROWS = ("output_layer", "loss", "lm_head", "pooler", "binary_head")
# AccumulateGrad has the highest number there is.
_NO_OPERATION = 2**63
_EVENTS_BETWEEN = 32


@dataclasses.dataclass
class _Made:
    """A storage, from the event that made it."""

    reference: StorageWeakRef
    num_bytes: int
    phase: str
    """forward, backward or recomputation; empty outside of them."""
    operation: str
    start: int
    end: int | None = None
    is_gradient: bool = False


@dataclasses.dataclass(frozen=True)
class Standing:
    """What of one kind is alive at the peak."""

    category: str
    """One of STANDING, LOSS_HEAD, OTHERS, TRANSIENTS, or the operation of a layer whose activations these are."""
    operation: str
    """Which operation made it, and when: `backward of linear_fc2`."""
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step of one rank."""

    title: str
    levels: dict[str, np.ndarray]
    """Category -> bytes alive at each event."""
    marks: tuple[tuple[int, str], ...]
    """(event, `forward` or `backward`): where each begins."""
    peak_event: int
    moment: str
    """What ran at the peak: `backward of the loss head`."""
    at_peak: tuple[Standing, ...]
    """From the largest."""

    @property
    def peak_bytes(self) -> int:
        return sum(each.num_bytes for each in self.at_peak)


class _Sequence(Scopes):
    """Which operation of the model a node of autograd is of."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._starts, self._operations = [-1], [""]

    @property
    def operation(self) -> str:
        """That runs now."""
        return self._scopes[-1]

    def find(self, number: int) -> str:
        return self._operations[bisect.bisect_right(self._starts, number) - 1]

    def _enter(self, operation: str) -> None:
        super()._enter(operation)
        self._note()

    def _leave(self) -> None:
        super()._leave()
        self._note()

    def _note(self) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._operations.append(self._scopes[-1])


class StepTimeline(TorchDispatchMode):
    """Follows the operations inside.

    Args:
        models: Megatron's, without wrappers.
        standing: kind -> storages (as find_storages has them) that are there before: weights and optimizer states.
            Gradients that are made inside are found automatically.
    """

    def __init__(self, models: Sequence[Any], standing: Mapping[str, Mapping[Any, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._models = models
        self._standing = {kind: sum(storages.values()) for kind, storages in standing.items()}
        self._known = {key for storages in standing.values() for key in storages}
        self._known |= set(find_storages(buffer for model in models for buffer in model.buffers()))
        self._sequences = [_Sequence(model) for model in models]
        self._running: _Sequence | None = None
        self._alive: dict[int, _Made] = {}
        self._made: list[_Made] = []
        self._event = self._asked = 0
        # Of all storages in _alive, of which some may be gone.
        self._upper_bound = self._highest = 0
        self._marks: list[tuple[int, str]] = []
        self._forward_ends: list[int] = []
        self._context = contextlib.ExitStack()

    def __enter__(self) -> StepTimeline:
        for model, sequence in zip(self._models, self._sequences, strict=True):
            self._context.enter_context(attribute_all(sequence, model))
            self._context.enter_context(sequence.follow())
            hooks = [
                model.register_forward_pre_hook(lambda *_, sequence=sequence: self._begin_forward(sequence)),
                model.register_forward_hook(lambda *_: self._end_forward(), always_call=True),
            ]
            hooks += [
                p.register_post_accumulate_grad_hook(self._note_gradient) for p in model.parameters() if p.requires_grad
            ]
            for hook in hooks:
                self._context.callback(hook.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._context.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        new = {}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and (key := t.untyped_storage()._cdata) not in self._known:
                entry = self._alive.get(key)
                if entry is None or entry.reference.expired():
                    new[key] = t
        if new:
            self._note(new, {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)})
        return out

    def note_gradients(self, tensors: Iterable[Tensor]) -> None:
        """These are gradients, whatever made them."""
        for key in find_storages(tensors):
            if (entry := self._alive.get(key)) is not None:
                entry.is_gradient = True

    def finish(self, title: str) -> Timeline:
        """What was seen. Nothing is followed after it."""
        self._drop_what_is_gone(self._event + 1)
        num_events = self._event + 1
        changes: dict[str, np.ndarray] = {}
        for made in self._made:
            category = self._categorize(made)
            change = changes.setdefault(category, np.zeros(num_events + 1, dtype=np.int64))
            change[made.start] += made.num_bytes
            change[num_events if made.end is None else made.end] -= made.num_bytes
        levels = {category: np.cumsum(change)[:num_events] for category, change in changes.items()}
        for kind, num_bytes in self._standing.items():
            levels[kind] = levels.get(kind, np.zeros(num_events, dtype=np.int64)) + num_bytes
        peak = int(np.argmax(sum(levels.values())))
        at_peak: dict[tuple[str, str], int] = {
            (kind, "there before the step"): num_bytes for kind, num_bytes in self._standing.items() if num_bytes
        }
        moment = ""
        for made in self._made:
            if made.start <= peak and (made.end is None or made.end > peak):
                key = (self._categorize(made), _describe(made.phase, self._name(made.operation)))
                at_peak[key] = at_peak.get(key, 0) + made.num_bytes
            if made.start == peak:
                moment = _describe(made.phase, self._name(made.operation))
        found = [Standing(*key, num_bytes) for key, num_bytes in at_peak.items()]
        found.sort(key=lambda each: -each.num_bytes)
        return Timeline(title, levels, tuple(self._marks), peak, moment, tuple(found))

    def _begin_forward(self, sequence: _Sequence) -> None:
        if self._running is None and torch._C._current_autograd_node() is None:
            self._running = sequence
            self._mark("forward")

    def _end_forward(self) -> None:
        if self._running is not None:
            self._running = None
            self._drop_what_is_gone(self._event + 1)
            self._forward_ends.append(self._event)

    def _mark(self, name: str) -> None:
        if not self._marks or self._marks[-1][1] != name or name == "forward":
            self._marks.append((self._event + 1, name))

    def _note(self, new: Mapping[int, Tensor], read: set[int]) -> None:
        phase, operation = self._find_place()
        self._event += 1
        for key, t in new.items():
            storage = t.untyped_storage()
            # An output that shares storage with an input existed before; this is only the first time we see it.
            was_there = key in read
            made = _Made(
                StorageWeakRef(storage),
                storage.nbytes(),
                "" if was_there else phase,
                "" if was_there else operation,
                0 if was_there else self._event,
            )
            if (gone := self._alive.get(key)) is not None:
                gone.end = self._event
                self._upper_bound -= gone.num_bytes
            self._alive[key] = made
            self._made.append(made)
            self._upper_bound += made.num_bytes
        # To ask each storage takes long. Those that are gone count a little longer, but never for the peak.
        if self._upper_bound > self._highest or self._event - self._asked >= _EVENTS_BETWEEN:
            self._drop_what_is_gone(self._event)
            self._highest = max(self._highest, self._upper_bound)

    def _find_place(self) -> tuple[str, str]:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ("", "") if self._running is None else ("forward", self._running.operation)
        self._mark("backward")
        for sequence in self._sequences:
            if len(sequence._scopes) > 1:
                return "recomputation", sequence.operation
        number = node._sequence_nr()
        if number >= _NO_OPERATION:
            return "backward", "gradient accumulation"
        found = [sequence.find(number) for sequence in self._sequences]
        return "backward", next((operation for operation in found if operation), "")

    def _drop_what_is_gone(self, event: int) -> None:
        """Record `event` as the end of every storage that has been freed."""
        self._asked = event
        for key in [key for key, made in self._alive.items() if made.reference.expired()]:
            gone = self._alive.pop(key)
            gone.end = event
            self._upper_bound -= gone.num_bytes

    def _note_gradient(self, parameter: Tensor) -> None:
        self.note_gradients(g for g in (parameter.grad, getattr(parameter, "main_grad", None)) if g is not None)

    def _categorize(self, made: _Made) -> str:
        if made.is_gradient:
            return GRADIENTS
        if not made.phase:
            return OTHERS
        name = self._name(made.operation)
        if name in _HEAD_ROWS:
            return LOSS_HEAD
        if made.phase == "forward":
            ends = self._forward_ends
            place = bisect.bisect_left(ends, made.start)
            if place < len(ends) and (made.end is None or made.end > ends[place] + 1):
                return name
        return TRANSIENTS

    def _name(self, operation: str) -> str:
        """The ledger's row; of what is none the name itself."""
        if operation == "gradient accumulation":
            return operation
        return name_row(find_row(operation), describe_activation(self._models[0].config))


def _describe(phase: str, name: str) -> str:
    return f"{phase} of {'the model' if name == 'loss' else name}" if phase else "outside of forward and backward"


def list_tensors_alive(timeline: Timeline, least: float = 0.002) -> Iterator[Standing]:
    """What stands at the peak; what is less than `least` of it is put together per category."""
    limit = least * timeline.peak_bytes
    large: list[Standing] = []
    small: list[Standing] = []
    for each in timeline.at_peak:
        (large if each.num_bytes >= limit else small).append(each)
    yield from large
    for category, group in itertools.groupby(sorted(small, key=lambda each: each.category), lambda each: each.category):
        yield Standing(category, "smaller ones", sum(each.num_bytes for each in group))


def format_timeline(timeline: Timeline) -> str:
    """What stands at the peak, as a table."""
    lines = [f"memory at the peak of one step ({timeline.moment}): {timeline.title}"]
    lines.append(f"{'category':<28}{'made by':<44}{'bytes':>17}{'share':>8}")
    rule = "-" * len(lines[-1])
    lines.append(rule)
    for each in list_tensors_alive(timeline):
        share = each.num_bytes / timeline.peak_bytes
        lines.append(f"{each.category:<28}{each.operation:<44}{each.num_bytes:>17,}{share:>8.1%}")
    return "\n".join([*lines, rule, f"{'peak':<72}{timeline.peak_bytes:>17,}{1:>8.0%}"])


def describe_timeline(timeline: Timeline) -> dict[str, Any]:
    """What goes into the JSON."""
    return {
        "title": timeline.title,
        "peak_bytes": timeline.peak_bytes,
        "peak_event": timeline.peak_event,
        "moment": timeline.moment,
        "at_peak": [dataclasses.asdict(each) for each in timeline.at_peak],
        "marks": [{"event": event, "begins": name} for event, name in timeline.marks],
        "levels": {category: level.tolist() for category, level in timeline.levels.items()},
    }

"""Follows the memory of one training step: what is alive at each event, and what made it.

An event is an operation of torch's dispatcher that makes memory. A storage belongs to the operation of the model that
ran when it was made: in forward the innermost module, in backward the module whose forward made autograd's node. It
counts as long as somebody holds it. Results do not change; each operation takes some microseconds longer.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from tempo_megatron.memory.kept.attribution import attribute_all, find_row, format_size, name_row
from tempo_megatron.memory.kept.recorder import Scopes
from tempo_megatron.memory.storages import MadeStorage, StorageFollower, find_storages
from tempo_megatron.slots.mlp import describe_activation

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"
LOSS_HEAD, OTHERS, TRANSIENTS = "loss head", "micro batch and others", "transients"
STANDING = (WEIGHTS, STATES, GRADIENTS)
_HEAD_ROWS = ("output_layer", "loss", "lm_head", "pooler", "binary_head")
# AccumulateGrad has the highest sequence number.
_NO_OPERATION = 2**63
_EVENTS_BETWEEN = 32
_LEAST_SHARE = 0.002  # of the peak: smaller parts of a category are one line of the table


@dataclasses.dataclass(eq=False)
class _Made(MadeStorage):
    """A storage, and the events at which it is made and freed."""

    phase: str
    """forward, backward or recomputation; empty outside of these."""
    operation: str
    start: int
    end: int | None = None
    is_gradient: bool = False


@dataclasses.dataclass(frozen=True)
class PeakPart:
    """Bytes of one category and origin that are alive at the peak."""

    category: str
    """One of STANDING, LOSS_HEAD, OTHERS, TRANSIENTS, or, for activations, the operation of the layer."""
    operation: str
    """The operation that made them: `backward of linear_fc2`."""
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class LivedStorage:
    """One storage of the step."""

    category: str
    """As in PeakPart."""
    made_by: str
    """The operation that made it, as in PeakPart."""
    num_bytes: int
    start: int
    """The event that makes it."""
    end: int | None
    """The event from which it is no longer there; None where the step leaves it."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step of one rank."""

    title: str
    levels: dict[str, np.ndarray]
    """Category -> bytes alive at each event."""
    marks: tuple[tuple[int, str], ...]
    """(event, "forward" or "backward") where each begins."""
    peak_event: int
    moment: str
    """What ran at the peak: `backward of the loss head`."""
    at_peak: tuple[PeakPart, ...]
    """The largest first."""
    standing: dict[str, int] = dataclasses.field(default_factory=dict)
    """One of STANDING -> bytes that are there before the step."""
    storages: tuple[LivedStorage, ...] = ()
    """What the step makes."""
    on_host: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """Bytes of the layers' activations that have a place on the host, at each event."""

    @property
    def host_peak_bytes(self) -> int:
        return int(self.on_host.max())

    @property
    def peak_bytes(self) -> int:
        return sum(each.num_bytes for each in self.at_peak)


class StepTimeline(StorageFollower):
    """Follows the storages of one step, each with the operation of the model that made it.

    Args:
        models: Megatron's models, without wrappers.
        standing: weights and optimizer states that exist before the step: category -> storages, as find_storages
            returns them. Gradients that are made inside are found automatically.
        count_host: returns the bytes on the host; None where nothing moves there.
    """

    def __init__(
        self,
        models: Sequence[Any],
        standing: Mapping[str, Mapping[int, int]],
        count_host: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(buffer for model in models for buffer in model.buffers())
        self._models = models
        self._standing = {kind: sum(storages.values()) for kind, storages in standing.items()}
        self._known |= {key for storages in standing.values() for key in storages}
        self._scopes = [Scopes(model) for model in models]
        self._running: Scopes | None = None
        self._made: list[_Made] = []
        self._event = self._asked = self._highest = 0
        # The event that ends a storage which is found freed now: the one that is being noted, or else the next one.
        self._end = 1
        # Phase and operation of the event that is being noted, and the storages that it reads.
        self._place = ("", "")
        self._read: set[int] = set()
        self._marks: list[tuple[int, str]] = []
        self._forward_ends: list[int] = []
        self._count_host = count_host or (lambda: 0)
        self._on_host = [self._count_host()]
        self._context = contextlib.ExitStack()

    def __enter__(self) -> StepTimeline:
        for model, scopes in zip(self._models, self._scopes, strict=True):
            self._context.enter_context(attribute_all(scopes, model))
            self._context.enter_context(scopes.follow())
            hooks = [
                model.register_forward_pre_hook(lambda *_, scopes=scopes: self._begin_forward(scopes)),
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

    def note_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Count these tensors as gradients, whatever made them."""
        for key in find_storages(tensors):
            if isinstance(made := self._alive.get(key), _Made):
                made.is_gradient = True

    def finish(self, title: str) -> Timeline:
        """The timeline of the step. Call it last."""
        self.drop_freed()
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
        storages = []
        for made in self._made:
            key = (self._categorize(made), _describe(made.phase, self._name(made.operation)))
            storages.append(LivedStorage(*key, made.num_bytes, made.start, made.end))
            if made.start <= peak and (made.end is None or made.end > peak):
                at_peak[key] = at_peak.get(key, 0) + made.num_bytes
            if made.start == peak:
                moment = key[1]
        found = [PeakPart(*key, num_bytes) for key, num_bytes in at_peak.items()]
        found.sort(key=lambda each: -each.num_bytes)
        return Timeline(
            title=title,
            levels=levels,
            marks=tuple(self._marks),
            peak_event=peak,
            moment=moment,
            at_peak=tuple(found),
            standing=dict(self._standing),
            storages=tuple(storages),
            on_host=np.array(self._on_host, dtype=np.int64),
        )

    def _begin_forward(self, scopes: Scopes) -> None:
        if self._running is None and torch._C._current_autograd_node() is None:
            self._running = scopes
            self._mark("forward")

    def _end_forward(self) -> None:
        if self._running is not None:
            self._running = None
            self.drop_freed()
            self._forward_ends.append(self._event)

    def _mark(self, name: str) -> None:
        if not self._marks or self._marks[-1][1] != name or name == "forward":
            self._marks.append((self._event + 1, name))

    def note(self, new: dict[int, torch.UntypedStorage], inputs: Any) -> None:
        self._place = self._find_place()
        self._read = {t.untyped_storage()._cdata for t in tree_leaves(inputs) if isinstance(t, Tensor)}
        self._event += 1
        self._on_host.append(self._count_host())
        self._end = self._event
        super().note(new, inputs)
        # Asking every storage takes long, so freed ones may count a little longer, but never at the peak.
        if self._upper_bound > self._highest or self._event - self._asked >= _EVENTS_BETWEEN:
            self.drop_freed()
            self._highest = max(self._highest, self._upper_bound)
        self._end = self._event + 1

    def describe(self, storage: torch.UntypedStorage, inputs: Any) -> MadeStorage:
        # An output that shares storage with an input existed before; this is only the first time we see it.
        was_there = storage._cdata in self._read
        phase, operation = ("", "") if was_there else self._place
        made = super().describe(storage, inputs)
        start = 0 if was_there else self._event
        self._made.append(_Made(made.reference, made.num_bytes, made.number, phase, operation, start))
        return self._made[-1]

    def drop_freed(self) -> None:
        self._asked = self._end
        super().drop_freed()

    def note_freed(self, made: MadeStorage) -> None:
        assert isinstance(made, _Made)
        made.end = self._end

    def _find_place(self) -> tuple[str, str]:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ("", "") if self._running is None else ("forward", self._running.operation)
        self._mark("backward")
        if recomputed := next((scopes.operation for scopes in self._scopes if scopes.operation), ""):
            return "recomputation", recomputed
        if node._sequence_nr() >= _NO_OPERATION:
            return "backward", "gradient accumulation"
        found = (scopes.find_operation(node) for scopes in self._scopes)
        return "backward", next((operation for operation in found if operation), "")

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
        """The title of the operation's row in the ledger."""
        if operation == "gradient accumulation":
            return operation
        return name_row(find_row(operation), describe_activation(self._models[0].config))


def _describe(phase: str, name: str) -> str:
    return f"{phase} of {'the model' if name == 'loss' else name}" if phase else "outside of forward and backward"


def format_timeline(timeline: Timeline) -> str:
    """A table of what is alive at the peak."""
    lines = [f"memory at the peak of one step ({timeline.moment}): {timeline.title}"]
    lines.append(f"{'category':<28}{'made by':<44}{'bytes':>17}{'share':>8}")
    rule = "-" * len(lines[-1])
    lines.append(rule)
    limit = _LEAST_SHARE * timeline.peak_bytes
    parts = [each for each in timeline.at_peak if each.num_bytes >= limit]
    small: collections.Counter[str] = collections.Counter()
    for each in timeline.at_peak:
        if each.num_bytes < limit:
            small[each.category] += each.num_bytes
    for each in [*parts, *(PeakPart(category, "smaller ones", small[category]) for category in sorted(small))]:
        share = each.num_bytes / timeline.peak_bytes
        lines.append(f"{each.category:<28}{each.operation:<44}{format_size(each.num_bytes):>17}{share:>8.1%}")
    lines += [rule, f"{'peak':<72}{format_size(timeline.peak_bytes):>17}{1:>8.0%}"]
    if timeline.host_peak_bytes:
        lines.append(f"{'on the host, not among these, at most':<72}{format_size(timeline.host_peak_bytes):>17}")
    return "\n".join(lines)


def describe_timeline(timeline: Timeline) -> dict[str, Any]:
    """The timeline as JSON."""
    return {
        "title": timeline.title,
        "peak_bytes": timeline.peak_bytes,
        "peak_event": timeline.peak_event,
        "moment": timeline.moment,
        "at_peak": [dataclasses.asdict(each) for each in timeline.at_peak],
        "marks": [{"event": event, "begins": name} for event, name in timeline.marks],
        "levels": {category: level.tolist() for category, level in timeline.levels.items()},
        "on_host": timeline.on_host.tolist(),
    }


class StandingBytes:
    """Counts weights, gradients and optimizer states at the first step of every optimizer, until `close`.

    Args:
        models: the models of this rank, whose parameters are the weights. Other tensors that an optimizer steps, such
            as float32 copies, count as its states.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._gradients: dict[int, int] = {}
        self._states: dict[int, int] = {}
        self._seen: set[int] = set()
        self._hooks = [
            register_optimizer_step_pre_hook(self._note_gradients),
            register_optimizer_step_post_hook(self._note_states),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def count(self) -> dict[str, int]:
        """Category -> bytes; gradients and states are 0 before an optimizer has stepped."""
        found = {**self.list_lasting(), GRADIENTS: self._gradients}
        return {kind: sum(storages.values()) for kind, storages in found.items()}

    def list_lasting(self) -> dict[str, dict[int, int]]:
        """The storages of weights and states, as find_storages returns them."""
        return {WEIGHTS: find_storages(self._list_parameters()), STATES: self._states}

    def _list_parameters(self) -> list[Tensor]:
        return [parameter for model in self._models for parameter in model.parameters()]

    def _note_gradients(self, optimizer: Any, *_: Any) -> None:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [getattr(p, name, None) for p in (*self._list_parameters(), *stepped) for name in ("grad", "main_grad")]
        self._gradients |= find_storages(grad for grad in grads if isinstance(grad, Tensor))

    def _note_states(self, optimizer: Any, *_: Any) -> None:
        weights = find_storages(self._list_parameters())
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        remembered = [value for state in optimizer.state.values() for value in state.values()]
        found = find_storages(t for t in (*stepped, *remembered) if isinstance(t, Tensor))
        self._states |= {key: size for key, size in found.items() if key not in weights}

"""Tracks where a dropout mask is applied: which samples a forward sees, and which call of which module draws.

A mask is a pure function of (seed, global sample, name of the module, how many times the forward called it before).
Nothing is stored. So any kind of checkpointing, which runs a forward again in backward, draws the same mask, and so
does any number of processes.

A tensor may have more rows than the forward has samples: frames of videos, or choices. They are numbered as (sample,
row of the sample), under a key for each number of rows, so that no other forward, step or rank has theirs, whatever
the sizes of batches are.

A forward of the model is a ForwardPass. If a backward runs a part of it again, the graph node that asks for it tells
which forward it belongs to: autograd numbers nodes as they are made, and a pass knows its first and last number.
Compiled code cannot ask for the node; there a hook on the model's outputs brings the pass back.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from tempo_kernels.philox import derive_key
from tempo_torch.numbering import FIRST_OVERSIZED, OVERSIZED_BITS, ForwardPass, Samples, get_next_node

_MAX_PASSES = 1 << 10
_ROWS_BITS = 27


class DropoutPlace:
    """One module that draws masks."""

    def __init__(self, name: str, code: int, passes: Passes) -> None:
        self.name, self.code, self.passes = name, code, passes
        self.calls = 0  # in a compiled graph: since the forward, or the backward, began
        self.key_tensor = torch.tensor(_make_signed(derive_key(passes.seed, code, 0)), dtype=torch.int64)

    def draw(self, device: torch.device, num_rows: int | None = None) -> tuple[int | Tensor, int | Tensor, int]:
        """Returns (key, first row, number of samples) of the mask that is drawn now, to be used once.

        Args:
            device: where it is drawn.
            num_rows: rows of the tensor, of which several may belong to one sample, one behind the other; by default
                one for each sample.
        """
        is_traced = torch.compiler.is_compiling()
        now = self.passes.current if is_traced else self.passes.get_current()
        first: Any = now.first_sample_tensor if is_traced else now.first_sample
        if first is None:
            first = self.passes.samples.number(now)
        rows = 1 if num_rows is None else -(-num_rows // now.num_samples)
        # Rows that are numbered in another way than samples get other keys. Philox takes consecutive keys.
        shift = 0
        if rows > 1 or now.spacing > OVERSIZED_BITS:
            first, shift = first % FIRST_OVERSIZED * rows, rows + (now.spacing << _ROWS_BITS)
        if is_traced:
            return self._get_traced_key(shift).to(device), first.to(device), now.num_samples
        key = derive_key(self.passes.seed, self.code, self._count_call(now))
        return (key + shift) % (1 << 64), first, now.num_samples

    def _count_call(self, now: ForwardPass) -> int:
        """Returns how many times the forward called this place before, and counts this call."""
        counts = now.counts
        if now.is_over and is_in_backward():
            if counts.get(self.name, 0) <= 1:
                return 0
            if now.recalled is None:
                raise RuntimeError(
                    f"{self.name} is called several times in a forward, and which of its calls runs again here is not "
                    "known, since the checkpointed region begins with none of the model's modules on a tensor that it "
                    "was given; expected a region that does; checkpoint a whole module, and keep its input in place"
                )
            counts = now.recalled
        call = counts.get(self.name, 0)
        counts[self.name] = call + 1
        self.passes.has_repeats |= call > 0
        return call

    def _get_traced_key(self, shift: int) -> Tensor:
        # A tensor, because a number would be compiled in.
        call, self.calls = self.calls, self.calls + 1
        if call < 0:
            raise RuntimeError(
                f"{self.name} is called several times in a forward, in a compiled region that is checkpointed; "
                "expected one call; do not compile it, or do not checkpoint it"
            )
        key = self.key_tensor if call == 0 else torch.tensor(_make_signed(_derive(self.passes.seed, self.code, call)))
        return key if shift == 0 else key + shift


class Passes:
    """The forwards of one model, and the places in it that draw.

    Args:
        seed: any integer; its low 64 bits count.
        rank, num_ranks: this process among those that train on different samples; None for torch.distributed's.
        sequence: this process among those that share the tokens of a sample, and how many they are.
    """

    def __init__(
        self, seed: int, rank: int | None = None, num_ranks: int | None = None, sequence: tuple[int, int] = (0, 1)
    ) -> None:
        self.seed, self.samples = seed, Samples(rank, num_ranks, sequence)
        self.places: dict[str, DropoutPlace] = {}
        self.has_repeats = self._knows_repeats = self._keeps_all = False
        # The thread whose forward runs, and the frame in which torch runs it; setdefault is atomic.
        self._owner: dict[str, tuple[int, FrameType | None]] = {}
        # The outermost backward that runs, and what is gone once it has ended, also by an exception.
        self._task: tuple[int, weakref.ref[Any]] | None = None
        self._current: ForwardPass | None = None
        self._past: deque[ForwardPass] = deque(maxlen=_MAX_PASSES)
        self.handles: list[RemovableHandle] = []  # of the hooks by which the forwards are known

    @property
    def current(self) -> ForwardPass:
        """Returns the forward that runs, or runs again in backward."""
        if self._current is None:
            raise RuntimeError(
                "a dropout was called before any forward of the model that was given to tempoize, so which samples it "
                "sees is not known; call that model, or give tempoize the module that is called"
            )
        return self._current

    def get_current(self) -> ForwardPass:
        """Returns `current`: in backward, the pass whose graph asks for a part of its forward."""
        if is_in_backward() and (found := self._find_past()) is not None and found is not self._current:
            self._current, found.recalled = found, None
        return self.current

    def _find_past(self) -> ForwardPass | None:
        """Finds the forward that made the graph node that runs now; None if a recomputation made it."""
        task = torch._C._current_graph_task_id()
        if self._task is None or self._task[1]() is None:

            def end() -> None:
                self._task = None

            self._task = task, weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        if task != self._task[0]:
            # Reentrant checkpointing runs a nested backward, whose nodes another thread may have numbered.
            return None
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else -1
        found = next((each for each in reversed(self._past) if each.first_node < number < each.last_node), None)
        if found is None:
            # The number before a pass belongs to a region around it, unless another pass ended with it.
            found = next((each for each in reversed(self._past) if each.first_node == number < each.last_node), None)
        if found is None and len(self._past) == _MAX_PASSES and number < self._past[0].first_node:
            raise RuntimeError(
                f"more than {_MAX_PASSES} forwards ran before the backward of this one; expected fewer; call backward "
                "earlier"
            )
        return found

    def add_place(self, name: str) -> DropoutPlace:
        """Makes the place of the module with this name."""
        code = zlib.crc32(name.encode())
        while any(place.code == code for place in self.places.values()):
            code = (code + 1) % 2**32
        self.places[name] = place = DropoutPlace(name, code, self)
        return place

    def follow(self, model: nn.Module) -> None:
        """Hooks `model` to notice each of its forwards and each call of a module."""
        self.handles.append(model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True))
        self.handles.append(model.register_forward_hook(self._end, always_call=True))
        for number, (name, module) in enumerate(model.named_modules()):
            if name:
                enter = functools.partial(self._enter, number)
                self.handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))

    def leave(self) -> None:
        """Removes these hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    @contextlib.contextmanager
    def keep_all(self) -> Iterator[None]:
        """Lets dropout keep every element inside the context, on the paths that it takes otherwise."""
        before, self._keeps_all = self._keeps_all, True
        try:
            yield
        finally:
            self._keeps_all = before

    def get_probability(self, p: float) -> float:
        """Returns p; inside of `keep_all` a probability above 0 that 16 bits realise as 0."""
        return min(p, 2.0**-20) if self._keeps_all else p

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = threading.get_ident(), _find_frame()
        owner = self._owner.setdefault("forward", call)
        # A frame that runs no more was left by KeyboardInterrupt, for which torch calls no hooks.
        if owner is not call and _is_running(*owner):
            raise RuntimeError(
                f"{type(module).__name__} is called while a forward of it runs, by another thread or by itself, so "
                "which samples each call sees is not known; expected one forward at a time; give each thread a copy of "
                "the model, and give tempoize a module that does not call itself"
            )
        self._owner["forward"] = call
        for place in self.places.values():
            place.calls = 0
        now = self._make_pass(module, args, kwargs)
        if is_in_backward() and (
            past := self._find_past() or (None if self.samples.is_restored(now) else self._current)
        ):
            # A checkpointed region around the whole forward runs it again.
            self._current, past.is_over, past.counts = past, False, {}
            return
        self._current = now
        if module.training:
            now.first_sample_tensor = torch.tensor(self.samples.number(now), dtype=torch.int64)

    def _make_pass(self, module: nn.Module, args: Any, kwargs: Any) -> ForwardPass:
        tensor, said = _find_batch(module, args, kwargs), self.samples.said
        device = torch.device("cpu") if tensor is None else tensor.device
        device = torch.device("meta") if isinstance(tensor, FakeTensor) else device
        return ForwardPass((1 if tensor is None else tensor.size(0)) if said is None else said, device)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if (now := self._current) is None or self._owner.get("forward", (None,))[0] != threading.get_ident():
            return  # `_begin` refused it
        self._owner.clear()
        now.is_over = self._knows_repeats = True
        if not self.has_repeats:
            now.entries.clear()
            now.counts.clear()
        if now.first_sample is not None and not is_in_backward():
            now.last_node = get_next_node()
            self._past.append(now)
        for past in self._past if self.has_repeats else ():
            past.entries = {entry: found for entry, found in past.entries.items() if not found[0].expired()}

        def begin_backward(_: Tensor) -> None:
            self._current, now.recalled = now, None
            for place in self.places.values():
                place.calls = 0 if place.calls <= 1 else -(1 << 30)

        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(begin_backward)

    def _enter(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Notes, or in backward recalls, how many calls came before a module's call, found by its first tensor."""
        if torch.compiler.is_compiling() or self._current is None or (self._knows_repeats and not self.has_repeats):
            return
        if (tensor := _find_tensor(args, kwargs)) is None:
            return
        now, storage = self.get_current(), tensor.untyped_storage()
        entry = (number, storage._cdata)
        _, found = now.entries.get(entry, (None, None))
        if now.is_over:
            if is_in_backward() and found is not None:
                now.recalled = dict(found)
        else:  # the same tensor in two calls cannot tell them apart
            is_known = entry not in now.entries or found == now.counts
            now.entries[entry] = StorageWeakRef(storage), dict(now.counts) if is_known else None

    def __getstate__(self) -> dict[str, Any]:
        no_pass: dict[str, Any] = {"_current": None, "_past": deque(maxlen=_MAX_PASSES)}
        return {**self.__dict__, **no_pass, "_owner": {}, "_task": None}


def is_in_backward() -> bool:
    """Returns whether this forward runs inside a backward."""
    return torch._C._current_graph_task_id() != -1


def _find_frame() -> FrameType | None:
    """Finds the innermost frame in which torch calls a module; None if there is none."""
    frame, file = inspect.currentframe(), sys.modules[nn.Module.__module__].__file__
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame


def _is_running(thread: int, frame: FrameType | None) -> bool:
    """Returns whether a thread still runs a frame."""
    top = sys._current_frames().get(thread)
    while top is not None and top is not frame:
        top = top.f_back
    return top is not None


def _derive(seed: int, code: int, call: int) -> int:
    return derive_key(seed, code, call)


# This is torch._dynamo.assume_constant_result without its import, which takes seconds.
_derive._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _make_signed(key: int) -> int:
    return key - (key >> 63 << 64)


def _find_tensor(args: Any, kwargs: Any) -> Tensor | None:
    """Finds the first tensor of a call that has dimensions and is not empty."""
    for value in pytree.tree_leaves((args, kwargs)) if kwargs or len(args) != 1 else args:
        if isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 0:
            return value
    return None


def _find_batch(module: nn.Module, args: Any, kwargs: Any) -> Tensor | None:
    """Finds the tensor of a call whose first dimension counts the samples: the one that models of transformers call
    their main input, since others, as position_ids, may have one row for all samples; else the first."""
    for name in ("input_ids", "inputs_embeds", getattr(module, "main_input_name", "")):
        for given in (kwargs, *args):
            found = _find_tensor((given.get(name),), {}) if isinstance(given, Mapping) else None
            if found is not None:
                return found
    return _find_tensor(args, kwargs)

"""Tracks where a dropout mask is applied: which samples a forward sees, and which call of which module draws.

A mask is a pure function of (seed, global sample, name of the module, how many times the forward called it before).
Nothing is stored and no generator advances. So any kind of checkpointing, which runs a forward again in backward, draws
the same mask, and so does any number of processes.

A forward of the model is a Pass. If a backward runs a part of it again, the graph node that asks for it tells which
forward it belongs to: autograd numbers nodes as they are made, and a pass knows its first and last number. So several
forwards may run before their backwards, whatever the model returns. Compiled code cannot ask for the node; there a hook
on the model's outputs brings the pass back.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from tempo_kernels.philox import derive_key

_FIRST_OVERSIZED = 1 << 47
_MAX_OVERSIZED = 1 << 16
_MAX_PASSES = 1 << 10


class Pass:
    """One forward of the model: its samples, and how often it called the places that draw."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.first_sample: int | None = None
        self.first_sample_tensor: Tensor | None = None
        self.counts: dict[str, int] = {}
        self.is_over = False
        # The numbers of the nodes that autograd makes during the pass. A checkpointed region around the whole forward
        # runs it without a graph, and the region's own node has the number before.
        self.first_node = _get_next_node() - 1
        self.last_node = self.first_node
        # `counts` at a module's call with a tensor, by (the module's number, the tensor's storage). A weak reference
        # frees the memory, but keeps another storage from getting the same address.
        self.entries: dict[tuple[int, int], tuple[StorageWeakRef, dict[str, int] | None]] = {}
        self.recalled: dict[str, int] | None = None


class Place:
    """One module that draws masks."""

    def __init__(self, name: str, code: int, passes: Passes) -> None:
        self.name, self.code, self.passes = name, code, passes
        self.calls = 0
        """In a compiled graph: the calls since the forward, or the backward, began."""
        self.key_tensor = torch.tensor(_make_signed(derive_key(passes.seed, code, 0)), dtype=torch.int64)

    def find(self, device: torch.device) -> tuple[int | Tensor, int | Tensor, int]:
        """Returns (key, first sample, number of samples) of the mask that is drawn now, to be used once."""
        if torch.compiler.is_compiling():
            return self._find_traced(device)
        now = self.passes.find_current()
        number = now.first_sample if now.first_sample is not None else self.passes.number_samples(now)
        return derive_key(self.passes.seed, self.code, self._count_call(now)), number, now.num_samples

    def _count_call(self, now: Pass) -> int:
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

    def _find_traced(self, device: torch.device) -> tuple[Tensor, Tensor, int]:
        # Tensors, because numbers would be compiled in.
        call, now = self.calls, self.passes.current
        self.calls = call + 1
        if call < 0:
            raise RuntimeError(
                f"{self.name} is called several times in a forward, in a compiled region that is checkpointed; "
                "expected one call; do not compile it, or do not checkpoint it"
            )
        key = self.key_tensor if call == 0 else torch.tensor(_make_signed(_derive(self.passes.seed, self.code, call)))
        assert now.first_sample_tensor is not None
        return key.to(device), now.first_sample_tensor.to(device), now.num_samples


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
        self.seed, self.sequence = seed, sequence
        self._knows_samples = rank is not None
        self.places: dict[str, Place] = {}
        self.has_repeats = False
        self._keeps_all = False
        self.num_steps = 0
        """Forwards that drew, where nobody said which samples they see."""
        self._ranks = (rank, num_ranks)
        self.step_samples: int | None = None
        """Samples of the first of them."""
        self._next_sample: int | None = None
        self._knows_repeats = False
        self._depth = 0
        self._owner: dict[str, int] = {}  # the thread whose forward runs; setdefault is atomic
        self._task = -1  # the outermost backward that runs
        self._current: Pass | None = None
        self._past: deque[Pass] = deque(maxlen=_MAX_PASSES)
        self.handles: list[RemovableHandle] = []
        """Of the hooks by which the forwards are known."""

    @property
    def current(self) -> Pass:
        """Returns the forward that runs, or runs again in backward."""
        if self._current is None:
            raise RuntimeError(
                "a dropout was called before any forward of the model that was given to tempoize, so which samples it "
                "sees is not known; call that model, or give tempoize the module that is called"
            )
        return self._current

    def find_current(self) -> Pass:
        """Finds `current`: in backward, the pass whose graph asks for a part of its forward."""
        if is_in_backward() and (found := self._find_past()) is not None and found is not self._current:
            self._current, found.recalled = found, None
        return self.current

    def _find_past(self) -> Pass | None:
        """Finds the forward that made the graph node that runs now; None if a recomputation made it."""
        task = torch._C._current_graph_task_id()
        if self._task == -1:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if task != self._task:
            # Reentrant checkpointing runs a backward of its own, whose nodes another thread may have numbered.
            return None
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else -1
        for past in reversed(self._past):
            if past.first_node <= number < past.last_node:
                return past
        if len(self._past) == _MAX_PASSES and number < self._past[0].first_node:
            raise RuntimeError(
                f"more than {_MAX_PASSES} forwards ran before the backward of this one; expected fewer; call backward "
                "earlier"
            )
        return None

    def _end_backward(self) -> None:
        self._task = -1

    def add_place(self, name: str) -> Place:
        """Makes the place of the module with this name."""
        code = zlib.crc32(name.encode())
        while any(place.code == code for place in self.places.values()):
            code = (code + 1) % 2**32
        self.places[name] = place = Place(name, code, self)
        return place

    def follow(self, model: nn.Module) -> None:
        """Hooks `model` to notice each of its forwards and each call of a module."""
        self.handles.append(model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True))
        self.handles.append(model.register_forward_hook(self._end, always_call=True))
        for number, (name, module) in enumerate(model.named_modules()):
            if name:
                entry = _Entry(self, number)
                self.handles.append(module.register_forward_pre_hook(entry, prepend=True, with_kwargs=True))

    def leave(self) -> None:
        """Removes these hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    @contextlib.contextmanager
    def set_next(self, first_sample: int) -> Iterator[None]:
        """The context of `samples`."""
        if not 0 <= first_sample < _FIRST_OVERSIZED:
            raise ValueError(f"first_sample is {first_sample}; expected 0 to 2**47 - 1, the index over the whole run")
        before, self._next_sample = self._next_sample, first_sample
        try:
            yield
        finally:
            self._next_sample = before

    @contextlib.contextmanager
    def keep_all(self) -> Iterator[None]:
        """Lets dropout keep every element inside the context, on the paths that it takes otherwise."""
        before, self._keeps_all = self._keeps_all, True
        try:
            yield
        finally:
            self._keeps_all = before

    def choose_probability(self, p: float) -> float:
        """Returns p; inside of `keep_all` a probability above 0 that 16 bits realise as 0."""
        return min(p, 2.0**-20) if self._keeps_all else p

    def check_sequence(self) -> None:
        """Raises ValueError if ranks among which DeepSpeed's Ulysses divides a sample would draw masks as if they had
        another place in it, or as if each had the whole sample."""
        ulysses: Any = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
        if ulysses is None or ulysses._SEQUENCE_PARALLEL_GROUP is None:
            return
        size, given = ulysses.get_sequence_parallel_world_size(), self.sequence[1]
        # Where nobody said which samples a rank has, each numbers its own, so that no two draw the same mask.
        if size != given and (given > 1 or self._knows_samples or self._next_sample is not None):
            raise ValueError(
                f"DeepSpeed's Ulysses divides a sample among {size} ranks, and sequence_ranks is {given}; expected "
                f"the same, or parts of a sample might get one dropout mask; give tempoize sequence_ranks={size}"
            )

    def number_samples(self, now: Pass) -> int:
        """Returns the index of a pass's first sample, found once, when it first draws."""
        if self._next_sample is not None:
            number = self._next_sample
            self._next_sample += now.num_samples
        else:
            number = self._count_step(now.num_samples)
        now.first_sample = number
        return number

    def _count_step(self, num_samples: int) -> int:
        """Returns the first of num_samples numbers that no other step or rank uses."""
        rank, num_ranks = self._find_rank()
        if self.step_samples is None:
            self.step_samples = num_samples
        step = self.num_steps * num_ranks + rank
        self.num_steps += 1
        if num_samples <= self.step_samples:
            return step * self.step_samples
        # More samples than in the first step get numbers of their own, of which other ranks need not know.
        return _FIRST_OVERSIZED + step * max(_MAX_OVERSIZED, num_samples)

    def _find_rank(self) -> tuple[int, int]:
        rank, num_ranks = self._ranks
        if rank is not None and num_ranks is not None:
            return rank, num_ranks
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._owner.setdefault("thread", threading.get_ident()) != threading.get_ident():
            raise RuntimeError(
                f"two threads call one {type(module).__name__} at once, so which samples each sees is not known; "
                "expected one forward at a time; give each thread a copy of the model"
            )
        self._depth += 1
        if self._depth > 1:
            return  # the model calls itself
        for place in self.places.values():
            place.calls = 0
        if not is_in_backward():
            self._task = -1
        elif (past := self._find_past() or self._current) is not None:
            # A checkpointed region around the whole forward runs it again.
            self._current, past.is_over, past.counts = past, False, {}
            return
        self._current = now = Pass(_count_samples(args, kwargs))
        if module.training:
            now.first_sample_tensor = torch.tensor(self.number_samples(now), dtype=torch.int64)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._owner.get("thread") != threading.get_ident():
            return  # `_begin` refused it
        self._depth -= 1
        now = self._current
        if not self._depth:
            self._owner.clear()
        if self._depth or now is None:
            return
        now.is_over = self._knows_repeats = True
        if not self.has_repeats:
            now.entries.clear()
            now.counts.clear()
        if now.first_sample is not None and not is_in_backward():
            now.last_node = _get_next_node()
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

    def enter(self, number: int, args: Any, kwargs: Any) -> None:
        """Notes, or in backward recalls, how many calls came before a module's call, found by its first tensor."""
        if self._current is None or (self._knows_repeats and not self.has_repeats):
            return
        if (tensor := _find_tensor(args, kwargs)) is None:
            return
        now, storage = self.find_current(), tensor.untyped_storage()
        entry = (number, storage._cdata)
        _, found = now.entries.get(entry, (None, None))
        if now.is_over:
            if is_in_backward() and found is not None:
                now.recalled = dict(found)
        elif entry not in now.entries or found == now.counts:
            now.entries[entry] = StorageWeakRef(storage), dict(now.counts)
        else:
            # The same tensor in two calls cannot tell them apart.
            now.entries[entry] = StorageWeakRef(storage), None

    def __getstate__(self) -> dict[str, Any]:
        no_pass: dict[str, Any] = {"_current": None, "_past": deque(maxlen=_MAX_PASSES)}
        return {**self.__dict__, **no_pass, "_owner": {}, "_depth": 0, "_task": -1}


class _Entry:
    """A hook before a module's forward."""

    def __init__(self, passes: Passes, number: int) -> None:
        self._passes, self._number = passes, number

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._passes.enter(self._number, args, kwargs)


def number_rows(first_sample: int | Tensor, num_samples: int, num_rows: int) -> int | Tensor:
    """Numbers the rows of a batch, of which several may belong to one sample. Returns the first of num_rows numbers
    that no other forward's rows use."""
    rows_per_sample = -(-num_rows // num_samples)
    if rows_per_sample == 1:
        return first_sample
    return first_sample + first_sample % _FIRST_OVERSIZED * (rows_per_sample - 1)


def is_in_backward() -> bool:
    """Whether this forward runs inside a backward."""
    return torch._C._current_graph_task_id() != -1


def _get_next_node() -> int:
    """Returns the number that autograd will give the next node."""
    return torch._C._autograd._get_sequence_nr()


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


def _count_samples(args: Any, kwargs: Any) -> int:
    tensor = _find_tensor(args, kwargs)
    return 1 if tensor is None else tensor.size(0)

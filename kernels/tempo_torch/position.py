"""Tracks where a dropout mask is applied: which samples a forward sees, and which call of which module draws.

A mask is a pure function of (seed, global sample, name of the module, how many times the forward called it before).
Nothing is stored. So any kind of checkpointing, which runs a forward again in backward, draws the same mask, and so
does any number of processes. Samples are numbered over all steps and ranks as if one device saw them in order.

A tensor may have more rows than the forward has samples: frames of videos, or choices. They are numbered as (sample,
row of the sample), under a key for each number of rows, so that no other forward, step or rank has theirs, whatever
the sizes of batches are.

A forward of the model is a ForwardPass. If a backward runs a part of it again, the graph node that asks for it tells
which forward it belongs to: autograd numbers nodes as they are made, and a pass knows its first and last number.
Compiled code cannot ask for the node; there a hook on the model's outputs brings the pass back.

Gradient caching runs a batch without a gradient, restores torch's generator, and runs it again with one. Masks advance
no generator, so that several forwards may begin in one state. A forward in training without a gradient advances it by
one number, where stock's dropout advances it by many: then its state comes back only if the program restores it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import sys
import threading
import traceback
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

_FIRST_OVERSIZED = 1 << 47
"""From here on batches are numbered that have more samples than the first step's."""
_OVERSIZED_BITS = 16
_MAX_PASSES, _MAX_STATES = 1 << 10, 1 << 16
_ROWS_BITS = 27


class ForwardPass:
    """One forward of the model: its samples, and how often it called the places that draw."""

    def __init__(self, num_samples: int, device: torch.device) -> None:
        self.num_samples, self.device = num_samples, device
        self.first_sample: int | None = None
        self.first_sample_tensor: Tensor | None = None
        # 0, or the bits of the distance between numbers of batches with more samples than the first step's.
        self.spacing = 0
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


class Samples:
    """What is known of the samples of a model's forwards.

    Args:
        rank, num_ranks: this process among those that train on different samples; None for torch.distributed's.
        sequence: this process among those that share the tokens of a sample, and how many they are.
    """

    def __init__(self, rank: int | None, num_ranks: int | None, sequence: tuple[int, int]) -> None:
        self._ranks: tuple[Any, Any] = (rank, num_ranks)
        self.sequence = sequence
        self.num_steps = 0
        """Forwards that drew outside of `samples`."""
        self.step_samples: int | None = None
        """Samples of the first of them."""
        self.said: int | None = None
        """Samples of each batch, if `samples` says it."""
        # The next sample in `samples`, None outside of it, and whether a forward has drawn in it.
        self._next_sample: int | None = None
        self._has_begun = False
        self._drawn: dict[bytes, tuple[int, int]] = {}
        """First sample and spacing of forwards in training without a gradient, by the generator's state before."""

    @contextlib.contextmanager
    def set_next(self, first_sample: int, num_samples: int | None = None) -> Iterator[None]:
        """The context of `samples`."""
        if not 0 <= first_sample < _FIRST_OVERSIZED:
            raise ValueError(f"first_sample is {first_sample}; expected 0 to 2**47 - 1, the index over the whole run")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; expected at least 1, the samples of each batch")
        before = self.said, self._next_sample, self._has_begun
        self.said, self._next_sample, self._has_begun = num_samples, first_sample, False
        try:
            yield
        finally:
            self.said, self._next_sample, self._has_begun = before

    def __getstate__(self) -> dict[str, Any]:
        # A copy that is made inside of `samples` is outside of it.
        return {**self.__dict__, "said": None, "_next_sample": None, "_has_begun": False}

    def check_sequence(self) -> None:
        """Raises ValueError if ranks among which DeepSpeed's Ulysses divides a sample would draw masks as if they had
        another place in it, or as if each had the whole sample."""
        ulysses: Any = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
        if ulysses is None or ulysses._SEQUENCE_PARALLEL_GROUP is None:
            return
        size, given = ulysses.get_sequence_parallel_world_size(), self.sequence[1]
        # Without a rank or `samples` each process numbers its samples differently, so no two draw the same mask.
        if size != given and (given > 1 or self._ranks[0] is not None or self._next_sample is not None):
            raise ValueError(
                f"DeepSpeed's Ulysses divides a sample among {size} ranks, and sequence_ranks is {given}; expected "
                f"the same, or parts of a sample might get one dropout mask; give tempoize sequence_ranks={size}"
            )

    def number(self, now: ForwardPass) -> int:
        """Returns the index of a pass's first sample, found once, when it first draws."""
        state = self._read_state(now)
        drawn = None if state is None else self._drawn.get(state)
        if drawn is not None and (self._has_begun or self._next_sample is None):
            number, now.spacing = drawn
        else:  # what a person says comes first
            number = self._count_step(now) if self._next_sample is None else self._next_sample
        if state is not None and (drawn is not None or not torch.is_grad_enabled()):
            self._drawn[state] = number, now.spacing
            if len(self._drawn) > _MAX_STATES:
                del self._drawn[next(iter(self._drawn))]
            torch.rand((), device=now.device if now.device.type == "cuda" else "cpu")
        if self._next_sample is not None:
            self._next_sample, self._has_begun = number + now.num_samples, True
        now.first_sample = number
        return number

    def _read_state(self, now: ForwardPass) -> bytes | None:
        """Returns a hash of the generator's state and of the batch's size; None where it is not asked for again."""
        if torch.is_grad_enabled() and not self._drawn:
            return None
        if now.device.type == "meta" or torch._C._are_functorch_transforms_active():
            return None  # nothing can be drawn
        state = torch.cuda.get_rng_state(now.device) if now.device.type == "cuda" else torch.get_rng_state()
        return hashlib.blake2b(state.numpy().tobytes() + b"%d" % now.num_samples, digest_size=16).digest()

    def _count_step(self, now: ForwardPass) -> int:
        """Returns the first of as many numbers as a pass has samples, which no other step or rank uses."""
        rank, num_ranks = get_rank() if None in self._ranks else self._ranks
        if self.step_samples is None:
            self.step_samples = now.num_samples
        step = self.num_steps * num_ranks + rank
        self.num_steps += 1
        if now.num_samples <= self.step_samples:
            first, number = 0, step * self.step_samples
        else:
            # More samples than in the first step get separate numbers, which other ranks need not know.
            now.spacing = max(_OVERSIZED_BITS, (now.num_samples - 1).bit_length())
            first, number = _FIRST_OVERSIZED, step << now.spacing
        if number + now.num_samples > _FIRST_OVERSIZED:
            raise ValueError(
                f"{self.num_steps} forwards on {num_ranks} ranks, the first of {self.step_samples} samples, have come "
                "to sample 2**47; expected fewer; say with tempo_torch.samples which samples a forward sees"
            )
        return first + number

    def is_restored(self, now: ForwardPass) -> bool:
        """Returns whether the program has restored the generator's state of a forward that drew."""
        state = self._read_state(now)
        return state is not None and state in self._drawn


class DropoutPlace:
    """One module that draws masks."""

    def __init__(self, name: str, code: int, passes: Passes) -> None:
        self.name, self.code, self.passes = name, code, passes
        self.calls = 0  # in a compiled graph: since the forward, or the backward, began
        self.key_tensor = torch.tensor(_derive_signed(passes.seed, code, 0), dtype=torch.int64)

    def draw(self, device: torch.device, num_rows: int | None = None) -> tuple[int | Tensor, int | Tensor, int]:
        """Returns (key, first row, number of samples) of the mask that is drawn now, to be used once. Of `num_rows` in
        the tensor several may belong to one sample, one behind the other; by default each sample has one."""
        is_traced, now = torch.compiler.is_compiling(), self.passes.get_current()
        first: Any = now.first_sample_tensor if is_traced else now.first_sample
        if first is None:
            first = self.passes.samples.number(now)
        rows = 1 if num_rows is None else -(-num_rows // now.num_samples)
        # Rows that are numbered in another way than samples get other keys. Philox takes consecutive keys.
        shift = 0
        if rows > 1 or now.spacing > _OVERSIZED_BITS:
            first, shift = first % _FIRST_OVERSIZED * rows, rows + (now.spacing << _ROWS_BITS)
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
        key = self.key_tensor if call == 0 else torch.tensor(_derive_signed(self.passes.seed, self.code, call))
        return key if shift == 0 else key + shift


class Passes:
    """The forwards of one model, and the places in it that draw. Of the seed the low 64 bits count."""

    def __init__(self, seed: int, samples: Samples) -> None:
        self.seed, self.samples = seed, samples
        self.places: dict[str, DropoutPlace] = {}
        self.has_repeats = self._knows_repeats = self.keeps_all = False
        # The thread whose forward runs, and the frame in which torch runs it; setdefault is atomic.
        self._owner: dict[str, tuple[int, FrameType | None]] = {}
        # The outermost backward that runs, and what is gone once it has ended, also by an exception.
        self._task: tuple[int, weakref.ref[Any]] | None = None
        self._current: ForwardPass | None = None
        self._past: deque[ForwardPass] = deque(maxlen=_MAX_PASSES)
        self.handles: list[RemovableHandle] = []  # of the hooks by which the forwards are known

    def get_current(self) -> ForwardPass:
        """Returns the forward that runs: in backward, the one whose graph asks for a part of it, unless it is
        compiled."""
        may_be_past = not torch.compiler.is_compiling() and is_in_backward()
        if may_be_past and (found := self._find_past()) is not None and found is not self._current:
            self._current, found.recalled = found, None
        if self._current is None:
            raise RuntimeError(
                "a dropout was called before any forward of the model that was given to tempoize, so which samples it "
                "sees is not known; call that model, or give tempoize the module that is called"
            )
        return self._current

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
        # Lazily: as a rule it is one of the newest of many.
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

    def get_probability(self, p: float) -> float:
        """Returns p; with `keeps_all`, as in a check, a probability above 0 that 16 bits realise as 0."""
        return min(p, 2.0**-20) if self.keeps_all else p

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
        tensor, said = _find_batch(module, args, kwargs), self.samples.said
        device = torch.device("cpu") if tensor is None else tensor.device
        device = torch.device("meta") if isinstance(tensor, FakeTensor) else device
        now = ForwardPass((1 if tensor is None else tensor.size(0)) if said is None else said, device)
        if is_in_backward() and (
            past := self._find_past() or (None if self.samples.is_restored(now) else self._current)
        ):
            # A checkpointed region around the whole forward runs it again.
            self._current, past.is_over, past.counts = past, False, {}
            return
        self._current = now
        if module.training:
            now.first_sample_tensor = torch.tensor(self.samples.number(now), dtype=torch.int64)

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
    file = sys.modules[nn.Module.__module__].__file__
    frames = traceback.walk_stack(inspect.currentframe())
    return next((frame for frame, _ in frames if frame.f_code.co_filename == file), None)


def _is_running(thread: int, frame: FrameType | None) -> bool:
    top = sys._current_frames().get(thread)
    return top is not None and any(each is frame for each, _ in traceback.walk_stack(top))


def get_rank() -> tuple[int, int]:
    """Returns this process's rank in torch.distributed and the number of ranks; (0, 1) without it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _get_next_node() -> int:
    return torch._C._autograd._get_sequence_nr()


def _derive_signed(seed: int, code: int, call: int) -> int:
    key = derive_key(seed, code, call)
    return key - (key >> 63 << 64)


# This is torch._dynamo.assume_constant_result without its import, which takes seconds.
_derive_signed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _find_tensor(args: Any, kwargs: Any) -> Tensor | None:
    """Finds the first tensor of a call that has dimensions and is not empty."""
    values = pytree.tree_leaves((args, kwargs)) if kwargs or len(args) != 1 else args
    return next((each for each in values if isinstance(each, Tensor) and each.dim() > 0 and each.numel() > 0), None)


def _find_batch(module: nn.Module, args: Any, kwargs: Any) -> Tensor | None:
    """Finds the tensor of a call whose first dimension counts the samples: the one that models of transformers call
    their main input, since others, as position_ids, may have one row for all samples; else the first."""
    for name in ("input_ids", "inputs_embeds", getattr(module, "main_input_name", "")):
        for given in (kwargs, *args):
            found = _find_tensor((given.get(name),), {}) if isinstance(given, Mapping) else None
            if found is not None:
                return found
    return _find_tensor(args, kwargs)

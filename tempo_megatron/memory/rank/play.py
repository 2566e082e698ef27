"""Plays the steps of a rank: what stands, and every storage of its micro batches in the order of the schedule.

What the tensors take at most, of which parts that is, what torch's allocator adds to it and what it reserves are
counters of one loop. A block of more than 1 MiB is not split where less than 1 MiB would be left, and counts as
allocated whole: where attention's queries, keys and values of 3 MiB, say, take a block of 4, each layer adds 1 MiB.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tempo_megatron.memory.rank.allocator import Block, CachingAllocator
from tempo_megatron.memory.rank.standing import Born, Buckets, Standing
from tempo_megatron.memory.simulated.chunk_memory import LAYERS, PARTS, ChunkMemory, Segment
from tempo_megatron.memory.tape.tape import FREED, TORCH_PRODUCT


class Event(NamedTuple):
    """The forward or the backward of one micro batch through one chunk of a stage."""

    is_forward: bool
    micro_batch: int
    chunk: int


Library = tuple[int, bool]
"""Whose handle of cuBLAS multiplies: Transformer Engine's (ENGINE_PRODUCT, False), or torch's (TORCH_PRODUCT, ...) of
forward, or of autograd's thread (True)."""


class Counters(NamedTuple):
    """What the steps of a rank showed."""

    moment: str
    """The highest of a step's micro batches: `forward of the loss head`."""
    parts: Mapping[str, int]
    """Part -> bytes then, of those of `estimate.PARTS` that micro batches have."""
    rounding: int
    """What the allocator adds to the tensors at the peak."""
    rounding_at_rest: int
    """And between steps."""
    rounded: int
    """What it counts as allocated at most, the optimizer's step included."""
    reserved: int
    """What it takes from the device, of all streams."""


@dataclasses.dataclass(eq=False)
class _MicroBatch:
    """What one micro batch has of one chunk."""

    chunk: int
    memory: ChunkMemory
    alive: dict[int, Block] = dataclasses.field(default_factory=dict)
    """Number of a storage, or below 0 of a tensor of the micro batch itself -> where it is."""
    mask: list[Block] = dataclasses.field(default_factory=list)
    """Its masks that nobody keeps, until its forward is over."""
    standing: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(("gradients", *PARTS), 0))
    """Part -> bytes behind its last segment, without the micro batch's own tensors."""
    on_host: dict[int, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    """Layer -> number and bytes of each storage that is on the host in place of `alive`."""


class Step:
    """Plays a step as often as it is asked to.

    Args:
        allocator: where everything is.
        chunks: of the rank.
        events: in their order.
        workspaces: whose -> the bytes of each, which the first product of that library allocates.
        buckets: of ZeRO or of Megatron-FSDP.
        moved: for each chunk, of each layer the bytes of each storage that it sends to the host.
        is_combined: whether a forward runs beside the backward before it, one segment of each at a time, as in
            megatron-core 0.16.1 (core/models/common/model_chunk_schedule_plan.py: TransformerModelChunkSchedulePlan).
    """

    def __init__(
        self,
        allocator: CachingAllocator,
        chunks: Sequence[ChunkMemory],
        events: Iterable[tuple[bool, int, int]],
        workspaces: Mapping[Library, Sequence[int]],
        *,
        buckets: Buckets | None = None,
        moved: Sequence[Sequence[Sequence[int]]] | None = None,
        is_combined: bool = False,
    ) -> None:
        self.allocator, self._chunks = allocator, chunks
        # Of the gradient that the schedule has from a backward to the end of the next forward: between interleaved
        # chunks that of the next backward is received ahead (core/pipeline_parallel/schedules.py:2195-2269 and
        # 1740-1960 of megatron-core 0.16.1).
        self._received_bytes = max(chunk.output_bytes for chunk in chunks)
        self._workspaces, self._workspace_bytes = {**workspaces}, 0
        self._buckets = buckets or Buckets()
        self._held: dict[Any, Block] = {}
        self._moved = [_list_moved(*each) for each in zip(chunks, moved or [()] * len(chunks), strict=True)]
        self._turns = list_turns([Event(*each) for each in events], is_combined=is_combined)
        # What others have of the allocator, and what the last step left there.
        self._others = self._left = 0
        # What a chunk's backward leaves, its input and that one's gradient: the chunk has the latest, and the
        # schedule's variables those of the last backward, with the gradient that it took or that is next.
        self._of_chunks: dict[int, list[Block]] = {}
        self._of_schedule: list[Block] = []
        self._last_chunk: int | None = None
        self._in_flight: dict[tuple[int, int], _MicroBatch] = {}
        self.highest, self.moment, self.parts = 0, "", dict[str, int]()
        """The highest sum of the last step's tensors with all that is beside them in the allocator, when that was, and
        of which parts; see Counters."""

    def play(self) -> None:
        """Find `highest`, and when and what it was."""
        self.highest = -1
        self._others = self.allocator.requested - self._left
        latest: dict[int, int] = {}
        for turn in self._turns:
            running = [(each, self._begin(*each, latest)) for each in turn]
            of_turn = [
                each.memory.forward if is_forward else each.memory.backward for (is_forward, *_), each in running
            ]
            for segments in itertools.zip_longest(*of_turn):
                for (_, micro_batch), segment in zip(running, segments, strict=True):
                    if segment is None:
                        continue
                    beside = [other for _, other in running if other is not micro_batch]
                    peak_allocated = self.allocator.peak_allocated
                    self._run(micro_batch, segment, beside)
                    if beside and not segment.is_backward:
                        self.allocator.peak_allocated = peak_allocated
            for (is_forward, number, chunk), micro_batch in running:
                if is_forward:
                    _free(self.allocator, micro_batch.mask)
                    self._forget_last()
                else:
                    del self._in_flight[number, chunk]
                    self._end(micro_batch, is_latest=latest[chunk] == number)
        self._forget_last()
        self._hold({})
        for library in [*self._workspaces]:
            self._make_workspaces(library)
        self._left = self.allocator.requested - self._others

    def _begin(self, is_forward: bool, number: int, chunk: int, latest: dict[int, int]) -> _MicroBatch:
        if not is_forward:
            self._forget_last()
            return self._in_flight[number, chunk]
        memory, latest[chunk] = self._chunks[chunk], number
        found = self._in_flight[number, chunk] = _MicroBatch(chunk, memory)
        first, allocate = memory.forward[0], self.allocator.allocate
        self._hold(self._buckets.list_held(first))
        if memory.input_bytes:
            # It is received before the micro batch is read.
            found.alive[first.events[0][0]] = allocate(memory.input_bytes)
        found.alive.update({-place: allocate(size) for place, size in enumerate(memory.batch_bytes, start=1)})
        found.mask.append(allocate(memory.mask_bytes))
        self._note_highest(self.allocator.requested, found, first, [])
        # The chunk has the new input in the place of the last one's.
        last = self._of_chunks.pop(chunk, [])
        if self._last_chunk == chunk:
            # None where the last backward was that of an earlier micro batch: the schedule has its own.
            self._of_schedule += last
        else:
            _free(self.allocator, last)
        return found

    def _run(self, micro_batch: _MicroBatch, segment: Segment, beside: Sequence[_MicroBatch]) -> None:
        memory, moved, allocator = micro_batch.memory, None, self.allocator
        self._hold(self._buckets.list_held(segment))
        if segment.part == LAYERS:
            moved = self._moved[micro_batch.chunk].get((segment.is_backward, segment.num_before))
        num_moved = 0
        if moved is not None and segment.is_backward:
            # It is there from the begin of the layer's backward.
            for number, size in micro_batch.on_host.pop(moved[0], ()):
                micro_batch.alive[number] = allocator.allocate(size)
                num_moved += size
        is_received = memory.input_bytes > 0 and segment is memory.forward[0]
        begin = allocator.requested - (memory.input_bytes if is_received else 0)
        begin += self._place(micro_batch, segment, is_received=is_received)
        highest, flush = begin + segment.rise, allocator.allocate(self._buckets.count_flush(segment))
        above = max(0, allocator.requested - highest)
        allocator.free(flush)
        # A forward beside a backward takes turns with it inside a layer, too: only what it leaves counts.
        if segment.is_backward or not beside:
            self._note_highest(highest + above, micro_batch, segment, beside, above, segment.workspaces)
        if moved is not None and not segment.is_backward:
            # It is freed when the layer's forward ends.
            num_moved = -self._send(micro_batch, segment, *moved)
        micro_batch.standing[segment.part] += segment.growth - segment.gradient_growth + num_moved
        micro_batch.standing["gradients"] += segment.gradient_growth

    def _send(self, micro_batch: _MicroBatch, segment: Segment, layer: int, sizes: Sequence[int]) -> int:
        """Free what a layer has sent to the host while `segment`, of the next layer, ran: how many bytes.

        A storage is known by its size: the latest one before the segment that is there.
        """
        sent = micro_batch.on_host[layer] = []
        first = next((number for number, size in segment.events if size >= 0), 0)
        before = {number: block.requested for number, block in micro_batch.alive.items() if 0 <= number < first}
        for size in sizes:
            number = max(number for number, of in before.items() if of == size)
            del before[number]
            sent.append((number, size))
            self.allocator.free(micro_batch.alive.pop(number))
        return sum(sizes)

    def _place(self, micro_batch: _MicroBatch, segment: Segment, *, is_received: bool) -> int:
        """Bytes of workspaces that are made meanwhile. `is_received`: the first storage, the input, is there."""
        alive, made = micro_batch.alive, 0
        allocate, free = self.allocator.allocate, self.allocator.free
        for number, size in segment.events[1:] if is_received else segment.events:
            if size >= 0:
                alive[number] = allocate(size)
            elif size == FREED:
                free(alive.pop(number))
            elif self._workspaces:
                made += self._make_workspaces((size, size == TORCH_PRODUCT and segment.is_backward))
        return made

    def _note_highest(
        self,
        num_bytes: int,
        micro_batch: _MicroBatch,
        segment: Segment,
        beside: Sequence[_MicroBatch],
        flush: int = 0,
        workspaces: int = 0,
    ) -> None:
        """Keep what is there if it is more than ever: `num_bytes`, among them `flush`, which reducing a full bucket
        takes, and attention's workspaces. What runs beside counts as transients."""
        if num_bytes <= self.highest:
            return
        self.highest = num_bytes
        held = _sum(self._held.values()) + flush
        others = [each for each in self._in_flight.values() if each is not micro_batch and each not in beside]
        # Its own segment has not counted what it made and freed yet.
        activations = sum(sum(each.standing.values()) for each in others)
        of_batches = sum(sum(each.memory.batch_bytes) + _sum(each.mask) for each in [micro_batch, *others])
        inputs = sum(map(_sum, (self._of_schedule, *self._of_chunks.values())))
        own = num_bytes - self._others - activations - of_batches - inputs - held - self._workspace_bytes
        # Below 0 where the workspaces take less than the segment has freed of its part.
        transients = own - sum(micro_batch.standing.values()) - workspaces
        self.moment = f"{'backward' if segment.is_backward else 'forward'} of the {segment.part}"
        self.parts = {
            "communication buffers": held,
            "stage inputs": inputs,
            "micro batches": of_batches,
            "other micro batches' activations": activations,
            **micro_batch.standing,
            segment.part: micro_batch.standing[segment.part] + min(0, transients),
            "attention's workspaces": workspaces,
            "transients": max(0, transients),
        }

    def _make_workspaces(self, library: Library) -> int:
        """How many bytes they have."""
        num_bytes = _sum(map(self.allocator.allocate, self._workspaces.pop(library, ())))
        self._workspace_bytes += num_bytes
        return num_bytes

    def _end(self, micro_batch: _MicroBatch, *, is_latest: bool) -> None:
        size, alive = micro_batch.memory.input_bytes, micro_batch.alive
        stays = [each for number, each in alive.items() if number >= 0 and size and each.requested == size]
        # The loss and the micro batch.
        _free(self.allocator, [each for each in alive.values() if each not in stays])
        self._last_chunk = micro_batch.chunk
        if is_latest:
            self._of_chunks[micro_batch.chunk] = stays
        else:
            self._of_schedule = stays
        self._of_schedule.append(self.allocator.allocate(self._received_bytes))

    def _forget_last(self) -> None:
        _free(self.allocator, self._of_schedule)
        self._last_chunk = None

    def _hold(self, wanted: Mapping[Any, int]) -> None:
        over = [what for what, block in self._held.items() if wanted.get(what) != block.requested]
        _free(self.allocator, [self._held.pop(what) for what in over])
        self._held |= {what: self.allocator.allocate(size) for what, size in wanted.items() if what not in self._held}


def _free(allocator: CachingAllocator, blocks: list[Block]) -> None:
    """Give all of them back; the list is empty then."""
    while blocks:
        allocator.free(blocks.pop(0))


def _sum(blocks: Iterable[Block]) -> int:
    return sum(block.requested for block in blocks)


def play_rank(step: Step, standing: Standing, *, num_steps: int) -> Counters:
    """Allocate what stands, with the first step where it is made in it, and play steps behind that.

    Moments are made behind the first step's micro batches, in what these have freed. float32 copies of gradients are
    made in each step, so they are placed behind a second one. `step` has an empty allocator; of `num_steps`, at least
    1, the first shows the rounding and the last the peak.
    """
    allocator, tensors = step.allocator, standing.tensors
    buffers = copy.deepcopy(allocator)

    def make(*born: Born) -> list[Block]:
        return [allocator.allocate(tensor.num_bytes) for tensor in tensors if tensor.born in born]

    passing: dict[CachingAllocator, list[Block]] = {allocator: [], buffers: []}
    for tensor in tensors:
        if tensor.born in (Born.FIRST_STEP, Born.EACH_STEP):
            continue
        stream = buffers if tensor.is_in_buffers else allocator
        block = stream.allocate(tensor.num_bytes)
        if tensor.born is Born.PASSING:
            passing[stream].append(block)
            continue
        for of_stream, blocks in passing.items():
            _free(of_stream, blocks)
    if num_steps == 1 or any(tensor.born in (Born.FIRST_STEP, Born.EACH_STEP) for tensor in tensors):
        step.play()
    copies = make(Born.EACH_STEP)
    make(Born.FIRST_STEP)
    if _sum(copies):
        _free(allocator, copies)
        step.play()
        copies = make(Born.EACH_STEP)
    of_buffers = buffers.allocated - buffers.requested
    at_rest = of_buffers + allocator.allocated - allocator.requested
    rounding, allocator.peak_allocated = 0, allocator.allocated
    gradients = sum(t.num_bytes for t in tensors if t.part == "gradients" and t.born is not Born.PASSING)
    for number in range(num_steps):
        _free(allocator, copies)
        allocator.peak_allocated, before = allocator.allocated, allocator.peak_allocated
        step.play()
        if number == 0:
            rounding = of_buffers + allocator.peak_allocated - step.highest
        allocator.peak_allocated = max(allocator.peak_allocated, before)
        copies = make(Born.EACH_STEP)
        allocator.free(allocator.allocate(max(0, standing.reduction - gradients)))
        more = max(0, standing.step_gradients - gradients), standing.step_transient
        _free(allocator, [allocator.allocate(each) for each in more])
    rounded, reserved = allocator.peak_allocated + buffers.allocated, allocator.reserved + buffers.reserved
    return Counters(step.moment, step.parts, rounding, at_rest, rounded, reserved)


def _list_moved(
    chunk: ChunkMemory, moved: Sequence[Sequence[int]]
) -> dict[tuple[bool, int], tuple[int, Sequence[int]]]:
    """(whether it is backward, place among the segments of layers there) -> a layer, and the bytes of each storage of
    it that leaves, or comes, meanwhile.

    While a layer runs, what the layer before it sent leaves, or comes back. The backward of a stage that has no head
    begins with a segment of its last layer in which nothing is moved yet.
    """
    sent = [(layer, sizes) for layer, sizes in enumerate(moved[:-1]) if sizes]
    end = sum(each.part == LAYERS for each in chunk.backward) - 2
    forward = {(False, layer + 1): (layer, sizes) for layer, sizes in sent}
    return forward | {(True, end - layer): (layer, sizes) for layer, sizes in sent}


def list_events(
    stage: int,
    num_stages: int,
    num_chunks: int,
    num_micro_batches: int,
    group: int | None = None,
    *,
    is_combined: bool = False,
) -> Iterator[Event]:
    """What a stage does in one step, in Megatron's order (schedules.py: get_schedule_table of megatron-core 0.16.1).

    Args:
        num_chunks: chunks of layers per stage; 1 is 1F1B without interleaving.
        group: how many micro batches pass through one chunk before the next chunk begins; None is p.
        is_combined: whether a forward runs beside the backward of another micro batch; of chunks one more goes ahead.
    """
    if num_chunks == 1:
        places = [(micro_batch, 0) for micro_batch in range(num_micro_batches)]
        warmup = num_stages - stage - 1
    else:
        group = group or num_stages
        places = [
            (micro_batch, chunk)
            for first in range(0, num_micro_batches, group)
            for chunk in range(num_chunks)
            for micro_batch in range(first, min(first + group, num_micro_batches))
        ]
        warmup = 2 * (num_stages - stage - 1) + (num_chunks - 1) * group + is_combined
    warmup = min(warmup, len(places))
    for number in range(len(places) + warmup):
        if number < len(places):
            micro_batch, chunk = places[number]
            yield Event(True, micro_batch, chunk)
        if number >= warmup:
            micro_batch, chunk = places[number - warmup]
            yield Event(False, micro_batch, num_chunks - 1 - chunk)


def list_turns(events: Sequence[Event], *, is_combined: bool) -> list[list[Event]]:
    """Events that run at a time; what is in flight behind the last one has its backward then.

    A stage of one chunk ends when it has twice had as many micro batches in flight as it ever has: later ones repeat
    them, with the same blocks.
    """
    if not any(event.chunk for event in events):
        levels = list(itertools.accumulate(1 if event.is_forward else -1 for event in events))
        full = [place for place, level in enumerate(levels) if level == max(levels)]
        events = events[: full[:2][-1] + 2] if full else events
    in_flight = {each[1:] for each in events if each.is_forward} - {each[1:] for each in events if not each.is_forward}
    last = sorted((Event(False, *each) for each in in_flight), key=lambda each: (-each.chunk, each.micro_batch))
    turns: list[list[Event]] = []
    for event in [*events, *last]:
        if is_combined and event.is_forward and turns and not turns[-1][0].is_forward:
            # The forward's segment is over when the backward's runs.
            turns[-1].insert(0, event)
        else:
            turns.append([event])
    return turns

"""Plays the steps of a rank: what stands, and every storage of its micro batches in the order of the schedule.

What the tensors take at most, of which parts that is, what torch's allocator adds to it and what it reserves are
counters of one loop. A block of more than 1 MiB is not split where less than 1 MiB would be left, and counts as
allocated whole: where attention's queries, keys and values of 3 MiB, say, take a block of 4, each layer adds 1 MiB.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tempo_megatron.memory.rank.allocator import Block, CachingAllocator, Library
from tempo_megatron.memory.rank.schedule import Event, list_turns
from tempo_megatron.memory.rank.standing import Born, Buckets, Standing
from tempo_megatron.memory.simulated.chunk_memory import LAYERS, PARTS, ChunkMemory, Segment
from tempo_megatron.memory.tape.tape import ENGINE_PRODUCT, FREED, TORCH_PRODUCT

_Tensor = tuple[Block | None, int]
"""A block and the bytes of the tensor in it."""

_LIBRARIES = {
    (ENGINE_PRODUCT, False): Library.ENGINE,
    (ENGINE_PRODUCT, True): Library.ENGINE,
    (TORCH_PRODUCT, False): Library.TORCH,
    (TORCH_PRODUCT, True): Library.TORCH_BACKWARD,
}
"""A product, and whether it is in backward -> whose handle multiplies."""


class Peak(NamedTuple):
    """The highest moment of a step's micro batches."""

    name: str
    """`forward of the loss head`."""

    parts: Mapping[str, int]
    """Part -> bytes, of those of `estimate.PART_NAMES` that micro batches have."""


class Counters(NamedTuple):
    """What the steps of a rank showed."""

    peak: Peak
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
    alive: dict[int, _Tensor] = dataclasses.field(default_factory=dict)
    """Number of a storage, or below 0 of a tensor of the micro batch itself -> where it is."""

    mask: list[_Tensor] = dataclasses.field(default_factory=list)
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
        self._held: dict[Any, _Tensor] = {}
        self._moved = [_list_moved(*each) for each in zip(chunks, moved or [()] * len(chunks), strict=True)]
        self._turns = list_turns([Event(*each) for each in events], is_combined=is_combined)
        self._exact = 0
        # What a chunk's backward leaves, its input and that one's gradient: the chunk has the latest, and the
        # schedule's variables those of the last backward, with the gradient that it took or that is next.
        self._of_chunks: dict[int, list[_Tensor]] = {}
        self._of_schedule: list[_Tensor] = []
        self._last_chunk: int | None = None
        self._in_flight: dict[tuple[int, int], _MicroBatch] = {}
        self.highest = 0
        """The highest sum of the last step's tensors, those among them that were there before it."""
        self.peak = Peak("", {})
        """Of the last step."""

    def count_left(self) -> int:
        """Bytes of the tensors that stay from the last step to the next."""
        return self._exact

    def play(self) -> None:
        """Find `highest` and `peak`."""
        self.highest = -1
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
                    self._drop(micro_batch.mask)
                    self._forget_last()
                else:
                    del self._in_flight[number, chunk]
                    self._end(micro_batch, is_latest=latest[chunk] == number)
        self._forget_last()
        self._hold({})
        for library in [*self._workspaces]:
            self._make_workspaces(library)

    def _begin(self, is_forward: bool, number: int, chunk: int, latest: dict[int, int]) -> _MicroBatch:
        if not is_forward:
            self._forget_last()
            return self._in_flight[number, chunk]
        memory, latest[chunk] = self._chunks[chunk], number
        found = self._in_flight[number, chunk] = _MicroBatch(chunk, memory)
        first = memory.forward[0]
        self._hold(self._buckets.list_held(first))
        if memory.input_bytes:
            # It is received before the micro batch is read.
            found.alive[first.events[0][0]] = self._make(memory.input_bytes)
        for place, size in enumerate(memory.batch_bytes, start=1):
            found.alive[-place] = self._make(size)
        found.mask.append(self._make(memory.mask_bytes))
        self._note_highest(self._exact, found, first, [])
        # The chunk has the new input in the place of the last one's.
        last = self._of_chunks.pop(chunk, [])
        if self._last_chunk == chunk:
            # None where the last backward was that of an earlier micro batch: the schedule has its own.
            self._of_schedule += last
        else:
            self._drop(last)
        return found

    def _run(self, micro_batch: _MicroBatch, segment: Segment, beside: Sequence[_MicroBatch]) -> None:
        memory, moved = micro_batch.memory, None
        self._hold(self._buckets.list_held(segment))
        begin = self._exact
        if segment.part == LAYERS:
            moved = self._moved[micro_batch.chunk].get((segment.is_backward, segment.num_before))
        if moved is not None and segment.is_backward:
            # It is there from the begin of the layer's backward.
            for number, size in micro_batch.on_host.pop(moved[0], ()):
                micro_batch.alive[number] = self._make(size)
        num_moved, begin = self._exact - begin, self._exact
        if memory.input_bytes and segment is memory.forward[0]:
            begin -= memory.input_bytes
        begin += self._place(micro_batch, segment, is_received=begin < self._exact)
        highest, flush = begin + segment.rise, [self._make(self._buckets.count_flush(segment))]
        above = max(0, self._exact - highest)
        self._drop(flush)
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
        sent = micro_batch.on_host[layer] = [(0, size) for size in sizes]
        first = next((number for number, size in segment.events if size >= 0), 0)
        before = {number: size for number, (_, size) in micro_batch.alive.items() if 0 <= number < first}
        for place, size in enumerate(sizes):
            number = max(number for number, of in before.items() if of == size)
            del before[number]
            sent[place] = number, size
            self._drop([micro_batch.alive.pop(number)])
        return sum(sizes)

    def _place(self, micro_batch: _MicroBatch, segment: Segment, *, is_received: bool) -> int:
        """Bytes of workspaces that are made meanwhile.

        is_received: whether the first storage, the input, is there.
        """
        alive, exact, made = micro_batch.alive, self._exact, 0
        allocate, free = self.allocator.allocate, self.allocator.free
        for number, size in segment.events[1:] if is_received else segment.events:
            if size >= 0:
                alive[number] = allocate(size), size
                exact += size
            elif size == FREED:
                block, size = alive.pop(number)
                free(block)
                exact -= size
            elif self._workspaces:
                made += self._make_workspaces(_LIBRARIES[size, segment.is_backward])
        self._exact = exact + made
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
        held = sum(size for _, size in self._held.values()) + flush
        others = [each for each in self._in_flight.values() if each is not micro_batch and each not in beside]
        # Its own segment has not counted what it made and freed yet.
        activations = sum(sum(each.standing.values()) for each in others)
        batches = [micro_batch, *others]
        of_batches = sum(each.memory.micro_batch_bytes + sum(size for _, size in each.mask) for each in batches)
        inputs = sum(size for tensors in (self._of_schedule, *self._of_chunks.values()) for _, size in tensors)
        own = num_bytes - activations - of_batches - inputs - held - self._workspace_bytes
        # Below 0 where the workspaces take less than the segment has freed of its part.
        transients = own - sum(micro_batch.standing.values()) - workspaces
        self.peak = Peak(
            f"{'backward' if segment.is_backward else 'forward'} of the {segment.part}",
            {
                "communication buffers": held,
                "stage inputs": inputs,
                "micro batches": of_batches,
                "other micro batches' activations": activations,
                **micro_batch.standing,
                segment.part: micro_batch.standing[segment.part] + min(0, transients),
                "attention's workspaces": workspaces,
                "transients": max(0, transients),
            },
        )

    def _make_workspaces(self, library: Library) -> int:
        """How many bytes they have."""
        made = [self._make(size)[1] for size in self._workspaces.pop(library, ())]
        self._workspace_bytes += sum(made)
        return sum(made)

    def _end(self, micro_batch: _MicroBatch, *, is_latest: bool) -> None:
        chunk, size, alive = micro_batch.chunk, micro_batch.memory.input_bytes, micro_batch.alive
        stays = [each for number, each in alive.items() if number >= 0 and size and each[1] == size]
        # The loss and the micro batch.
        self._drop([each for each in alive.values() if each not in stays])
        self._last_chunk = chunk
        if is_latest:
            self._of_chunks[chunk] = stays
        else:
            self._of_schedule = stays
        self._of_schedule.append(self._make(self._received_bytes))

    def _forget_last(self) -> None:
        self._drop(self._of_schedule)
        self._last_chunk = None

    def _hold(self, wanted: Mapping[Any, int]) -> None:
        self._drop([self._held.pop(what) for what, (_, size) in [*self._held.items()] if wanted.get(what) != size])
        for what, size in wanted.items():
            if what not in self._held:
                self._held[what] = self._make(size)

    def _make(self, size: int) -> _Tensor:
        self._exact += size
        return self.allocator.allocate(size), size

    def _drop(self, tensors: list[_Tensor]) -> None:
        for block, size in tensors:
            self.allocator.free(block)
            self._exact -= size
        tensors.clear()


def play_rank(step: Step, standing: Standing, *, num_steps: int) -> Counters:
    """Allocate what stands, with the first step where it is made in it, and play steps behind that.

    Moments are made behind the first step's micro batches, in what these have freed. float32 copies of gradients are
    made in each step, so they are placed behind a second one.

    Args:
        step: of the rank, on an empty allocator.
        standing: of the rank.
        num_steps: at least 1; the first of them shows the rounding, the last one the peak.
    """
    allocator, tensors = step.allocator, standing.tensors
    buffers = allocator.add_stream()

    def make(*born: Born) -> list[Block | None]:
        return [allocator.allocate(tensor.num_bytes) for tensor in tensors if tensor.born in born]

    def free(blocks: list[Block | None]) -> None:
        for block in blocks:
            allocator.free(block)

    def count_allocated(of_stream: int) -> int:
        return of_stream + sum(each.allocated for each in allocator.streams)

    passing: list[tuple[CachingAllocator, Block | None]] = []
    for tensor in tensors:
        if tensor.born in (Born.FIRST_STEP, Born.EACH_STEP):
            continue
        stream = buffers if tensor.is_in_buffers else allocator
        block = stream.allocate(tensor.num_bytes)
        if tensor.born is Born.PASSING:
            passing.append((stream, block))
            continue
        while passing:
            of_passing, block = passing.pop(0)
            of_passing.free(block)
    if make_later := any(tensor.born in (Born.FIRST_STEP, Born.EACH_STEP) for tensor in tensors):
        step.play()
    copies = make(Born.EACH_STEP)
    make(Born.FIRST_STEP)
    if any(block is not None for block in copies):
        free(copies)
        step.play()
        copies = make(Born.EACH_STEP)
    sizes = {born: sum(tensor.num_bytes for tensor in tensors if tensor.born is born) for born in Born}
    stays = sum(sizes[born] for born in (Born.SETUP, Born.FIRST_STEP, Born.MICRO_BATCHES))
    at_rest = count_allocated(allocator.allocated) - stays - sizes[Born.EACH_STEP] - step.count_left()
    if not make_later and num_steps == 1:
        step.play()
    rounding, allocator.peak_allocated = 0, allocator.allocated
    gradients = sum(t.num_bytes for t in tensors if t.part == "gradients" and t.born is not Born.PASSING)
    for number in range(num_steps):
        free(copies)
        allocator.peak_allocated, before = allocator.allocated, allocator.peak_allocated
        step.play()
        if number == 0:
            rounding = count_allocated(allocator.peak_allocated) - stays - step.highest
        allocator.peak_allocated = max(allocator.peak_allocated, before)
        copies = make(Born.EACH_STEP)
        allocator.free(allocator.allocate(max(0, standing.reduction - gradients)))
        more = max(0, standing.step_gradients - gradients), standing.step_transient
        free([allocator.allocate(each) for each in more])
    reserved = allocator.reserved + sum(each.reserved for each in allocator.streams)
    return Counters(step.peak, rounding, at_rest, count_allocated(allocator.peak_allocated), reserved)


_Moved = tuple[int, Sequence[int]]
"""A layer, and the bytes of each storage that it sends to the host."""


def _list_moved(chunk: ChunkMemory, moved: Sequence[Sequence[int]]) -> dict[tuple[bool, int], _Moved]:
    """(whether it is backward, place among the segments of layers there) -> what leaves, or comes, meanwhile.

    While a layer runs, what the layer before it sent leaves, or comes back. The backward of a stage that has no head
    begins with a segment of its last layer in which nothing is moved yet.
    """
    sent = [*enumerate(moved[:-1])]
    ahead = sum(each.part == LAYERS for each in chunk.backward) - len(moved)
    found: dict[tuple[bool, int], _Moved] = {(False, layer + 1): (layer, sizes) for layer, sizes in sent if sizes}
    found.update({(True, ahead + place): each for place, each in enumerate(sent[::-1]) if each[1]})
    return found

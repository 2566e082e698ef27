"""Gives each dropout mask its key: seed, sample, layer and place, whatever the layout over devices.

A mask is a pure function of (seed, global sample, stack, layer, site, global head, global row, global column). The
trainer announces the samples of each micro batch. The announcement is stored as a named state of Megatron's CUDA RNG
tracker. Every recomputation saves and restores the tracker's states, so a recomputed forward sees the samples of its
own micro batch, under any pipeline schedule. No generator is ever advanced.

The state also holds the depth of multi-token prediction, whose layers embed the tokens again and have numbers that the
decoder's layers have too. `begin_prediction` counts the depth before each of them, outside of what is recomputed.

Megatron registers every state of its tracker with CUDA graphs, saves it in checkpoints, and converts it from bytes to a
generator and back. So this one has the form of the tracker's other states: the run's seed, and the sample as offset.

A replayed CUDA graph runs no Python, so numbers of the host would stay those of its capture. In runs with CUDA graphs
the sample therefore also lies in one tensor on the device, which `set_micro_batch` writes before each replay and each
dropout copies inside of the graph. A dropout adds to it the difference, as known to the host, between its micro batch's
sample and the one that was written last. That is 0 in a graph of a layer; in a graph of a whole step with several micro
batches it is the distance to the first one; and in the recomputed forward of an earlier micro batch, outside of graphs,
it leads back to that one.
"""

from __future__ import annotations

import enum
import functools
import struct
import sys
import weakref
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tempo_kernels.philox import derive_key
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.linear import is_in_backward

STATE_NAME = "tempo-micro-batch"
# A CUDA generator's offset counts words of Philox, and must be a whole number of blocks of four.
_WORDS = 4
_SAMPLES = 2**48  # the offset holds the depth above the sample
# A generator's state as bytes: the seed, then the offset, in this machine's byte order.
_STATE = struct.Struct("=Qq")

_REMEDY = (
    "call tempo_megatron.set_micro_batch(seed, first_sample) before each forward in training mode (with another seed "
    'for other masks of the same samples), call model.eval() first, or set tempo.dropout and tempo.attention to "off"'
)

# The keys of the masks that forwards have drawn since the micro batch was announced.
_DRAWN: set[int] = set()
# (seed, position) of each state that is a generator, which tells no numbers while a graph is captured.
_NUMBERS: weakref.WeakKeyDictionary[torch.Generator, tuple[int, int]] = weakref.WeakKeyDictionary()


class _SampleForGraphs:
    """The sample that captured CUDA graphs read, in runs that have graphs."""

    # 0-dim int64, at one address from the first announcement on; None in a run without graphs.
    tensor: Tensor | None = None
    _written = 0
    _captured_seed: int | None = None
    _was_announced_in_capture = False

    def announce(self, seed: int, first_sample: int, device: torch.device | None) -> None:
        """Write the sample, except while a graph is captured, which would write that number in each replay."""
        if self._captured_seed not in (None, seed):
            raise RuntimeError(
                f"seed is {seed}, and a CUDA graph was captured with the keys of seed {self._captured_seed}, which its "
                "replays use; expected one seed; give another first_sample for other masks"
            )
        self._was_announced_in_capture = is_capturing()
        if self._was_announced_in_capture:
            return
        if self.tensor is None and device is not None:
            self.tensor = torch.zeros((), dtype=torch.int64, device=device)
        elif device is None and self._captured_seed is None:
            self.tensor = None
        if self.tensor is not None:
            self.tensor.fill_(first_sample)
            self._written = first_sample

    def read(self, seed: int, first_sample: int) -> int | Tensor:
        """`first_sample`; with graphs as a copy of the tensor plus what leads from the sample that was written."""
        if is_capturing():
            if self.tensor is None:
                raise RuntimeError(
                    "a CUDA graph is captured, whose replays would draw the masks of this micro batch again; expected "
                    "the sample on the device; call tempo_megatron.set_micro_batch(seed, first_sample, "
                    'device="cuda") before the capture'
                )
            if is_in_backward() and not self._was_announced_in_capture:
                raise RuntimeError(
                    "a recomputed forward with dropout is captured in a CUDA graph, which would read the sample of the "
                    "micro batch that runs at its replay; expected recomputation outside of the graph; or capture "
                    "forward and backward in one graph, and call set_micro_batch inside of it"
                )
            self._captured_seed = seed
        return first_sample if self.tensor is None else self.tensor + (first_sample - self._written)


_FOR_GRAPHS = _SampleForGraphs()


class Stack(enum.IntEnum):
    """The stacks of layers that one model can have; layers of each are numbered from 1."""

    DECODER = 0
    ENCODER = 1
    PREDICTION = 2
    """Multi-token prediction, whose layer number is the depth: 1 predicts the token after the next one."""


class Site(enum.IntEnum):
    """The places of a layer where dropout is applied; the embedding is layer 0. The numbers are part of the masks."""

    EMBEDDING = 0
    ATTENTION = 1
    SELF_ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3
    CROSS_ATTENTION_OUTPUT = 4
    CROSS_ATTENTION = 5
    MAMBA_OUTPUT = 6


def list_dropouts(config: Any) -> dict[str, str]:
    """The operations that draw masks in a model of a TransformerConfig -> the field that holds their probability."""
    fields = {"dropout": "hidden_dropout", "attention": "attention_dropout"}
    return {operation: field for operation, field in fields.items() if getattr(config, field) > 0}


def draws_masks(config: Any, tempo_config: TempoConfig) -> bool:
    """Whether a model of a TransformerConfig draws Tempo's masks, so that its micro batches must be announced."""
    return any(tempo_config.values_of(operation) != {"off"} for operation in list_dropouts(config))


def set_micro_batch(
    seed: int,
    first_sample: int,
    *,
    cu_seqlens: Tensor | None = None,
    document_samples: Tensor | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Announce which samples the next forward sees. Call it before the forward of every training micro batch.

    Args:
        seed: the run's seed, any 64-bit integer; equal on every rank.
        first_sample: index of the micro batch's first sample over the whole run, as if one device consumed all samples
            in order; in [0, 2**48). The samples of a micro batch are consecutive.
        cu_seqlens: int32 [n + 1], where the n documents of a packed row begin and end, as in its PackedSeqParams (the
            padded boundaries, where it has them); on a CPU, because a GPU would be waited for.
        document_samples: int64 [n], the index of each document's sample over the whole run. A document's masks are then
            those that it has in a row of its own. Where documents are not announced, a packed row is one sample,
            first_sample, and its masks are functions of the position in it.
        device: where forwards run as CUDA graphs. Captured dropouts then read first_sample from a tensor there, and
            the call before each replay chooses its masks. Not needed with Megatron's graphs, whose RNG tracker says it.

    Raises ValueError where an index is out of range, or the documents do not fit one another; RuntimeError where the
    seed changes after a graph was captured.
    """
    documents = _pack_documents(cu_seqlens, document_samples)
    if not 0 <= first_sample < _SAMPLES:
        raise ValueError(f"first_sample is {first_sample}; it must be in [0, 2**48)")
    graphs_device = _find_device_of_graphs() if device is None else torch.device(device)
    if graphs_device is not None and documents:
        raise ValueError(
            "document_samples are given in a run with CUDA graphs, which read one first sample; leave them out, or "
            "turn CUDA graphs off"
        )
    _DRAWN.clear()
    _FOR_GRAPHS.announce(seed % 2**64, first_sample, graphs_device)
    _set_state(seed, first_sample, documents)


def forget_graphs() -> None:
    """Begin anew as in a process without CUDA graphs: those that were captured are replayed no more."""
    vars(_FOR_GRAPHS).clear()


def begin_prediction(layer: torch.nn.Module, *_: Any) -> None:
    """The pre-forward hook of a layer of multi-token prediction: what follows is drawn for the next depth."""
    if layer.training and STATE_NAME in get_cuda_rng_tracker().states_:
        seed, position, documents = _read_state()
        # Where nothing is drawn, nobody may announce micro batches, and the depth would grow for ever.
        _set_state(seed, (position + _SAMPLES) % 2**60, documents)


def count_depths(prediction_layers: Iterable[torch.nn.Module]) -> None:
    """Give each layer of multi-token prediction `begin_prediction` as a hook, if it has none."""
    for layer in prediction_layers:
        if begin_prediction not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(begin_prediction)


def _find_device_of_graphs() -> torch.device | None:
    """Where Megatron's tracker keeps generators, as it does for CUDA graphs; None where it keeps bytes."""
    states = get_cuda_rng_tracker().states_.values()
    return next((state.device for state in states if isinstance(state, torch.Generator)), None)


def _set_state(seed: int, position: int, documents: bytes) -> None:
    """Put a new state, because recomputation holds those of earlier micro batches; for CUDA graphs a generator.

    position: the first sample, plus the depth times _SAMPLES.
    """
    seed, offset, device = seed % 2**64, _WORDS * position, _find_device_of_graphs()
    state: Tensor | torch.Generator
    if device is None:
        with unset_fake_temporarily():  # memory is counted on tensors without numbers
            state = torch.tensor(list(_STATE.pack(seed, offset) + documents), dtype=torch.uint8)
    else:
        state = torch.Generator(device)
        _NUMBERS[state] = seed, position
        if not is_capturing():  # when its numbers could not be set
            state.manual_seed(seed)
            state.set_offset(offset)
    get_cuda_rng_tracker().states_[STATE_NAME] = state


def _pack_documents(cu_seqlens: Tensor | None, document_samples: Tensor | None) -> bytes:
    """The boundaries and samples as int64, one behind the other; nothing where they are not given."""
    if cu_seqlens is None and document_samples is None:
        return b""
    if cu_seqlens is None or document_samples is None:
        raise ValueError("one of cu_seqlens and document_samples is given; expected both; give the other too")
    boundaries, samples = cu_seqlens.tolist(), document_samples.tolist()
    if len(boundaries) != len(samples) + 1 or boundaries != sorted(boundaries) or boundaries[0] < 0:
        raise ValueError(
            f"cu_seqlens is {boundaries}, for {len(samples)} document_samples; expected {len(samples) + 1} numbers, "
            "growing from 0 or more"
        )
    if wrong := [sample for sample in samples if not 0 <= sample < _SAMPLES]:
        raise ValueError(f"document_samples holds {wrong[0]}; it must be in [0, 2**48)")
    return struct.pack(f"={len(boundaries + samples)}q", *boundaries, *samples)


def _unpack_documents(documents: bytes) -> tuple[list[int], list[int]]:
    """Boundaries and samples."""
    numbers = [number for (number,) in struct.iter_unpack("=q", documents)]
    num_documents = len(numbers) // 2
    return numbers[: num_documents + 1], numbers[num_documents + 1 :]


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_warming_up() -> bool:
    """Whether Megatron runs forwards of one micro batch several times, to capture a graph."""
    graphs = sys.modules.get("megatron.core.transformer.cuda_graphs")
    return any(getattr(graphs, name, bool)() for name in ("is_graph_warmup", "is_graph_capturing"))


def read_micro_batch() -> tuple[int, int]:
    """(seed, first_sample) of the micro batch whose forward, or recomputed forward, is running."""
    seed, position, _ = _read_state()
    return seed, position % _SAMPLES


def _read_state() -> tuple[int, int, bytes]:
    """(seed, position, documents), as `_set_state` takes them."""
    state = get_cuda_rng_tracker().states_.get(STATE_NAME)
    if state is None:
        raise RuntimeError(f"Tempo's dropout does not know which samples it sees; {_REMEDY}")
    if isinstance(state, torch.Generator):
        return *(_NUMBERS.get(state) or (state.initial_seed(), state.get_offset() // _WORDS)), b""
    # Whole, because a slice of it is a tensor without numbers where memory is counted on such tensors.
    packed = bytes(state.tolist())
    seed, offset = _STATE.unpack(packed[: _STATE.size])
    return seed, offset // _WORDS, packed[_STATE.size :]


def _read_documents() -> bytes:
    return _read_state()[-1] if STATE_NAME in get_cuda_rng_tracker().states_ else b""


def read_document_samples(x: Tensor) -> Tensor | None:
    """The document_samples that were announced for the running micro batch, on x's device; None without. Equal calls
    return one tensor, which layers therefore keep once."""
    documents = _read_documents()
    return _make_document_samples(documents, *_get_place(x)) if documents else None


def _get_place(x: Tensor) -> tuple[torch.device, Any]:
    """By what cached tensors are found: the fake tensors of one mode are of no use in another, or among real ones."""
    return x.device, getattr(x, "fake_mode", None)


@functools.lru_cache(maxsize=16)
def _make_document_samples(documents: bytes, device: torch.device, fake_mode: Any) -> Tensor:
    return torch.tensor(_unpack_documents(documents)[1], dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=4096)
def derive_site_key(seed: int, stack: Stack, layer_number: int, site: Site) -> int:
    """The 64-bit key of the masks at `site` of global layer `layer_number` of `stack`: no two places share one."""
    # A decoder's keys have no stack in them: they are older than stacks.
    path = (layer_number, site) if stack == Stack.DECODER else (layer_number, site, stack)
    return derive_key(seed, *map(int, path))


def find_key_and_sample(layer_number: int, site: Site, stack: Stack = Stack.DECODER) -> tuple[int, int | Tensor]:
    """(64-bit key, first sample) for a dropout at `site` of layer `layer_number` of `stack` in this forward.

    The layer number is global and from 1 on. Inside multi-token prediction the depth counts instead. In runs with CUDA
    graphs the sample is a 0-dim int64 tensor on their device.

    Raises RuntimeError where a forward, or the replay of a graph, would draw the masks of an earlier forward.
    """
    seed, position, _ = _read_state()
    depth, first_sample = divmod(position, _SAMPLES)
    if depth:
        layer_number, stack = depth, Stack.PREDICTION
    key = derive_site_key(seed, stack, layer_number, site)
    if not (is_in_backward() or is_capturing() or _is_warming_up()):
        if key in _DRAWN:
            raise RuntimeError(
                f"dropout at {site.name} of {stack.name} layer {layer_number} would draw one mask twice: a second "
                f"forward in training mode runs, and no micro batch was announced since the first; {_REMEDY}"
            )
        _DRAWN.add(key)
    return key, _FOR_GRAPHS.read(seed, first_sample)


class Segment(NamedTuple):
    """Contiguous rows of a document that a rank holds, of which the first is counted within the document."""

    document: int
    first_row: int
    num_rows: int


def compute_document_segments(boundaries: Sequence[int], rank: int, size: int) -> list[Segment]:
    """What a context-parallel rank holds of each document of a row, in the order in which it holds it.

    Megatron cuts a document into 2 * size chunks, and a rank takes the chunks rank and 2 * size - 1 - rank, so that
    causal attention costs all ranks the same (megatron/core/utils.py:1994 and :2041 of 0.16.1).

    Args:
        boundaries: where documents begin and end in the row; a row that is not packed is one document.
        rank, size: of the context-parallel group.

    Raises ValueError where a document cannot be shared.
    """
    found = []
    for document, (start, end) in enumerate(pairwise(boundaries)):
        if size > 1 and (end - start) % (2 * size):
            raise ValueError(
                f"document {document} of a row has {end - start} tokens, and {size} context-parallel ranks take two "
                f"equal chunks of it each; expected a multiple of {2 * size}; pad each document, and give the padded "
                "boundaries"
            )
        chunk = (end - start) // (2 * size)
        chunks = [(rank * chunk, chunk), ((2 * size - 1 - rank) * chunk, chunk)] if size > 1 else [(0, end - start)]
        found += [Segment(document, *each) for each in chunks if end > start]
    return found


def compute_rows(x: Tensor, config: Any) -> dict[str, Any]:
    """Which global rows the hidden states of this rank are: the arguments `first_row` or `rows` of a dropout, and
    where documents were announced `first_sample` and `samples`.

    Args:
        x: the hidden states, [s / (cp * t), b, h] under sequence parallelism, else [s / cp, b, h].
        config: has `sequence_parallel` and `context_parallel_size`, as a TransformerConfig.

    Equal calls return one tensor on x's device, which layers therefore keep once. A tensor-parallel rank holds a part
    of its context-parallel rank's rows.
    """
    parts, part = 1, 0
    if config.sequence_parallel:
        parts = parallel_state.get_tensor_model_parallel_world_size()
        part = parallel_state.get_tensor_model_parallel_rank()
    size = config.context_parallel_size
    rank = parallel_state.get_context_parallel_rank() if size > 1 else 0
    place = rank, size, parts * x.size(0), *_get_place(x)
    start, stop = part * x.size(0), (part + 1) * x.size(0)
    if documents := _read_documents():
        rows, samples = _make_rows(documents, read_micro_batch()[1], *place)
        return {"first_sample": 0, "rows": rows[start:stop], "samples": samples[start:stop]}
    offset = 0
    for _, first_row, count in compute_document_segments((0, size * parts * x.size(0)), rank, size):
        if offset <= start and stop <= offset + count:
            return {"first_row": first_row + start - offset}
        offset += count
    return {"rows": _cut_rows(start, stop, *place)}


@functools.lru_cache(maxsize=16)
def _cut_rows(start: int, stop: int, *place: Any) -> Tensor:
    """The rows of a tensor-parallel rank whose row is not packed, which alone are kept."""
    return _make_rows(b"", 0, *place)[0][start:stop].clone()


@functools.lru_cache(maxsize=16)
def _make_rows(
    documents: bytes, first_sample: int, rank: int, size: int, num_tokens: int, device: torch.device, fake_mode: Any
) -> tuple[Tensor, Tensor]:
    """The row within its document, and the sample, of each token of a context-parallel rank, int64; a token of no
    document stays where it is. Without documents the row is one."""
    boundaries, document_samples = (
        _unpack_documents(documents) if documents else ([0, size * num_tokens], [first_sample])
    )
    rows = torch.arange(num_tokens, dtype=torch.int64, device=device)
    samples = torch.full_like(rows, first_sample)
    start = boundaries[0] // size
    for document, row, count in compute_document_segments(boundaries, rank, size):
        rows[start : start + count] = torch.arange(row, row + count, dtype=torch.int64)
        samples[start : start + count] = document_samples[document]
        start += count
    return rows, samples

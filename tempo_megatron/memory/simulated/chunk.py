"""Runs a pipeline chunk forward and backward on fake tensors: the real modules at their real size.

The modules are those of `tempo_megatron.models.build`, as rank 0 of a tensor-parallel group whose collectives do
nothing. Of many layers alike a few run and stand for the others. Three stacks of stock modules are known:

- "cpu", Megatron's local modules on a CPU. Tempo's operations run the functions that a CPU runs, block by block, so
  that what they make inside themselves counts. This is exact, but for what Inductor's code makes where it runs.
- "local", the same modules on a GPU: dropout keeps a byte per element, and Tempo's operations are kernels that make
  nothing inside, but for the loss head, whose chunks are a GPU's.
- "transformer_engine", on a GPU too: attention besides keeps q, k, v, its output and a logsumexp.

Not seen: that Tempo's in-place norm keeps more of channels whose gamma is nearly 0, and on a GPU a 64th of its output,
and what kernels of torch and Transformer Engine take and give back inside themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from tempo_kernels.gelu import make_tables
from tempo_megatron.memory.fake_tensors import use_fake_tensors
from tempo_megatron.memory.run import OptimizerSettings, Run
from tempo_megatron.memory.simulated.chunk_memory import (
    EMBEDDING,
    HEAD,
    LAYERS,
    ChunkMemory,
    Key,
    Parameter,
    divide_blocks,
    repeat_layers,
)
from tempo_megatron.memory.simulated.chunk_model import (
    ChunkModel,
    Ends,
    build_ledger_config,
    convert_parameters,
    simulate_rank,
)
from tempo_megatron.memory.simulated.device import LastingBuffer, on_device
from tempo_megatron.memory.simulated.experts import LocalExperts
from tempo_megatron.memory.simulated.float8 import list_float8_weights
from tempo_megatron.memory.tape.follower import Follower, count_storage_bytes, list_storages
from tempo_megatron.memory.tape.rows import divide_by_layer
from tempo_megatron.memory.tape.scopes import SavedStorage, Scopes, record_saved
from tempo_megatron.memory.tape.tape import ENGINE_PRODUCT, TORCH_PRODUCT, Tape
from tempo_megatron.models.build import build_model, make_inputs
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import STACKS_OF_FAMILIES
from tempo_megatron.slots.choose import choose
from tempo_megatron.slots.megatron_versions import find_version, is_since


def simulate_chunk(
    run: Run, layers: range, *, has_gradients: bool = False, longest_row: int | None = None, **ends_given: bool
) -> ChunkMemory:
    """Run one micro batch of a chunk forward and backward.

    Args:
        run: its model is the whole one.
        layers: the chunk's, counted from 0 over the whole model; of a T5 those of the encoder, and as many of the
            decoder. A chunk with the embedding or the loss head alone has none.
        has_gradients: whether the gradients' memory is there before the micro batch; else backward makes it.
        longest_row: of how many layers alike all run; None is 3, or any number where three do not show what all do.
        ends_given: any of `pre_process` and `post_process`, whether the chunk has the embedding, and the loss head,
            both of which it has else; and of `predicts`, whether it has the run's multi-token prediction, which the
            chunk with the loss head has else.

    Raises ValueError where torch.distributed is already initialised, and for values that the model cannot have.
    """
    arguments = _cut(run, layers), _find_ends(run, layers, **ends_given), has_gradients
    tried = (3, max(1, len(layers))) if longest_row is None else (longest_row,)
    found = next(filter(None, (_run_chunk(*arguments, longest) for longest in tried)), None)
    assert found is not None
    return found


@dataclasses.dataclass(frozen=True)
class ModuleBytes:
    """What the operations of a chunk made, by their names."""

    model: Any
    kept: dict[str, int]
    """Operation -> bytes that one micro batch keeps from forward to backward."""
    workspaces: dict[str, int]
    """Operation -> the most that a call of its attention holds inside itself, beyond its results."""
    layers: dict[int, list[tuple[int, int]]]
    """id of a ModuleList -> (number of the first, how many) of the layers that each of its modules is."""


def count_by_module(run: Run, layers: range, **ends_given: bool) -> ModuleBytes:
    """What the modules of a chunk made; the arguments are those of `simulate_chunk`."""
    cut = _cut(run, layers)
    with _simulate(cut):
        chunk = _Chunk(cut, _find_ends(run, layers, **ends_given), has_gradients=True)
        seen = chunk.follow(chunk.make_batch(), Scopes(chunk.model))
    workspaces: dict[str, int] = {}
    for each in seen.tape.workspaces:
        workspaces[each.operation] = max(workspaces.get(each.operation, 0), each.num_bytes)
    times = [each for _, each in chunk.rows]
    numbers = [(layers.start + sum(times[:place]), each) for place, each in enumerate(times)]
    of_stacks = {id(stack.layers): numbers for stack in chunk.stacks if len(stack.layers)}
    return ModuleBytes(chunk.model, chunk.kept, workspaces, of_stacks)


def _find_ends(
    run: Run, layers: range, *, pre_process: bool = True, post_process: bool = True, predicts: bool | None = None
) -> Ends:
    has_norm, predicts = post_process, run.mtp_num_layers > 0 and (post_process if predicts is None else predicts)
    if run.mtp_num_layers and run.hybrid is None:
        # core/transformer/transformer_block.py: has_final_layernorm_in_this_stage of megatron-core 0.16.1.
        has_norm = bool(layers) and layers.stop == run.model.num_layers
    return Ends(pre_process, has_norm, predicts, post_process, layers=bool(layers))


@functools.lru_cache(maxsize=256)
def _run_chunk(run: Run, ends: Ends, has_gradients: bool, longest_row: int) -> ChunkMemory | None:
    """What a chunk's micro batch does; None where the layers that run do not show what all do."""
    with _simulate(run):
        return _Chunk(run, ends, has_gradients, longest_row).measure()


def _cut(run: Run, layers: range) -> Run:
    """A run of the chunk alone, of one stage on one rank. Layers count from 0 in it, so that chunks alike are equal."""
    return dataclasses.replace(
        run,
        # A context-parallel rank has its share of a sample's tokens; what attention gathers of others' it frees.
        model=dataclasses.replace(
            # A chunk without layers is built with the last, which is dropped, but for multi-token prediction like it.
            run.model.take_layers(layers or [run.model.num_layers - 1]),
            seq_length=run.model.seq_length // run.layout.cp,
        ),
        tempo=run.tempo.for_layers(layers, STACKS_OF_FAMILIES[run.model.family]),
        hybrid=run.hybrid
        and dataclasses.replace(run.hybrid, pattern=run.hybrid.pattern[layers.start : layers.stop] or "*"),
        float8_layers=run.float8_layers and (run.float8_layers[layers.start : layers.stop] or (False,)),
        optimizer=OptimizerSettings(),
        layout=dataclasses.replace(run.layout, pp=1, dp=1, chunks=None),
        num_micro_batches=None,
        # Of the allocator and of cuBLAS, no tensor's.
        cublas_workspace_bytes=None,
        expandable_segments=False,
    )


def record_chunk(
    run: Run, layers: range | None = None, *, has_ends: bool = False
) -> tuple[dict[tuple[str, int], list[SavedStorage]], list[SavedStorage]]:
    """What autograd holds after the forward of one micro batch, in which every layer runs: of each layer, by its stack
    and its place there, and of no layer.

    Args:
        run: of one stage, where `layers` are all.
        layers: counted from 0 over the whole model; None are all.
        has_ends: with embedding, final norm and loss head, as it is trained; else without them, and with a mask.

    Raises ValueError as `simulate_chunk`.
    """
    run = run if layers is None else _cut(run, layers)
    with _simulate(run):
        ends = Ends(has_ends, has_ends, False, has_ends)
        chunk = _Chunk(run, ends, False, longest_row=run.model.num_layers)
        # What a layer keeps must not depend on its neighbours, by which a mask is there or not.
        batch = chunk.make_batch(gives_mask=not has_ends)
        given = [t for t in batch.values() if isinstance(t, Tensor)]
        with on_device(run.stock):
            _, saved = record_saved(chunk.model, lambda: chunk.run_forward(batch), given)
    return divide_by_layer(saved, chunk.model.config)


@contextlib.contextmanager
def _simulate(run: Run) -> Iterator[None]:
    """Raises ValueError for what the modules of the installed Megatron do not have, or have in another way."""
    precedes_head = run.mtp_num_layers > 0 and run.mtp_precedes_head
    if not is_since("0.16") and (run.moe_shared_expert_gate or precedes_head):
        given = "--moe-shared-expert-gate" if run.moe_shared_expert_gate else "m|L in --pipeline-model-parallel-layout"
        raise ValueError(
            f"{given} is given and megatron-core {find_version().public} is installed, with which the estimate does "
            "not know it; install 0.16"
        )
    with simulate_rank(run.layout.tp):
        if run.stock == "cpu":
            make_tables()
        with use_fake_tensors():
            yield


class _Chunk(ChunkModel):
    """One chunk, built of the layers that stand for all, and what its micro batch does.

    has_gradients: as `simulate_chunk` takes it.
    """

    def __init__(self, run: Run, ends: Ends, has_gradients: bool, longest_row: int = 3) -> None:
        super().__init__(run, ends, longest_row)
        self._run, self._ends, self._has_gradients = run, ends, has_gradients
        self._is_backward = False
        # Whose operations run, from which event of the tape on.
        self._begins: list[tuple[Key, int]] = []

    def measure(self) -> ChunkMemory | None:
        """What the micro batch does; None where the layers that run do not show what all do."""
        batch = self.make_batch()
        tape, blocks = self.follow(batch).tape, []
        for (key, begin), end in zip(self._begins, [*(each for _, each in self._begins[1:]), None], strict=True):
            events = tape.events[begin:end]
            if self._run.stock != "transformer_engine" or key[0] != LAYERS:
                # Of the modules that are not Transformer Engine's each product is torch's.
                events = [(number, TORCH_PRODUCT if size == ENGINE_PRODUCT else size) for number, size in events]
            blocks.append((key, events))
        found = repeat_layers(blocks, {place: each for place, (_, each) in enumerate(self.layers) if each > 1})
        if found is None:
            return None
        repeated, originals = found
        held = {each.storage: each.num_bytes for each in tape.workspaces}
        workspaces = {number: held[name] for number, name in originals.items() if name in held}
        segments = divide_blocks(repeated, tape.gradients, workspaces)
        batch_bytes, mask_bytes = self._count_batch(batch)
        return ChunkMemory(
            batch_bytes=batch_bytes,
            mask_bytes=mask_bytes,
            global_buffer_bytes=self._buffer.count_bytes(),
            input_bytes=0 if self._ends.embedding else self._make_hidden(is_input=True).nbytes,
            output_bytes=0 if self._ends.head else self._make_hidden(is_input=False).nbytes,
            parameters=tuple(self._list_parameters()),
            forward=tuple(each for each in segments if not each.is_backward),
            backward=tuple(each for each in segments if each.is_backward),
        )

    def _count_batch(self, batch: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
        """The bytes of each of the micro batch's own tensors that stay until its backward, and of those that go when
        its forward is over.

        The causal masks of the samples are one tensor of bool, which no kernel reads (Megatron-LM: GPTDataset makes one
        a sample); stages without embedding and loss head get none (pretrain_gpt.py: get_batch). They stay as arguments
        of what Megatron recomputes (core/transformer: attention.py: _checkpointed_attention_forward,
        transformer_block.py: _checkpointed_forward).
        """
        run, ends, masks, tensors = self._run, self._ends, 0, {**batch}
        if run.data_has_masks and run.model.family == "gpt":
            tensors.pop("attention_mask", None)
            if ends.embedding or ends.prediction or ends.head:
                # Of the whole sample's tokens: a context-parallel rank has its share of the rows.
                masks = run.micro_batch_size * run.model.seq_length**2 * run.layout.cp
        own = list_storages(each for each in tensors.values() if isinstance(each, Tensor)).values()
        if masks and {"full", "core_attn"} & {*run.recompute}:
            return (*own, masks), 0
        return (*own,), masks

    def follow(self, batch: dict[str, Any], scopes: Scopes | None = None) -> Follower:
        """Run the micro batch."""
        if self._has_gradients:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        known = [*self.model.parameters(), *self.model.buffers(), *batch.values(), *gradients]
        seen = Follower(*(t for t in known if isinstance(t, Tensor)), scopes=scopes)
        self._seen = seen
        # Transformer Engine gathers tokens in memory of its own, and its unfused attention's scores are new memory
        # (pytorch/attention/dot_product_attention/backends.py:574); embedding and loss head are Megatron's.
        has_engine = self._run.stock == "transformer_engine"
        self._buffer = LastingBuffer(seen, lambda: not has_engine or self._begins[-1][0][0] != LAYERS)
        # Until model parallelism ends; Megatron's own setter takes no buffer.
        parallel_state._GLOBAL_MEMORY_BUFFER = self._buffer
        self._add_marks()
        with seen, on_device(self._run.stock, seen, self._run):
            self._run_micro_batch(batch)
        return seen

    def _run_micro_batch(self, batch: dict[str, Any]) -> None:
        """Forward, and backward, whose graph nobody else has."""
        ends, last = self._ends, len(self.layers) - 1
        if ends.embedding or not self.layers:
            self._mark(EMBEDDING if ends.embedding else HEAD, None)
        else:
            self._mark(LAYERS, 0)
        output, loss_mask = self.run_forward(batch), batch["loss_mask"]
        if ends.head:
            output = output[0] if isinstance(output, tuple) else output
            output = (output.float() * loss_mask).sum() / loss_mask.sum()
        # As Megatron's schedule does, which sends the output on and frees it.
        edge = torch.autograd.graph.get_gradient_edge(output)
        del output
        self.kept = self._seen.sum_by_operation()
        self._is_backward = True
        if ends.norm or ends.head or not self.layers:
            self._mark(HEAD if ends.norm or ends.head else EMBEDDING, None)
        else:
            self._mark(LAYERS, last)
        gradient = None if ends.head else self._make_hidden(is_input=False)
        torch.autograd.backward([edge], None if gradient is None else [gradient])

    def run_forward(self, batch: dict[str, Any]) -> Any:
        if not self._ends.embedding:
            hidden = self._make_hidden(is_input=True).requires_grad_()
            self.model.set_input_tensor(hidden)
        takes_mask = self._ends.head and (self._run.model.family == "gpt" or self.tempo.loss == "fused")
        return self.model(**{name: value for name, value in batch.items() if takes_mask or name != "loss_mask"})

    def _make_hidden(self, *, is_input: bool) -> Tensor:
        """Hidden states that another stage sends, or the gradient of those that it gets."""
        run, ends = self._run, self._ends
        num_tokens = run.model.seq_length // (run.layout.tp if run.layout.sp else 1)
        # Behind multi-token prediction each token has the hidden states of further ones, too.
        is_behind = ends.head and not ends.prediction if is_input else ends.prediction
        num_tokens *= 1 + is_behind * run.mtp_num_layers
        return torch.empty(num_tokens, run.micro_batch_size, run.model.hidden_size, dtype=run.dtype)

    def make_batch(self, *, gives_mask: bool = False) -> dict[str, Any]:
        run = self._run
        gives_mask = gives_mask or _reads_mask(self.tempo, self.shape)
        batch = make_inputs(run.model, run.padded_vocab_size, run.micro_batch_size, causal_mask=gives_mask)
        (labels,) = batch.keys() & {"labels", "lm_labels"}
        # Some of its tensors may be one; those of a data set are not.
        batch = {name: value if value is None else value.clone() for name, value in batch.items()}
        batch["loss_mask"] = torch.ones(batch[labels].shape, dtype=torch.float32)
        return batch

    def _add_marks(self) -> None:
        """Note where a layer begins, forward and backward, where the head does, and each gradient."""
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._seen.note_gradients)
        if self._ends.embedding:
            # A T5 embeds twice.
            self._mark_module(self.model.embedding, EMBEDDING, None)
        for place, (layer, _) in enumerate(self.layers):
            self._mark_module(layer, LAYERS, place)
        for layer in self.further:
            layer.register_forward_hook(lambda *_: self._mark(HEAD, None))
        # The last stack's own end has the final norm.
        norm = self.stacks[-1].final_layernorm if self._ends.norm else None
        if norm is not None:
            norm.register_forward_pre_hook(lambda *_: self._mark(HEAD, None))

    def _mark_module(self, module: torch.nn.Module, part: str, place: int | None) -> None:
        """Let `part` begin where the module does, and in backward where the gradient of its output is there.

        A further layer embeds tokens, too, which is its own."""

        def is_inside() -> bool:
            _, running, _ = self._begins[-1][0]
            return part == EMBEDDING and running is not None and self.layers[running][0] in self.further

        def begin(*_: Any) -> None:
            if not is_inside():
                self._mark(part, place)

        def watch(_: torch.nn.Module, __: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if output.requires_grad and not is_inside():
                output.register_hook(lambda _: self._mark(part, place))

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(watch)

    def _mark(self, part: str, place: int | None) -> None:
        self._begins.append(((part, place, self._is_backward), len(self._seen.tape.events)))

    def _list_parameters(self) -> Iterator[Parameter]:
        """Each parameter of the whole chunk, in the order of the modules."""
        model = self.model
        experts = [module for module in model.modules() if isinstance(module, LocalExperts)]
        # Of several experts in one. Their states are divided over other ranks than the other parameters' are.
        stacked = {id(parameter): parameter for module in experts for parameter in module.parameters()}
        ends = {EMBEDDING: getattr(model, "embedding", None), HEAD: getattr(model, "output_layer", None)}
        owners = {id(p): name for name, end in ends.items() if end is not None for p in end.parameters()}
        words = getattr(ends[EMBEDDING], "word_embeddings", None), ends[HEAD]
        no_matrices = {id(getattr(module, "weight", None)) for module in words}
        factors = {id(m.weight) for m in model.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear))}
        factors |= {key for key, parameter in stacked.items() if parameter.dim() == 3}
        if self._ends.head:
            factors.add(id(model.shared_embedding_or_output_weight()))
        of_float8 = (layer for (layer, _), has in zip(self.layers, self.in_float8, strict=True) if has)
        in_float8 = {id(weight) for layer in of_float8 for weight in list_float8_weights(layer)}

        def describe(parameter: Tensor, owner: int | str | None) -> list[Parameter]:
            key = id(parameter)
            is_expert = key in stacked
            shape = tuple(parameter.shape[is_expert:])
            is_matrix = len(shape) == 2 and key not in no_matrices
            found = Parameter(shape, is_matrix, is_expert, owner, key in factors, key in in_float8)
            return [found] * (len(parameter) if is_expert else 1)

        layers = {id(p): (layer, times) for layer, times in self.layers for p in layer.parameters()}
        listed: dict[int, int] = {}
        for parameter in model.parameters():
            layer, times = layers.get(id(parameter), (None, 1))
            if layer is None:
                yield from describe(parameter, owners.get(id(parameter)))
            elif id(layer) not in listed:
                first = sum(listed.values())
                listed[id(layer)] = times
                for number in range(first, first + times):
                    yield from (each for p in layer.parameters() for each in describe(p, number))


def record_step(run: Run) -> tuple[Tape, int]:
    """The tape of one micro batch of all layers on rank 0 of a tensor-parallel group, with Megatron's local modules as
    on a GPU, and the bytes of the weights.

    It ends with the last gradient: there is no optimizer. Raises ValueError where the model has no vocab_size.
    """
    shape, vocab_size = run.model, run.padded_vocab_size
    make_tables()
    with _simulate(dataclasses.replace(run, stock="local")), on_device("local"):
        config = build_ledger_config(shape, sequence_parallel=run.layout.sp, dtype=run.dtype, recompute=run.recompute)
        chosen = choose(config, run.tempo).config
        model = build_model(shape, config, chosen, vocab_size).train()
        convert_parameters(model, run.dtype)
        batch = make_inputs(shape, vocab_size, run.micro_batch_size, causal_mask=_reads_mask(chosen, shape))
        (labels,) = batch.keys() & {"labels", "lm_labels"}
        with Follower(*model.parameters(), *model.buffers(), scopes=Scopes(model)) as seen:
            mask = torch.ones(batch[labels].shape, dtype=torch.float32)
            takes_mask = shape.family == "gpt" or chosen.loss == "fused"
            output = model(**batch, **({"loss_mask": mask} if takes_mask else {}))
            losses = output[0] if isinstance(output, tuple) else output
            loss = (losses.float() * mask).sum() / mask.sum()
            del output, losses
            loss.backward()
            del mask, loss
        return seen.tape, count_storage_bytes(model.parameters())


def _reads_mask(chosen: TempoConfig, shape: ModelShape) -> bool:
    """Whether a layer has stock attention, which reads a mask as a tensor."""
    stacks = STACKS_OF_FAMILIES[shape.family]
    return any(chosen.for_layer(i, stack).attention == "off" for i in range(shape.num_layers) for stack in stacks)

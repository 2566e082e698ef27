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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from tempo_kernels.gelu import make_tables
from tempo_megatron.memory.fake_tensors import set_global_buffer, use_fake_tensors
from tempo_megatron.memory.run import OptimizerSettings, Run
from tempo_megatron.memory.simulated.chunk_memory import (
    EMBEDDING,
    HEAD,
    LAYERS,
    ChunkMemory,
    Key,
    LayerParameters,
    Parameter,
    Segment,
    divide_blocks,
)
from tempo_megatron.memory.simulated.chunk_model import STACKS_OF_FAMILIES, ChunkModel, Ends
from tempo_megatron.memory.simulated.configuration import build_ledger_config, convert_parameters, simulate_rank
from tempo_megatron.memory.simulated.device import LastingBuffer, on_device
from tempo_megatron.memory.simulated.experts import find_stacked_parameters
from tempo_megatron.memory.simulated.float8 import list_float8_weights
from tempo_megatron.memory.simulated.repeated_layers import repeat_layers
from tempo_megatron.memory.simulated.transformer_engine import choose_attention
from tempo_megatron.memory.tape.follower import Follower, count_storage_bytes, list_storages
from tempo_megatron.memory.tape.rows import divide_by_layer
from tempo_megatron.memory.tape.scopes import SavedStorage, Scopes, record_saved
from tempo_megatron.memory.tape.tape import ENGINE_PRODUCT, TORCH_PRODUCT, Tape
from tempo_megatron.models.build import build_model, make_inputs
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.choose import choose
from tempo_megatron.slots.megatron_versions import VERSION, is_since


def simulate_chunk(run: Run, layers: range, *, has_gradients: bool = False, **ends_given: bool) -> ChunkMemory:
    """Run one micro batch of a chunk forward and backward.

    Args:
        run: its model is the whole one.
        layers: the chunk's, counted from 0 over the whole model; of a T5 those of the encoder, and as many of the
            decoder. A chunk with the embedding or the loss head alone has none.
        has_gradients: whether the gradients' memory is there before the micro batch; else backward makes it.
        ends_given: any of `pre_process` and `post_process`, whether the chunk has the embedding, and the loss head,
            both of which it has else; and of `predicts`, whether it has the run's multi-token prediction, which the
            chunk with the loss head has else.

    Raises ValueError where torch.distributed is already initialised, and for values that the model cannot have.
    """
    arguments = _cut(run, layers), _find_ends(run, layers, **ends_given), has_gradients
    found = _run_chunk(*arguments) or _run_chunk(*arguments, longest_row=max(1, len(layers)))
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
        return _Chunk(cut, _find_ends(run, layers, **ends_given), has_gradients=True).count_by_module(layers.start)


def _find_ends(
    run: Run, layers: range, *, pre_process: bool = True, post_process: bool = True, predicts: bool | None = None
) -> Ends:
    has_norm, predicts = post_process, run.mtp_num_layers > 0 and (post_process if predicts is None else predicts)
    if run.mtp_num_layers and run.hybrid is None:
        # core/transformer/transformer_block.py: has_final_layernorm_in_this_stage of megatron-core 0.16.1.
        has_norm = bool(layers) and layers.stop == run.model.num_layers
    return Ends(pre_process, has_norm, predicts, post_process, layers=bool(layers))


@functools.lru_cache(maxsize=256)
def _run_chunk(run: Run, ends: Ends, has_gradients: bool, longest_row: int = 3) -> ChunkMemory | None:
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
        return chunk.record(gives_mask=not has_ends)


@contextlib.contextmanager
def _simulate(run: Run) -> Iterator[None]:
    _check_version(run)
    with simulate_rank(run.layout.tp):
        if run.stock == "cpu":
            make_tables()
        with use_fake_tensors():
            yield


def _check_version(run: Run) -> None:
    """Raises ValueError for what the modules of the installed Megatron do not have, or have in another way."""
    precedes_head = run.mtp_num_layers > 0 and run.mtp_precedes_head
    if is_since("0.16") or not (run.moe_shared_expert_gate or precedes_head):
        return
    given = "--moe-shared-expert-gate" if run.moe_shared_expert_gate else "m|L in --pipeline-model-parallel-layout"
    raise ValueError(
        f"{given} is given and megatron-core {VERSION.public} is installed, with which the estimate does not know it; "
        "install 0.16"
    )


class _Chunk(ChunkModel):
    """One chunk, built of the layers that stand for all, and what its micro batch does.

    has_gradients: as `simulate_chunk` takes it.
    """

    def __init__(self, run: Run, ends: Ends, has_gradients: bool, longest_row: int = 3) -> None:
        super().__init__(run, ends, longest_row)
        self._run, self._ends, self._has_gradients = run, ends, has_gradients
        self._is_backward = False
        self._key: Key | None = None
        # Whose operations ran, and how many events of the trace there were at their end.
        self._bounds: list[tuple[Key, int]] = []

    def measure(self) -> ChunkMemory | None:
        """What the micro batch does; None where the layers that run do not show what all do."""
        batch = self._make_batch()
        segments = self._list_segments(self._follow(batch).tape)
        if segments is None:
            return None
        parameters, layers = tuple(self._list_parameters()), tuple(self._describe_layers())
        batch_bytes, mask_bytes = self._count_batch(batch)
        ends = (getattr(self.model, name, None) for name in ("embedding", "output_layer"))
        parts = [*(layer for layer, _ in self.layers), *(end for end in ends if end is not None)]
        return ChunkMemory(
            num_parameters=sum(each.size for each in parameters),
            num_expert_parameters=sum(each.experts for each in layers),
            batch_bytes=batch_bytes,
            mask_bytes=mask_bytes,
            largest_layer_parameters=max((_count(part.parameters()) for part in parts), default=0),
            global_buffer_bytes=self._buffer.count_bytes(),
            input_bytes=0 if self._ends.embedding else self._make_hidden(is_input=True).nbytes,
            output_bytes=0 if self._ends.head else self._make_hidden(is_input=False).nbytes,
            parameters=parameters,
            layer_parameters=layers,
            float8_weights=sum(each.float8_others + each.float8_experts for each in layers),
            linear_shapes=self._find_linear_shapes(),
            forward=tuple(each for each in segments if not each.is_backward),
            backward=tuple(each for each in segments if each.is_backward),
        )

    def _list_segments(self, tape: Tape) -> list[Segment] | None:
        # What is freed behind the last bound is freed at the end of what ran then.
        bounds = [*self._bounds, (self._bounds[-1][0], len(tape.events))]
        blocks, begin = [], 0
        for key, end in bounds:
            events = tape.events[begin:end]
            if self._run.stock != "transformer_engine" or key[0] != LAYERS:
                # Of the modules that are not Transformer Engine's each product is torch's.
                events = [(number, TORCH_PRODUCT if size == ENGINE_PRODUCT else size) for number, size in events]
            blocks.append((key, events))
            begin = end
        found = repeat_layers(blocks, {place: each for place, (_, each) in enumerate(self.layers) if each > 1})
        if found is None:
            return None
        repeated, originals = found
        held = {each.storage: each.num_bytes for each in tape.workspaces if each.storage is not None}
        workspaces = {number: held[name] for number, name in originals.items() if name in held}
        return divide_blocks(repeated, tape.gradients, workspaces)

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

    def count_by_module(self, first_layer: int) -> ModuleBytes:
        """first_layer: number of the chunk's first one in the whole model."""
        seen = self._follow(self._make_batch(), Scopes(self.model))
        workspaces: dict[str, int] = {}
        for each in seen.tape.workspaces:
            workspaces[each.operation] = max(workspaces.get(each.operation, 0), each.num_bytes)
        times = [each for _, each in self.rows]
        numbers = [(first_layer + sum(times[:place]), each) for place, each in enumerate(times)]
        layers = {id(stack.layers): numbers for stack in self.stacks if len(stack.layers)}
        return ModuleBytes(self.model, self._kept, workspaces, layers)

    def record(self, *, gives_mask: bool) -> tuple[dict[tuple[str, int], list[SavedStorage]], list[SavedStorage]]:
        batch = self._make_batch(gives_mask=gives_mask)
        given = [t for t in batch.values() if isinstance(t, Tensor)]
        with self._on_device():
            _, saved = record_saved(self.model, lambda: self._run_forward(batch), given)
        return divide_by_layer(saved, self.model.config)

    def _follow(self, batch: dict[str, Any], scopes: Scopes | None = None) -> Follower:
        """Run the micro batch."""
        if self._has_gradients:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        known = [*self.model.parameters(), *self.model.buffers(), *batch.values(), *gradients]
        seen = Follower(*(t for t in known if isinstance(t, Tensor)), scopes=scopes)
        self._seen = seen
        self._buffer = LastingBuffer(seen, self._uses_global_buffer)
        set_global_buffer(self._buffer)
        self._add_marks()
        with seen, self._on_device(seen):
            # Nobody else has the edge, whose graph goes before the segment ends.
            self._run_backward(self._run_to_loss(batch))
            self._close()
        return seen

    def _on_device(self, seen: Follower | None = None) -> contextlib.AbstractContextManager[None]:
        run = self._run
        attention = choose_attention(run)
        return on_device(run.stock, seen, run.chip, is_deterministic=run.deterministic, stock_attention=attention)

    def _uses_global_buffer(self) -> bool:
        """Transformer Engine gathers tokens in memory of its own, and its unfused attention's scores are new memory
        (pytorch/attention/dot_product_attention/backends.py:574); embedding and loss head are Megatron's."""
        is_in_layers = self._key is not None and self._key[0] == LAYERS
        return self._run.stock != "transformer_engine" or not is_in_layers

    def _run_backward(self, edge: torch.autograd.graph.GradientEdge) -> None:
        self._kept = self._seen.sum_by_operation()
        self._is_backward = True
        has_end = self._ends.norm or self._ends.head
        if has_end or not self.layers:
            self._mark(HEAD if has_end else EMBEDDING, None)
        else:
            self._mark(LAYERS, len(self.layers) - 1)
        gradient = None if self._ends.head else self._make_hidden(is_input=False)
        torch.autograd.backward([edge], None if gradient is None else [gradient])

    def _run_to_loss(self, batch: dict[str, Any]) -> torch.autograd.graph.GradientEdge:
        """The forward, from whose end backward begins."""
        if self._ends.embedding or not self.layers:
            self._mark(EMBEDDING if self._ends.embedding else HEAD, None)
        else:
            self._mark(LAYERS, 0)
        output, loss_mask = self._run_forward(batch), batch["loss_mask"]
        if self._ends.head:
            output = output[0] if isinstance(output, tuple) else output
            output = (output.float() * loss_mask).sum() / loss_mask.sum()
        # As Megatron's schedule does, which sends the output on and frees it.
        return torch.autograd.graph.get_gradient_edge(output)

    def _run_forward(self, batch: dict[str, Any]) -> Any:
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

    def _make_batch(self, *, gives_mask: bool = False) -> dict[str, Any]:
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
            parameter.register_post_accumulate_grad_hook(self._note_gradient)
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
            running = self._key and self._key[1]
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

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._seen.note_gradient(parameter.grad)

    def _mark(self, part: str, place: int | None) -> None:
        key = (part, place, self._is_backward)
        if key != self._key:
            self._close()
            self._key = key

    def _close(self) -> None:
        if self._key is not None:
            self._bounds.append((self._key, len(self._seen.tape.events)))

    def _list_parameters(self) -> Iterator[Parameter]:
        """Each parameter of the whole chunk, in the order of the modules."""
        words = [getattr(getattr(self.model, "embedding", None), "word_embeddings", None)]
        words.append(getattr(self.model, "output_layer", None))
        no_matrices = {id(getattr(module, "weight", None)) for module in words}
        stacked = find_stacked_parameters(self.model)

        def describe(parameter: Tensor) -> list[Parameter]:
            is_expert = id(parameter) in stacked
            shape = tuple(parameter.shape[is_expert:])
            is_matrix = len(shape) == 2 and id(parameter) not in no_matrices
            return [Parameter(shape, is_matrix, is_expert)] * (len(parameter) if is_expert else 1)

        layers = {id(p): (layer, times) for layer, times in self.layers for p in layer.parameters()}
        listed: set[int] = set()
        for parameter in self.model.parameters():
            layer, times = layers.get(id(parameter), (None, 1))
            if layer is None:
                yield from describe(parameter)
            elif id(layer) not in listed:
                listed.add(id(layer))
                yield from [each for p in layer.parameters() for each in describe(p)] * times

    def _describe_layers(self) -> Iterator[LayerParameters]:
        experts = find_stacked_parameters(self.model)
        for (layer, times), has_float8 in zip(self.layers, self.in_float8, strict=True):
            weights = list_float8_weights(layer) if has_float8 else []
            of_experts, float8_experts = (
                _count(each for each in given if id(each) in experts) for given in (layer.parameters(), weights)
            )
            others = _count(layer.parameters()) - of_experts
            yield from [LayerParameters(others, of_experts, _count(weights) - float8_experts, float8_experts)] * times

    def _find_linear_shapes(self) -> frozenset[tuple[int, ...]]:
        linears = (ColumnParallelLinear, RowParallelLinear)
        weights = [module.weight for module in self.model.modules() if isinstance(module, linears)]
        if self._ends.head:
            weights.append(self.model.shared_embedding_or_output_weight())
        # A model whose weights are not tied has none of the latter in T5.
        shapes = {tuple(weight.shape) for weight in weights if weight is not None}
        stacked = find_stacked_parameters(self.model).values()
        return frozenset(shapes | {tuple(weight.shape[1:]) for weight in stacked if weight.dim() == 3})


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in parameters)


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
        with Follower(*model.parameters(), *model.buffers(), scopes=Scopes(model)) as seen:
            _run(model, batch, takes_mask=shape.family == "gpt" or chosen.loss == "fused")
        return seen.tape, count_storage_bytes(model.parameters())


def _reads_mask(chosen: TempoConfig, shape: ModelShape) -> bool:
    """Whether a layer has stock attention, which reads a mask as a tensor."""
    stacks = STACKS_OF_FAMILIES[shape.family]
    return any(chosen.for_layer(i, stack).attention == "off" for i in range(shape.num_layers) for stack in stacks)


def _run(model: torch.nn.Module, batch: dict[str, torch.Tensor], *, takes_mask: bool) -> None:
    labels = batch["lm_labels" if "lm_labels" in batch else "labels"]
    mask = torch.ones(labels.shape, dtype=torch.float32)
    output = model(**batch, **({"loss_mask": mask} if takes_mask else {}))
    losses = output[0] if isinstance(output, tuple) else output
    loss = (losses.float() * mask).sum() / mask.sum()
    del output, losses
    loss.backward()

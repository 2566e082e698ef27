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
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, model_parallel_cuda_manual_seed
from torch import Tensor

from tempo_kernels.gelu import make_tables
from tempo_megatron import cpu
from tempo_megatron.memory.fake_tensors import set_global_buffer, simulate_layout, use_fake_tensors
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
from tempo_megatron.memory.simulated.configuration import (
    build_ledger_config,
    convert_parameters,
)
from tempo_megatron.memory.simulated.device import LastingBuffer, on_device
from tempo_megatron.memory.simulated.experts import (
    count_expert_parameters,
    find_expert_shapes,
    find_stacked_parameters,
)
from tempo_megatron.memory.simulated.float8 import count_float8_weights
from tempo_megatron.memory.simulated.repeated_layers import repeat_layers
from tempo_megatron.memory.simulated.transformer_engine import (
    choose_attention,
)
from tempo_megatron.memory.tape.follower import Follower, count_storage_bytes, list_storages
from tempo_megatron.memory.tape.rows import divide_by_layer
from tempo_megatron.memory.tape.scopes import SavedStorage, Scopes, record_saved
from tempo_megatron.memory.tape.tape import ENGINE_PRODUCT, TORCH_PRODUCT, Event, Tape
from tempo_megatron.models.build import build_model, make_inputs
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.choose import choose
from tempo_megatron.slots.megatron_versions import VERSION, is_since

STACKS_OF_MODULES = ("local", "transformer_engine", "cpu")


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
    arguments = _cut(run, layers), _find_ends(run, layers, **ends_given), has_gradients, not layers
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
        chunk = _Chunk(cut, _find_ends(run, layers, **ends_given), has_gradients=True)
        if not layers:
            chunk.drop_layers()
        return chunk.count_by_module(layers.start)


def _find_ends(
    run: Run, layers: range, *, pre_process: bool = True, post_process: bool = True, predicts: bool | None = None
) -> Ends:
    has_norm, predicts = post_process, run.mtp_num_layers > 0 and (post_process if predicts is None else predicts)
    if run.mtp_num_layers and run.hybrid is None:
        # core/transformer/transformer_block.py: has_final_layernorm_in_this_stage of megatron-core 0.16.1.
        has_norm = bool(layers) and layers.stop == run.model.num_layers
    return Ends(pre_process, has_norm, predicts, post_process)


@functools.lru_cache(maxsize=256)
def _run_chunk(
    run: Run,
    ends: Ends,
    has_gradients: bool,
    is_without_layers: bool,
    longest_row: int = 3,
) -> ChunkMemory | None:
    """What a chunk's micro batch does; None where the layers that run do not show what all do."""
    with _simulate(run):
        chunk = _Chunk(run, ends, has_gradients, longest_row)
        if is_without_layers:
            chunk.drop_layers()
        return chunk.measure()


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
    if run.stock not in STACKS_OF_MODULES:
        raise ValueError(f"stock is {run.stock!r}; expected one of {', '.join(STACKS_OF_MODULES)}")
    cpu.use_cpu()
    if run.stock == "cpu":
        make_tables()
    with simulate_layout(run.layout.tp):
        model_parallel_cuda_manual_seed(1234)
        dropout_rng.set_micro_batch(1234, 0)
        with use_fake_tensors():
            yield


def _check_version(run: Run) -> None:
    """Raises ValueError for what the modules of the installed Megatron do not have, or have in another way."""
    since_0_16 = {
        "--moe-shared-expert-gate": run.moe_shared_expert_gate,
        "m|L in --pipeline-model-parallel-layout": run.mtp_num_layers > 0 and run.mtp_precedes_head,
    }
    given = next((name for name, is_given in since_0_16.items() if is_given), None)
    if given is not None and not is_since("0.16"):
        raise ValueError(
            f"{given} is given and megatron-core {VERSION.public} is installed, with which the estimate does not know "
            "it; install 0.16"
        )


class _Chunk:
    """One chunk, built of the layers that stand for all, and what its micro batch does.

    Args:
        run: of one stage, which is the chunk.
        ends: beside the layers.
        has_gradients: as `simulate_chunk` takes it.
        longest_row: how many layers alike run; of more than that, three stand for all.
    """

    def __init__(
        self,
        run: Run,
        ends: Ends,
        has_gradients: bool,
        longest_row: int = 3,
    ) -> None:
        self._run, self._ends = run, ends
        self._has_gradients = has_gradients
        built = ChunkModel(run, ends, longest_row)
        self._rows = built.rows
        self._model, self._shape, self._tempo = built.model, built.shape, built.tempo
        self._stacks, self._layers = built.stacks, built.layers
        self._further, self._in_float8 = built.further, built.in_float8
        self._is_backward = False
        self._key: Key | None = None
        # Whose operations ran, and how many events of the trace there were at their end.
        self._bounds: list[tuple[Key, int]] = []

    def drop_layers(self) -> None:
        """Leave the embedding and the head alone: no ModelShape is without layers."""
        for stack in self._stacks:
            stack.layers = torch.nn.ModuleList()
        self._layers = [*self._further.items()]
        self._in_float8 = [each for each in self._in_float8 if each[0] in self._further]

    def measure(self) -> ChunkMemory | None:
        """What the micro batch does; None where the layers that run do not show what all do."""
        batch = self._make_batch()
        segments = self._list_segments(self._follow(batch).tape)
        if segments is None:
            return None
        return ChunkMemory(
            num_parameters=self._count_parameters(),
            num_expert_parameters=sum(times * count_expert_parameters(layer) for layer, times in self._layers),
            batch_bytes=tuple(self._list_batch(batch)),
            mask_bytes=0 if self._keeps_masks else self._count_masks(),
            largest_layer_parameters=self._count_largest(),
            global_buffer_bytes=self._buffer.count_bytes(),
            input_bytes=0 if self._ends.embedding else self._count_hidden(is_input=True),
            output_bytes=0 if self._ends.head else self._count_hidden(is_input=False),
            parameters=tuple(self._list_parameters()),
            layer_parameters=tuple(
                each for layer, times, has in self._in_float8 for each in [_describe_parameters(layer, has)] * times
            ),
            float8_weights=sum(times * count_float8_weights(layer) for layer, times, has in self._in_float8 if has),
            linear_shapes=self._find_linear_shapes(),
            forward=tuple(each for each in segments if not each.is_backward),
            backward=tuple(each for each in segments if each.is_backward),
        )

    def _list_segments(self, tape: Tape) -> list[Segment] | None:
        # What is freed behind the last bound is freed at the end of what ran then.
        bounds = [*self._bounds, (self._bounds[-1][0], len(tape.events))]
        begins = [0, *(end for _, end in self._bounds)]
        blocks = [
            (key, self._name_libraries(key[0], tape.events[begin:end]))
            for (key, end), begin in zip(bounds, begins, strict=True)
        ]
        found = repeat_layers(blocks, {place: each for place, (_, each) in enumerate(self._layers) if each > 1})
        if found is None:
            return None
        repeated, originals = found
        held = {each.storage: each.num_bytes for each in tape.workspaces if each.storage is not None}
        workspaces = {number: held[name] for number, name in originals.items() if name in held}
        return divide_blocks(repeated, tape.gradients, workspaces)

    def _name_libraries(self, part: str, events: Sequence[Event]) -> list[Event]:
        """Events in which each product is its library's: torch's are those of unfused attention and the head."""
        if self._run.stock == "transformer_engine" and part == LAYERS:
            return [*events]
        return [(number, TORCH_PRODUCT if size == ENGINE_PRODUCT else size) for number, size in events]

    def _list_batch(self, batch: Mapping[str, Any]) -> list[int]:
        """The bytes of each of the micro batch's own tensors that stay until its backward."""
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        if self._run.data_has_masks and self._run.model.family == "gpt":
            tensors.pop("attention_mask", None)
        masks = self._count_masks() if self._keeps_masks else 0
        return [*list_storages(tensors.values()).values(), *([masks] if masks else [])]

    @property
    def _keeps_masks(self) -> bool:
        """Whether masks that no kernel reads stay: as arguments of what Megatron recomputes (core/transformer:
        attention.py: _checkpointed_attention_forward, transformer_block.py: _checkpointed_forward)."""
        return bool({"full", "core_attn"} & {*self._run.recompute})

    def _count_masks(self) -> int:
        """The causal masks of the samples are one tensor of bool, which no kernel reads (Megatron-LM: GPTDataset makes
        one a sample); stages without embedding and loss head get none (pretrain_gpt.py: get_batch)."""
        has_masks = self._run.data_has_masks and self._run.model.family == "gpt"
        ends = self._ends
        if not has_masks or not (ends.embedding or ends.prediction or ends.head):
            return 0
        # Of the whole sample's tokens: a context-parallel rank has its share of the rows.
        return self._run.micro_batch_size * self._run.model.seq_length**2 * self._run.layout.cp

    def count_by_module(self, first_layer: int) -> ModuleBytes:
        """first_layer: number of the chunk's first one in the whole model."""
        batch, kept = self._make_batch(), {}

        def run(batch: dict[str, Any]) -> None:
            edge = self._run_to_loss(batch)
            kept.update(self._seen.sum_by_operation())
            self._run_backward(edge)

        workspaces: dict[str, int] = {}
        for each in self._follow(batch, run, Scopes(self._model)).tape.workspaces:
            workspaces[each.operation] = max(workspaces.get(each.operation, 0), each.num_bytes)
        times = [each for _, each in self._rows]
        numbers = [(first_layer + sum(times[:place]), each) for place, each in enumerate(times)]
        layers = {id(stack.layers): numbers for stack in self._stacks if len(stack.layers)}
        return ModuleBytes(self._model, kept, workspaces, layers)

    def record(self, *, gives_mask: bool) -> tuple[dict[tuple[str, int], list[SavedStorage]], list[SavedStorage]]:
        batch = self._make_batch(gives_mask=gives_mask)
        given = [t for t in batch.values() if isinstance(t, Tensor)]
        with self._on_device():
            _, saved = record_saved(self._model, lambda: self._run_forward(batch), given)
        return divide_by_layer(saved, self._model.config)

    def _follow(
        self, batch: dict[str, Any], run: Callable[[dict[str, Any]], None] | None = None, scopes: Scopes | None = None
    ) -> Follower:
        """Run the micro batch, or what `run` runs of it."""
        if self._has_gradients:
            for parameter in self._model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        known = [*self._model.parameters(), *self._model.buffers(), *batch.values(), *gradients]
        seen = Follower(*(t for t in known if isinstance(t, Tensor)), scopes=scopes)
        self._seen = seen
        self._buffer = LastingBuffer(seen, self._uses_global_buffer)
        set_global_buffer(self._buffer)
        self._add_marks()
        with self._seen, self._on_device(self._seen):
            (run or self._run_micro_batch)(batch)
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

    def _run_micro_batch(self, batch: dict[str, Any]) -> None:
        self._run_backward(self._run_to_loss(batch))
        self._close()

    def _run_backward(self, edge: torch.autograd.graph.GradientEdge) -> None:
        self._is_backward = True
        has_end = self._ends.norm or self._ends.head
        if has_end or not self._layers:
            self._mark(HEAD if has_end else EMBEDDING, None)
        else:
            self._mark(LAYERS, len(self._layers) - 1)
        gradient = None if self._ends.head else self._make_hidden(is_input=False)
        torch.autograd.backward([edge], None if gradient is None else [gradient])

    def _run_to_loss(self, batch: dict[str, Any]) -> torch.autograd.graph.GradientEdge:
        """The forward, from whose end backward begins."""
        if self._ends.embedding or not self._layers:
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
            self._model.set_input_tensor(hidden)
        takes_mask = self._ends.head and (self._run.model.family == "gpt" or self._tempo.loss == "fused")
        return self._model(**{name: value for name, value in batch.items() if takes_mask or name != "loss_mask"})

    def _make_hidden(self, *, is_input: bool) -> Tensor:
        """Hidden states that another stage sends, or the gradient of those that it gets."""
        return torch.empty(self._size_of_hidden(is_input), dtype=self._run.dtype)

    def _size_of_hidden(self, is_input: bool) -> tuple[int, int, int]:
        run, ends = self._run, self._ends
        num_tokens = run.model.seq_length // (run.layout.tp if run.layout.sp else 1)
        # Behind multi-token prediction each token has the hidden states of further ones, too.
        is_behind = ends.head and not ends.prediction if is_input else ends.prediction
        return num_tokens * (1 + is_behind * run.mtp_num_layers), run.micro_batch_size, run.model.hidden_size

    def _count_hidden(self, *, is_input: bool) -> int:
        return math.prod(self._size_of_hidden(is_input)) * self._run.dtype.itemsize

    def _make_batch(self, *, gives_mask: bool = False) -> dict[str, Any]:
        run = self._run
        gives_mask = gives_mask or _reads_mask(self._tempo, self._shape)
        batch = make_inputs(run.model, run.padded_vocab_size, run.micro_batch_size, causal_mask=gives_mask)
        (labels,) = batch.keys() & {"labels", "lm_labels"}
        # Some of its tensors may be one; those of a data set are not.
        batch = {name: value if value is None else value.clone() for name, value in batch.items()}
        batch["loss_mask"] = torch.ones(batch[labels].shape, dtype=torch.float32)
        return batch

    def _add_marks(self) -> None:
        """Note where a layer begins, forward and backward, where the head does, and each gradient."""
        for parameter in self._model.parameters():
            parameter.register_post_accumulate_grad_hook(self._note_gradient)
        if self._ends.embedding:
            # A T5 embeds twice.
            embedding = self._model.embedding
            embedding.register_forward_pre_hook(lambda *_: self._begin_embedding(), with_kwargs=True)
            embedding.register_forward_hook(lambda _, __, output: self._watch_embedding(output))
        for place, (layer, _) in enumerate(self._layers):
            layer.register_forward_pre_hook(lambda *_, place=place: self._mark(LAYERS, place), with_kwargs=True)
            layer.register_forward_hook(
                lambda _, __, output, place=place: self._watch(
                    output[0] if isinstance(output, tuple) else output, LAYERS, place
                )
            )
        for layer in self._further:
            layer.register_forward_hook(lambda *_: self._mark(HEAD, None))
        # The last stack's own end has the final norm.
        norm = self._stacks[-1].final_layernorm if self._ends.norm else None
        if norm is not None:
            norm.register_forward_pre_hook(lambda *_: self._mark(HEAD, None))

    def _begin_embedding(self) -> None:
        if not self._is_in_further_layer():
            self._mark(EMBEDDING, None)

    def _watch_embedding(self, output: Tensor) -> None:
        if not self._is_in_further_layer():
            self._watch(output, EMBEDDING, None)

    def _is_in_further_layer(self) -> bool:
        place = self._key and self._key[1]
        return place is not None and self._layers[place][0] in self._further

    def _watch(self, output: Tensor, part: str, place: int | None) -> None:
        """Let `part` begin in backward where the gradient of its output is there."""
        if output.requires_grad:
            output.register_hook(lambda _: self._mark(part, place))

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

    def _count_parameters(self) -> int:
        """Of the whole chunk."""
        of_further = sum((times - 1) * _count(layer.parameters()) for layer, times in self._layers)
        return _count(self._model.parameters()) + of_further

    def _list_parameters(self) -> Iterator[Parameter]:
        """Each parameter of the whole chunk, in the order of the modules."""
        words = [getattr(getattr(self._model, "embedding", None), "word_embeddings", None)]
        words.append(getattr(self._model, "output_layer", None))
        no_matrices = {id(getattr(module, "weight", None)) for module in words}
        stacked = find_stacked_parameters(self._model)

        def describe(parameter: Tensor) -> list[Parameter]:
            number = stacked.get(id(parameter))
            shape = tuple(parameter.shape if number is None else parameter.shape[1:])
            is_matrix = len(shape) == 2 and id(parameter) not in no_matrices
            return [Parameter(shape, is_matrix, number is not None)] * (number or 1)

        layers = {id(p): (layer, times) for layer, times in self._layers for p in layer.parameters()}
        listed: set[int] = set()
        for parameter in self._model.parameters():
            layer, times = layers.get(id(parameter), (None, 1))
            if layer is None:
                yield from describe(parameter)
            elif id(layer) not in listed:
                listed.add(id(layer))
                yield from [each for p in layer.parameters() for each in describe(p)] * times

    def _find_linear_shapes(self) -> frozenset[tuple[int, int]]:
        weights = [
            module.weight
            for module in self._model.modules()
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and module.weight is not None
        ]
        if self._ends.head:
            weights.append(self._model.shared_embedding_or_output_weight())
        # A model whose weights are not tied has none of the latter in T5.
        shapes = {tuple(weight.shape) for weight in weights if weight is not None}
        return frozenset(shapes | find_expert_shapes(self._model))

    def _count_largest(self) -> int:
        parts: Sequence[Any] = [
            *(layer for layer, _ in self._layers),
            *(getattr(self._model, n, None) for n in ("embedding", "output_layer")),
        ]
        return max((_count(part.parameters()) for part in parts if part is not None), default=0)


def _describe_parameters(layer: torch.nn.Module, has_float8: bool) -> LayerParameters:
    experts = count_expert_parameters(layer)
    others = _count(layer.parameters()) - experts
    of_experts = count_float8_weights(layer, of_experts=True)
    in_float8 = (count_float8_weights(layer) - of_experts, of_experts) if has_float8 else (0, 0)
    return LayerParameters(others, experts, *in_float8)


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

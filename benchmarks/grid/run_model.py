"""Runs one case of the grid on this rank: the schedule's forwards and backwards, and what they leave."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from dropout_masks import Masks, recorded_masks
from formula_cases import count_stack
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from sequence_parts import join_parts

from grid.cases import Case
from grid.models import (
    DOCUMENTS,
    PACKED_SIZES,
    SETTINGS,
    Sizes,
    build_config,
    build_model,
    fill_weights,
    gather_gradients,
    list_documents,
    make_batch,
    make_packed_batch,
    name_globally,
    read_losses,
    record_stacks,
)
from tempo_megatron import TempoConfig
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.choose import choose

SIZES = Sizes()
SEED = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclasses.dataclass
class Found:
    """What a run leaves: of this rank's stages, with tensor-parallel parts put together."""

    losses: torch.Tensor | None
    """[samples, s]; None where the last stage is elsewhere."""

    gradients: dict[str, torch.Tensor]
    masks: Masks
    kept: dict[str, tuple[int, int]]
    """Stack -> (bytes measured in the first micro batch, the formula's), of this rank's first chunk."""

    norm_sums: dict[str, float]
    """Weight of a norm -> the largest channel's sum over tokens of abs(dy * normalised x); of a reference."""


def run_model(case: Case, *, is_stock: bool = False, records: bool = True, draw: int = 0) -> Found:
    """The schedule's forwards and backwards of one global batch, in the layout that is initialised.

    Args:
        case: what runs. Without context parallelism each context-parallel rank runs it alone.
        is_stock: Megatron's own specs instead of the case's choice, where Megatron's norms can do the layout.
        records: whether to measure what is kept.
        draw: of the weights.
    """
    with _own_context() if case.layout.cp == 1 else contextlib.nullcontext():
        return _run_model(case, is_stock, records, draw)


def _run_model(case: Case, is_stock: bool, records: bool, draw: int) -> Found:
    layout, sizes = case.layout, PACKED_SIZES if case.documents else SIZES
    config = build_config(
        dtype=DTYPES[case.dtype],
        dropout=case.dropout,
        recompute=case.recompute,
        num_layers=layout.num_layers,
        sequence_parallel=layout.sequence_parallel,
        # What marks a parameter as split is a part of Megatron's initialisation.
        perform_initialization=True,
        **({"cp_comm_type": layout.comm_type} if layout.cp > 1 else {}),
        **SETTINGS.get(case.family, {}),
    )
    tempo: TempoConfig | None = case.tempo
    if is_stock:
        tempo = TempoConfig.off() if layout.sequence_parallel else None
    chosen = TempoConfig.off() if tempo is None else choose(config, tempo).config
    model_parallel_cuda_manual_seed(1234)
    stages = range(layout.virtual) if layout.virtual > 1 else [None]
    chunks = [build_model(case.family, config, tempo, sizes, stage) for stage in stages]
    for chunk in chunks:
        fill_weights(chunk, draw)
    run = _Run(case, config, chosen, records)
    norm_sums: dict[str, torch.Tensor] = {}
    if case.dtype == "fp64":
        for chunk in chunks:
            _watch_norms(chunk, norm_sums)
    with recorded_masks() as masks:
        results = get_forward_backward_func()(
            forward_step_func=run.step,
            data_iterator=[iter(range(run.num_micro_batches)) for _ in chunks],
            model=chunks,
            num_microbatches=run.num_micro_batches,
            seq_length=sizes.seq_length,
            micro_batch_size=sizes.micro_batch_size,
            decoder_seq_length=sizes.seq_length,
            forward_only=False,
        )
    gradients: dict[str, torch.Tensor] = {}
    for key, gradient in itertools.chain.from_iterable(map(gather_gradients, chunks)):
        gradients[key] = gradients[key] + gradient if key in gradients else gradient
    _sum_tied(chunks[0], gradients)
    boundaries = DOCUMENTS if case.documents else ()
    losses = torch.cat([join_parts(result["losses"], boundaries) for result in results]) if results else None
    if layout.sequence_parallel:
        # Each rank has a part of the tokens.
        for total in norm_sums.values():
            torch.distributed.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    sums = {name: total.max().item() for name, total in norm_sums.items()}
    return Found(losses, gradients, masks, run.kept, sums)


@contextlib.contextmanager
def _own_context() -> Iterator[None]:
    """This process as the only context-parallel rank."""
    if parallel_state.get_context_parallel_world_size() == 1:
        yield
        return
    places = {"_CONTEXT_PARALLEL_GROUP": _make_own_group(), "_CONTEXT_PARALLEL_GLOBAL_RANKS": [_find_rank()]}
    with mock.patch.multiple(parallel_state, **places):
        yield


@functools.cache
def _make_own_group() -> Any:
    return torch.distributed.new_group([_find_rank()], use_local_synchronization=True)


def _find_rank() -> int:
    return torch.distributed.get_rank()


class _Run:
    """The forward steps that Megatron's schedules ask for."""

    def __init__(self, case: Case, config: Any, chosen: TempoConfig, records: bool) -> None:
        self._case, self._config, self._chosen, self._records = case, config, chosen, records
        self.num_micro_batches = 2 * case.layout.pp
        self.kept: dict[str, tuple[int, int]] = {}

    def step(self, iterator: Iterator[int], model: Any) -> tuple[Any, Any]:
        case, number = self._case, next(iterator)
        if case.documents == "alone":
            return self._run_alone(model, number * len(list_documents())), self._compute_loss
        if case.documents:
            args, kwargs = self._announce_packed(number * len(list_documents()))
        else:
            dropout_rng.set_micro_batch(SEED, number * SIZES.micro_batch_size)
            args, kwargs = self._make_batch(number * SIZES.micro_batch_size, SIZES)
        if self._records and not self.kept:
            output, stacks = record_stacks(model, lambda: model(*args, **kwargs))
            for stack, saved in stacks.items():
                place = (case.family, stack, self._config, self._chosen)
                longest = max(sizes.seq_length for sizes in list_documents())
                counted = (
                    count_stack(*place, PACKED_SIZES, longest_document=longest)
                    if case.documents
                    else count_stack(*place, SIZES)
                )
                self.kept[stack] = (sum(each.num_bytes for each in saved), counted)
        else:
            output = model(*args, **kwargs)
        return output, self._compute_loss

    def _make_batch(self, first: int, sizes: Sizes) -> tuple[tuple[Any, ...], Any]:
        return make_batch(self._case.family, first, sizes, gives_mask=self._chosen.attention == "off")

    def _announce_packed(self, first: int) -> tuple[tuple[Any, ...], Any]:
        args, kwargs = make_packed_batch(first)
        cu_seqlens = kwargs["packed_seq_params"].cu_seqlens_q
        samples = first + torch.arange(len(list_documents()))
        dropout_rng.set_micro_batch(SEED, first, cu_seqlens=cu_seqlens, document_samples=samples)
        return args, kwargs

    def _run_alone(self, model: Any, first: int) -> torch.Tensor:
        """[1, s] losses of the documents of a packed row, each of which ran in a row of its own."""
        outputs = []
        for sample, sizes in enumerate(list_documents(), first):
            dropout_rng.set_micro_batch(SEED, sample)
            args, kwargs = self._make_batch(sample, sizes)
            outputs.append(model(*args, **kwargs))
        return torch.cat(outputs, 1)

    def _compute_loss(self, output: Any) -> tuple[Any, ...]:
        losses = read_losses(self._case.family, output)
        found = {"losses": losses.detach().clone()}
        if self._config.calculate_per_token_loss:
            return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), found
        # The schedule multiplies by the number of context-parallel ranks, over which gradients are averaged.
        return losses.mean() / self._case.layout.cp, found


def _watch_norms(model: Any, sums: dict[str, torch.Tensor]) -> None:
    """Sum up abs(dy * normalised x) of every norm, channel by channel."""

    def watch(name: str, norm: Any, y: torch.Tensor) -> None:
        bias = getattr(norm, "bias", None)
        x = ((y if bias is None else y - bias) / norm.weight).detach()
        sums.setdefault(name, torch.zeros_like(norm.weight.detach()))

        def add(grad: torch.Tensor) -> None:
            sums[name] += (grad * x).abs().flatten(0, -2).sum(0)

        y.register_hook(add)

    for name, module in model.named_modules():
        if "norm" in name.rpartition(".")[2] and hasattr(module, "weight"):
            key = name_globally(model, f"{name}.weight")
            module.register_forward_hook(lambda module, _, y, key=key: watch(key, module, y))


def _sum_tied(model: Any, gradients: dict[str, torch.Tensor]) -> None:
    """Tied weights of the first and the last stage: the sum of their gradients, on both."""
    size = parallel_state.get_pipeline_model_parallel_world_size()
    if size > 1 and model.share_embeddings_and_output_weights:
        gradient = gradients["embedding.word_embeddings.weight"]
        torch.distributed.all_reduce(gradient, group=parallel_state.get_embedding_group())

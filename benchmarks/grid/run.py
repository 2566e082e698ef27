"""Runs one case of the grid on this rank: the schedule's forwards and backwards, and what they leave."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from formula_cases import count_stack
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from grid.cases import Case
from grid.models import (
    LLAMA,
    LayerRecorder,
    Sizes,
    build_config,
    build_model,
    fill_weights,
    gather_gradients,
    make_batch,
    name_globally,
    read_losses,
)
from tempo_kernels.philox import keep_bits
from tempo_megatron import TempoConfig
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.choose import choose

SIZES = Sizes()
SEED = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
Masks = dict[tuple[int, ...], bytes]


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
        case: what runs.
        is_stock: Megatron's own specs instead of the case's choice, where Megatron's norms can do the layout.
        records: whether to measure what is kept.
        draw: of the weights.
    """
    layout = case.layout
    settings = dict(LLAMA) if case.family == "Llama" else {}
    config = build_config(
        dtype=DTYPES[case.dtype],
        dropout=case.dropout,
        recompute=case.recompute,
        num_layers=layout.num_layers,
        sequence_parallel=layout.sequence_parallel,
        # What marks a parameter as split is a part of Megatron's initialisation.
        perform_initialization=True,
        **settings,
    )
    tempo: TempoConfig | None = case.tempo
    if is_stock:
        tempo = TempoConfig.off() if layout.sequence_parallel else None
    chosen = TempoConfig.off() if tempo is None else choose(config, tempo).config
    model_parallel_cuda_manual_seed(1234)
    stages = range(layout.virtual) if layout.virtual > 1 else [None]
    chunks = [build_model(case.family, config, tempo, SIZES, stage) for stage in stages]
    for chunk in chunks:
        fill_weights(chunk, draw)
    run = _Run(case, config, chosen, records)
    masks: Masks = {}
    norm_sums: dict[str, torch.Tensor] = {}
    if case.dtype == "fp64":
        for chunk in chunks:
            _watch_norms(chunk, norm_sums)
    with _recorded_masks(masks):
        results = get_forward_backward_func()(
            forward_step_func=run.step,
            data_iterator=[iter(range(run.num_micro_batches)) for _ in chunks],
            model=chunks,
            num_microbatches=run.num_micro_batches,
            seq_length=SIZES.seq_length,
            micro_batch_size=SIZES.micro_batch_size,
            decoder_seq_length=SIZES.seq_length,
            forward_only=False,
        )
    gradients: dict[str, torch.Tensor] = {}
    for key, gradient in itertools.chain.from_iterable(map(gather_gradients, chunks)):
        gradients[key] = gradients[key] + gradient if key in gradients else gradient
    _sum_tied(chunks[0], gradients)
    losses = torch.cat([result["losses"] for result in results]) if results else None
    if layout.sequence_parallel:
        # Each rank has a part of the tokens.
        for total in norm_sums.values():
            torch.distributed.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    sums = {name: total.max().item() for name, total in norm_sums.items()}
    return Found(losses, gradients, masks, run.kept, sums)


class _Run:
    """The forward steps that Megatron's schedules ask for."""

    def __init__(self, case: Case, config: Any, chosen: TempoConfig, records: bool) -> None:
        self._case, self._config, self._chosen, self._records = case, config, chosen, records
        self.num_micro_batches = 2 * case.layout.pp
        self.kept: dict[str, tuple[int, int]] = {}

    def step(self, iterator: Iterator[int], model: Any) -> tuple[Any, Any]:
        case, first = self._case, next(iterator) * SIZES.micro_batch_size
        dropout_rng.set_micro_batch(SEED, first)
        args, kwargs = make_batch(case.family, first, SIZES, gives_mask=self._chosen.attention == "off")
        if self._records and not self.kept:
            recorder = LayerRecorder(model)
            with recorder.record():
                output = model(*args, **kwargs)
            for stack, saved in recorder.list_stacks().items():
                counted = count_stack(case.family, stack, self._config, self._chosen, SIZES)
                self.kept[stack] = (sum(each.num_bytes for each in saved), counted)
        else:
            output = model(*args, **kwargs)
        return output, self._compute_loss

    def _compute_loss(self, output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses = read_losses(self._case.family, output)
        return losses.mean(), {"losses": losses.detach().clone()}


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


@contextlib.contextmanager
def _recorded_masks(masks: Masks) -> Iterator[None]:
    """Every row of every mask that is drawn, by (key, sample, head, row); two draws of a place must agree."""

    def record(key: int, p: float, **where: Any) -> torch.Tensor:
        bits = keep_bits(key, p, **where)
        indices = [where[name].broadcast_to(bits.shape[:-1]).flatten().tolist() for name in ("sample", "head", "row")]
        rows = (bits == 0).flatten(0, -2).to(torch.uint8).numpy()
        for sample, head, number, row in zip(*indices, rows, strict=True):
            place, drawn = (key, sample, head, number), row.tobytes()
            known = masks.get(place, b"")
            # A causal block draws the columns up to its last row only.
            assert agree(known, drawn), f"two draws of {place} differ"
            masks[place] = max(known, drawn, key=len)
        return bits

    with (
        mock.patch("tempo_kernels.dropout_add.cpu.keep_bits", record),
        mock.patch("tempo_kernels.attention.cpu.keep_bits", record),
    ):
        yield


def agree(row: bytes, other: bytes) -> bool:
    """Whether two draws of a row of a mask say the same, where both say something."""
    return row.startswith(other) or other.startswith(row)

"""Runs one case of the grid on this rank and holds it against its witnesses.

The rule is the house's: error(ours) <= 2 x error(witness) + 1 ulp of the largest exact value, of the losses of all
tokens and of each parameter's gradient, every one put together from the parts that the ranks hold.

- dropout 0: exact is stock Megatron in float64 on one process, the witness stock Megatron of the same dtype in the same
  layout, both without recomputation.
- dropout 0.1: exact is Tempo in float64 on one process without recomputation, the witness the larger of two: the same
  choice and dtype on one process, and, for what a layout alone rounds, stock in the same layout at dropout 0. Every
  mask is, bit for bit, that of the one process. Stock draws masks that depend on the layout: it is only run.
- In place GELU has its floor, by which it misses GELU's derivative at most: that times the largest exact value.
- A norm in place differentiates from the normalised x that y, rounded, carries, which is off by half an ulp (see
  tempo_kernels.norm): in float32, whose bound is that fine, the gradient of its weight, a sum of dy * x over tokens,
  may be off by half of float32's round-off times the sum of abs(dy * x), which the exact run measures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from formula_cases import count_stack
from grid_cases import ONE_PROCESS, Case
from grid_models import (
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
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from witness import ulp

from tempo_kernels.philox import keep_bits
from tempo_megatron import TempoConfig
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.choices import choose

SIZES = Sizes()
SEED = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
# The largest error of GELU' in place, as tempo_kernels.gelu states it.
GELU_FLOOR = {"fp32": 5.1e-5, "bf16": 1.6e-2}
LIMIT_OF_BYTES = 0.01

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


def run_model(case: Case, *, is_stock: bool = False, records: bool = True) -> Found:
    """The schedule's forwards and backwards of one global batch, in the layout that is initialised.

    is_stock: Megatron's own specs instead of the case's choice, where Megatron's norms can do the layout.
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
        fill_weights(chunk)
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
            assert _agree(known, drawn), f"two draws of {place} differ"
            masks[place] = max(known, drawn, key=len)
        return bits

    with (
        mock.patch("tempo_kernels.dropout_add.cpu.keep_bits", record),
        mock.patch("tempo_kernels.attention.cpu.keep_bits", record),
    ):
        yield


def name_exact(case: Case) -> Case:
    """The run on one process in float64 that is exact for a case."""
    choice = "off" if case.dropout == 0 else "recompute"
    return dataclasses.replace(name_one_process(case), choice=choice, dtype="fp64")


def name_one_process(case: Case) -> Case:
    """The case itself on one process, without recomputation; its layout says how many layers and micro batches."""
    return dataclasses.replace(case, layout=dataclasses.replace(ONE_PROCESS, pp=case.layout.pp), recompute="none")


def find_file(folder: Path, case: Case) -> Path:
    return folder / (case.key.replace(" | ", "-").replace(" ", "_").replace(",", "") + ".pt")


def save_reference(case: Case, folder: Path) -> None:
    """Run a case of `list_references` on one process, whatever its layout says, and write what it found."""
    found = run_model(case, is_stock=case.choice == "off", records=False)
    torch.save(found, find_file(folder, case))


class Judge:
    """Holds cases against their witnesses, of which those of one process lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: dict[Case, Found] = {}
        self._stock: dict[Case, Found] = {}

    def judge(self, case: Case) -> dict[str, Any]:
        """What this rank says: {"status": "passed", "ratio": of an error to its limit, ...}, or "failed" and why."""
        if case.is_refused:
            return _judge_refusal(case)
        found = run_model(case)
        complaints = [
            f"{stack} keeps {measured} bytes, and the formula says {counted}"
            for stack, (measured, counted) in found.kept.items()
            if abs(counted - measured) > LIMIT_OF_BYTES * measured
        ]
        result: dict[str, Any] = {"status": "passed", "kept": found.kept, "ratio": 0.0, "worst": ""}
        if case.dropout > 0 and case.choice == "off":
            values = [*found.gradients.values(), *([] if found.losses is None else [found.losses])]
            complaints += [] if all(map(_is_finite, values)) else ["a loss or a gradient is not finite"]
        else:
            ratio, worst = self._compare(case, found)
            result.update(ratio=ratio, worst=worst)
            complaints += [] if ratio <= 1 else [f"the error of {worst} is {ratio:.2f} of its limit"]
        if case.dropout > 0 and case.choice != "off":
            complaints += self._compare_masks(case, found.masks)
            if case.layout == ONE_PROCESS:
                complaints += self._list_changes(case, found)
        if complaints:
            result.update(status="failed", message="; ".join(complaints))
        return result

    def _compare(self, case: Case, found: Found) -> tuple[float, str]:
        """(the largest error as a part of its limit, of what)."""
        exact = self._load(name_exact(case))
        witnesses = [self._run_stock(case)]
        if case.dropout > 0:
            witnesses.append((exact, self._load(name_one_process(case))))
        is_in_place = case.choice in ("inplace", "auto")
        floor = GELU_FLOOR[case.dtype] if is_in_place and case.family != "Llama" else 0.0
        sums = exact.norm_sums if is_in_place and case.dtype == "fp32" else {}
        ratios = {}
        for name, ours in _list_values(found).items():
            true = _list_values(exact)[name]
            allowed = max(_find_error(_list_values(w)[name], _list_values(e)[name]) for e, w in witnesses)
            largest = true.abs().max()
            limit = 2 * allowed + ulp(largest, ours.dtype).item() + floor * largest.item()
            limit += torch.finfo(torch.float32).eps / 2 * sums.get(name, 0.0)
            ratios[name] = _find_error(ours, true) / limit
        worst = max(ratios, key=lambda name: ratios[name] if math.isfinite(ratios[name]) else math.inf)
        return ratios[worst], worst

    def _list_changes(self, case: Case, found: Found) -> list[str]:
        """What Megatron's recomputation changed on one process, where it may change nothing, not one bit."""
        plain = _list_values(self._load(name_one_process(case)))
        changed = [name for name, value in _list_values(found).items() if not torch.equal(value, plain[name])]
        return [f"recomputation changes {', '.join(changed)}"] if changed else []

    def _run_stock(self, case: Case) -> tuple[Found, Found]:
        """(exact, found) of stock in the case's layout and dtype at dropout 0, without recomputation."""
        stock = dataclasses.replace(case, recompute="none", choice="off", dropout=0.0)
        if stock not in self._stock:
            self._stock[stock] = run_model(stock, is_stock=True, records=False)
        return self._load(name_exact(stock)), self._stock[stock]

    def _load(self, case: Case) -> Found:
        if case not in self._loaded:
            self._loaded[case] = torch.load(find_file(self._folder, case), weights_only=False)
        return self._loaded[case]

    def _compare_masks(self, case: Case, masks: Masks) -> list[str]:
        """What is wrong with the masks of all ranks together; the same on each."""
        expected = self._load(name_one_process(case)).masks
        wrong = [place for place, row in masks.items() if place not in expected or not _agree(row, expected[place])]
        drawn = torch.tensor([place in masks for place in expected], dtype=torch.uint8)
        counts = torch.tensor([len(wrong)])
        for tensor in (drawn, counts):
            torch.distributed.all_reduce(
                tensor, torch.distributed.ReduceOp.MAX, group=parallel_state.get_model_parallel_group()
            )
        complaints = [f"{int(counts)} rows of masks are not those of one process"] if counts else []
        if not drawn.all():
            complaints.append(f"{int((drawn == 0).sum())} of {len(expected)} rows of masks are drawn by no rank")
        return complaints


def _judge_refusal(case: Case) -> dict[str, Any]:
    try:
        run_model(case)
    except ValueError as error:
        text = str(error)
        is_sentence = "\n" not in text and ". " not in text and "tempo.activation" in text
        return {"status": "refused" if is_sentence else "failed", "message": text}
    return {"status": "failed", "message": "expected a refusal, and the model ran"}


def _list_values(found: Found) -> dict[str, torch.Tensor]:
    return found.gradients | ({} if found.losses is None else {"the losses": found.losses})


def _find_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return (value.double() - exact.double()).abs().max().item()


def _is_finite(value: torch.Tensor) -> bool:
    return bool(value.isfinite().all())


def _agree(row: bytes, other: bytes) -> bool:
    return row.startswith(other) or other.startswith(row)


def list_references(cases: list[Case]) -> list[Case]:
    """The runs on one process that `cases` are held against."""
    found: dict[Case, None] = {}
    for case in cases:
        if case.is_refused or (case.dropout > 0 and case.choice == "off"):
            continue
        found[name_exact(case)] = found[name_exact(dataclasses.replace(case, dropout=0.0))] = None
        if case.dropout > 0:
            found[name_one_process(case)] = None
    return list(found)

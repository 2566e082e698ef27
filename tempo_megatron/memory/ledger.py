"""The ledger: every tensor that a model keeps for backward, operation by operation, measured on the real modules.

A model with one transformer layer in each stack runs forward on a random micro batch; what autograd then holds is
counted over distinct storages. "sbh" is bytes divided by s * b * h, in full s and h whatever the parallel layout: the
unit of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), where a stock layer is
34 sbh + 5 a s**2 b.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron import cpu
from tempo_megatron.config import TempoConfig
from tempo_megatron.memory.recorder import Recorder, SavedStorage
from tempo_megatron.models.build import build_model, build_transformer_config, choose_for_model
from tempo_megatron.models.inputs import make_inputs
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.operations import ACTIVATION, LEDGER_ROWS, MASK, OPERATIONS, STACKS, LedgerRow
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.choices import Choices
from tempo_megatron.slots.mlp import describe_activation
from tempo_megatron.slots.report import TempoReport

_BDA = OPERATIONS["dropout"].slots
_ROWS = {(row.module, row.is_scores): row for row in LEDGER_ROWS}
_MODULES = {row.module for row in LEDGER_ROWS}


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation: the storages that it was the first to save."""

    operation: str
    num_bytes: int
    num_storages: int
    place: int = len(LEDGER_ROWS)
    """Where it stands in the table; an operation that LEDGER_ROWS does not know stands last."""
    is_in_layer: bool = True
    """Whether each layer has it, or the model once."""
    is_scores: bool = False
    """Whether it grows with s**2."""


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Layers of the same values."""

    layers: str
    """`0-11,20`, from 0."""

    num_layers: int
    layer_bytes: int
    """Of one of them, s*s tensors included."""


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What one layer, and the model around the layers, keep for backward on one rank."""

    rows: tuple[Row, ...]
    seq_length: int
    micro_batch_size: int
    hidden_size: int
    num_layers: int
    choices: Choices
    """What was measured, and why "auto" was less than its first choice."""

    report: TempoReport | None = None
    """What became of the slots of all layers; of `measure_model` only."""

    layer_kinds: tuple[LayerKind, ...] = ()
    """The kinds of layers where they are not alike; `rows` are the first one's. Of `measure_model` only."""

    def convert_to_sbh(self, num_bytes: int) -> float:
        """Bytes in units of s * b * h."""
        return num_bytes / (self.seq_length * self.micro_batch_size * self.hidden_size)

    @property
    def layer_rows(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.is_in_layer)

    @property
    def outside_rows(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.is_in_layer)

    @property
    def layer_bytes(self) -> int:
        """One transformer layer, s*s tensors included; in T5 one of the encoder and one of the decoder."""
        return sum(row.num_bytes for row in self.layer_rows)

    @property
    def scores_bytes(self) -> int:
        """The part of `layer_bytes` that grows with s**2."""
        return sum(row.num_bytes for row in self.rows if row.is_in_layer and row.is_scores)

    @property
    def layer_sbh(self) -> float:
        """One transformer layer without its s*s tensors, in sbh."""
        return self.convert_to_sbh(self.layer_bytes - self.scores_bytes)

    @property
    def mean_layer_bytes(self) -> float:
        """One transformer layer; where layers are not alike, the mean of all."""
        kinds = self.layer_kinds or (LayerKind("", self.num_layers, self.layer_bytes),)
        return sum(kind.num_layers * kind.layer_bytes for kind in kinds) / sum(kind.num_layers for kind in kinds)

    @property
    def model_bytes(self) -> int:
        """All layers, embedding, final norm, output layer and loss."""
        return round(self.num_layers * self.mean_layer_bytes) + sum(row.num_bytes for row in self.outside_rows)


def measure(
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig,
    *,
    vocab_size: int,
    seq_length: int,
    micro_batch_size: int = 1,
    num_layers: int | None = None,
    shape: ModelShape | None = None,
) -> Ledger:
    """Run one layer's forward in training mode and count what autograd holds.

    Args:
        transformer_config: Megatron's; its `num_layers` is taken as 1 for the run. Model parallelism must be
            initialised (see `tempo_megatron.memory.layout.simulate_layout`) with its sizes.
        tempo_config: `TempoConfig.off()` for stock; "auto" becomes what the configuration allows. Of its `layers` the
            one layer is "0"; for others see `tempo_megatron.memory.layer_kinds.measure_model`.
        vocab_size: padded size of the vocabulary, divisible by the tensor parallel size.
        seq_length, micro_batch_size: s and b; in T5 the decoder is as long, or shorter where its shape says so.
        num_layers: layers of the whole model, for the totals (default: transformer_config.num_layers).
        shape: what `transformer_config` does not say: family, positions, heads (default: a GPT's as GPT-2).

    Returns:
        The ledger of this rank.
    """
    one_layer = dataclasses.replace(transformer_config, num_layers=1)
    shape = shape or make_gpt_shape(one_layer, seq_length)
    shape = dataclasses.replace(
        shape, max_position_embeddings=max(shape.max_position_embeddings, seq_length), num_layers=1
    )
    choices = choose_for_model(shape, one_layer, tempo_config)
    model_parallel_cuda_manual_seed(1234)
    dropout_rng.set_micro_batch(1234, 0)
    model = build_model(shape, one_layer, choices.config, vocab_size)
    convert_parameters(model, one_layer.params_dtype)
    model.train()
    # The one mask of a GPT's layers is the micro batch's own tensor; stock needs it given on a CPU.
    gives_mask = cpu.is_used() and any(choices.config.for_layer(0, stack).attention == "off" for stack in STACKS)
    inputs = make_inputs(shape, vocab_size, micro_batch_size, seq_length=seq_length, causal_mask=gives_mask)
    recorder = Recorder(model, exclude=tuple(value for value in inputs.values() if value is not None))
    _scope_what_is_no_module(recorder, model)
    with recorder.record():
        outputs = model(**inputs)
    lengths = {seq_length, min(seq_length, shape.decoder_seq_length or seq_length)}
    rows = _sum_rows(recorder.list_saved(), lengths, describe_activation(one_layer))
    del outputs
    return Ledger(
        rows=rows,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        hidden_size=one_layer.hidden_size,
        num_layers=num_layers or transformer_config.num_layers,
        choices=choices,
    )


def make_gpt_shape(transformer_config: TransformerConfig, seq_length: int) -> ModelShape:
    """What a TransformerConfig does not say, as GPT-2 has it."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels")
    return make_shape(**{name: getattr(transformer_config, name) for name in names}, seq_length=seq_length)


def measure_at_its_length(
    shape: ModelShape, transformer_config: TransformerConfig, tempo_config: TempoConfig, **settings: Any
) -> Ledger:
    """`measure` at the shape's own length, from three short ones.

    Every row is a parabola of the length: tokens count once, scores twice, parameters not at all. Three lengths give
    the bytes of any other exactly, without the work and the memory of a long sample.
    """
    lengths = _choose_lengths(shape, transformer_config.tensor_model_parallel_size)
    if shape.decoder_seq_length not in (None, shape.seq_length) or shape.seq_length <= lengths[-1]:
        return measure(transformer_config, tempo_config, shape=shape, seq_length=shape.seq_length, **settings)
    short = dataclasses.replace(
        shape, decoder_seq_length=None if shape.decoder_seq_length is None else shape.seq_length
    )
    ledgers = [measure(transformer_config, tempo_config, shape=short, seq_length=s, **settings) for s in lengths]
    kept = [{row.operation: row for row in ledger.rows} for ledger in ledgers]
    assert kept[0].keys() == kept[1].keys() == kept[2].keys()
    rows = tuple(
        dataclasses.replace(
            row, num_bytes=extrapolate(lengths, [found[row.operation].num_bytes for found in kept], shape.seq_length)
        )
        for row in ledgers[0].rows
    )
    return dataclasses.replace(ledgers[0], rows=rows, seq_length=shape.seq_length)


def _choose_lengths(shape: ModelShape, tp: int) -> list[int]:
    """Three short ones that tensor parallelism divides; none is a size of something else, which would look like s*s."""
    sizes = {shape.kv_channels, *(n // tp for n in (shape.num_attention_heads, shape.num_query_groups))}
    for first in itertools.count(3):
        lengths = [tp * length for length in (first, first + 2, first + 4)]
        if not sizes & set(lengths):
            return lengths
    raise AssertionError


def extrapolate(lengths: list[int], kept: Sequence[float], length: int) -> int:
    """The value at `length` of the parabola through three equidistant points."""
    step = lengths[1] - lengths[0]
    first, second = kept[1] - kept[0], kept[2] - 2 * kept[1] + kept[0]
    n = (length - lengths[0]) / step
    return round(kept[0] + n * first + n * (n - 1) / 2 * second)


def build_ledger_config(
    shape: ModelShape, *, sequence_parallel: bool, dtype: torch.dtype, recompute: tuple[str, ...]
) -> TransformerConfig:
    """The model's TransformerConfig under the initialised model parallelism.

    recompute: nothing, or "full", or names of Megatron's recompute modules ("core_attn", "mlp").
    """
    choices: dict[str, Any] = {}
    if "full" in recompute:
        choices = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute:
        choices = {"recompute_granularity": "selective", "recompute_modules": list(recompute)}
    return build_transformer_config(
        shape,
        dtype=dtype,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        # The values do not matter here, and drawing them for a large model would take longer than its forward.
        perform_initialization=False,
        **choices,
    )


def convert_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """model.to(dtype) of the parameters, which fake tensors refuse."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype != dtype:
                converted = torch.nn.Parameter(parameter.detach().to(dtype))
                converted.__dict__.update(parameter.__dict__)
                module._parameters[name] = converted


def _scope_what_is_no_module(recorder: Recorder, model: torch.nn.Module) -> None:
    """Name the functions that a layer adds up with, and the masks that a stack is given by its model."""
    for stack in STACKS:
        block: Any = getattr(model, stack, None)
        if block is None:
            continue
        block.register_forward_pre_hook(lambda _, args, keywords: _claim_masks(recorder, keywords), with_kwargs=True)
        layer = block.layers[0]
        for name in _BDA:
            if not isinstance(get_function := getattr(layer, name), torch.nn.Module):
                setattr(layer, name, _scope_bda(recorder, f"{stack}.layers.0.{name}", get_function))


def _claim_masks(recorder: Recorder, keywords: dict[str, Any]) -> None:
    for name in ("attention_mask", "context_mask"):
        if (mask := keywords.get(name)) is not None:
            recorder.claim(mask, MASK)


def _scope_bda(recorder: Recorder, operation: str, get_function: Any) -> Any:
    return lambda training, fused: recorder.scope(operation, get_function(training, fused))


def _find_row(saved: SavedStorage, lengths: set[int]) -> LedgerRow:
    name = saved.operation
    while name not in _MODULES:
        name = name.rpartition(".")[0]
    is_scores = len(saved.shape) > 1 and set(saved.shape[-2:]) <= lengths
    return _ROWS.get((name, is_scores)) or _ROWS[name, False]


def _sum_rows(saved: list[SavedStorage], lengths: set[int], activation: str) -> tuple[Row, ...]:
    totals: dict[LedgerRow, list[int]] = {}
    for storage in saved:
        total = totals.setdefault(_find_row(storage, lengths), [0, 0])
        total[0] += storage.num_bytes
        total[1] += 1
    has_two_stacks = len({row.stack for row in totals if row.stack}) > 1
    return tuple(
        Row(
            (f"{row.stack} " if has_two_stacks and row.stack else "")
            + (activation if row.title == ACTIVATION else row.title),
            totals[row][0],
            totals[row][1],
            place,
            is_in_layer=row.is_in_layer,
            is_scores=row.is_scores,
        )
        for place, row in enumerate(LEDGER_ROWS)
        if row in totals
    )

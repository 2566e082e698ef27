"""The ledger: every tensor that a model keeps for backward, operation by operation, measured on the real modules.

A model with one transformer layer in each stack runs forward on a random micro batch; what autograd then holds is
counted over distinct storages. "sbh" is bytes divided by s * b * h, in full s and h whatever the parallel layout: the
unit of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), where a stock layer is
34 sbh + 5 a s**2 b.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron import cpu
from tempo_megatron.memory.fake_tensors import simulate_layout, use_fake_tensors
from tempo_megatron.memory.kept.attribution import Row, attribute_all, sum_rows
from tempo_megatron.memory.kept.recorder import Recorder, SavedStorage
from tempo_megatron.memory.run import Run
from tempo_megatron.models.build import build_model, build_transformer_config, choose_for_model, make_inputs, make_specs
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS, write_layers
from tempo_megatron.settings.operations import STACKS
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.choose import Choices
from tempo_megatron.slots.mlp import describe_activation
from tempo_megatron.slots.report import TempoReport, report_on


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
        return num_bytes / self.sbh_bytes

    @property
    def sbh_bytes(self) -> int:
        """s * b * h."""
        return self.seq_length * self.micro_batch_size * self.hidden_size

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
    on_fake_tensors: bool = False,
) -> Ledger:
    """Run one layer's forward in training mode and count what autograd holds.

    Args:
        transformer_config: Megatron's; its `num_layers` is taken as 1 for the run. Model parallelism must be
            initialised (see `tempo_megatron.memory.fake_tensors.simulate_layout`) with its sizes.
        tempo_config: `TempoConfig.off()` for stock; "auto" becomes what the configuration allows. Of its `layers` the
            one layer is "0"; for others see `tempo_megatron.memory.kept.ledger.measure_model`.
        vocab_size: padded size of the vocabulary, divisible by the tensor parallel size.
        seq_length, micro_batch_size: s and b; in T5 the decoder is as long, or shorter where its shape says so.
        num_layers: layers of the whole model, for the totals (default: transformer_config.num_layers).
        shape: what `transformer_config` does not say: family, positions, heads (default: a GPT's as GPT-2).
        on_fake_tensors: measure on fake tensors, in seconds at any size. The result is the same, except that the
            in-place norm keeps slightly more where a gamma is nearly 0.

    Returns:
        The ledger of this rank.
    """
    one_layer = dataclasses.replace(transformer_config, num_layers=1)
    shape = shape or make_gpt_shape(one_layer, seq_length)
    shape = dataclasses.replace(
        shape, max_position_embeddings=max(shape.max_position_embeddings, seq_length), num_layers=1
    )
    choices = choose_for_model(shape, one_layer, tempo_config)
    # Before tensors are fake: random states are values.
    model_parallel_cuda_manual_seed(1234)
    dropout_rng.set_micro_batch(1234, 0)
    with use_fake_tensors() if on_fake_tensors else contextlib.nullcontext():
        saved = _list_saved(shape, one_layer, choices.config, vocab_size, micro_batch_size, seq_length)
    return Ledger(
        rows=sum_rows(
            saved, (seq_length, min(seq_length, shape.decoder_seq_length or seq_length)), describe_activation(one_layer)
        ),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        hidden_size=one_layer.hidden_size,
        num_layers=num_layers or transformer_config.num_layers,
        choices=choices,
    )


def _list_saved(
    shape: ModelShape,
    one_layer: TransformerConfig,
    tempo_config: TempoConfig,
    vocab_size: int,
    micro_batch_size: int,
    seq_length: int,
) -> list[SavedStorage]:
    """What autograd holds after the forward of a model with one layer in each stack."""
    model = build_model(shape, one_layer, tempo_config, vocab_size)
    convert_parameters(model, one_layer.params_dtype)
    model.train()
    # The one mask of a GPT's layers is the micro batch's own tensor; stock needs it given on a CPU.
    gives_mask = cpu.is_used() and any(tempo_config.for_layer(0, stack).attention == "off" for stack in STACKS)
    inputs = make_inputs(shape, vocab_size, micro_batch_size, seq_length=seq_length, causal_mask=gives_mask)
    if shape.family == "gpt" or tempo_config.loss == "fused":
        # As in training, where the loss head knows which losses count, and may make their gradients in forward.
        inputs["loss_mask"] = torch.ones(inputs["input_ids"].shape, dtype=torch.float32)
    recorder = Recorder(model, exclude=tuple(value for value in inputs.values() if value is not None))
    with attribute_all(recorder, model), recorder.record():
        outputs = model(**inputs)
    saved = recorder.list_saved()
    del outputs
    return saved


def make_gpt_shape(transformer_config: TransformerConfig, seq_length: int) -> ModelShape:
    """What a TransformerConfig does not say, as GPT-2 has it."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels")
    return make_shape(**{name: getattr(transformer_config, name) for name in names}, seq_length=seq_length)


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


def measure_run(run: Run) -> Ledger:
    """The ledger of a run on rank 0 of a simulated tensor-parallel group, with Megatron's local modules on a CPU.

    Raises ValueError as `measure_model`.
    """
    cpu.use_cpu()
    with simulate_layout(run.tensor_parallel):
        config = build_ledger_config(
            run.model, sequence_parallel=run.sequence_parallel, dtype=run.dtype, recompute=run.recompute
        )
        return measure_model(
            config,
            run.tempo,
            shape=run.model,
            vocab_size=run.padded_vocab_size,
            micro_batch_size=run.micro_batch_size,
        )


def measure_model(
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig,
    *,
    vocab_size: int,
    micro_batch_size: int = 1,
    shape: ModelShape | None = None,
    seq_length: int | None = None,
    num_layers: int | None = None,
) -> Ledger:
    """As `measure`, for a `tempo_config` that may have `layers`.

    Args:
        transformer_config, tempo_config, vocab_size, micro_batch_size: as `measure`'s.
        shape: the model, which is then measured at its own length (default: a GPT's as GPT-2).
        seq_length: the length of a model without a shape.
        num_layers: layers of the whole model (default: transformer_config.num_layers).

    Returns:
        The ledger of the first kind of layer, whose `layer_kinds` are all of them and whose `model_bytes` counts each.

    Raises ValueError as `tempoize`.
    """
    num_layers = num_layers or transformer_config.num_layers
    whole = dataclasses.replace(transformer_config, num_layers=num_layers)
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "micro_batch_size": micro_batch_size, "num_layers": num_layers}

    length = shape.seq_length if seq_length is None and shape is not None else seq_length
    assert length is not None
    sizes["seq_length"] = length
    one = shape or make_gpt_shape(whole, length)
    choices = choose_for_model(one, whole, tempo_config)
    specs = make_specs(one, whole, tempo_config)
    kinds: dict[tuple[TempoConfig, ...], list[int]] = {}
    for layer in range(num_layers):
        kinds.setdefault(tuple(choices.config.for_layer(layer, stack) for stack in specs), []).append(layer)
    measured = []
    for kind, layers in kinds.items():
        # The model around the layer has the values of the fields, whatever those of the layer are.
        values = {
            f"{stack} 0": {name: getattr(config, name) for name in LAYER_OPERATIONS}
            for stack, config in zip(specs, kind, strict=True)
        }
        config = dataclasses.replace(choices.config, layers=values if choices.config.layers else {})
        measured.append((layers, measure(transformer_config, config, shape=shape, on_fake_tensors=True, **sizes)))
    return dataclasses.replace(
        measured[0][1],
        choices=choices,
        report=sum((report_on(spec, choices) for spec in specs.values()), TempoReport()),
        layer_kinds=tuple(
            LayerKind(write_layers(layers), len(layers), ledger.layer_bytes) for layers, ledger in measured
        ),
    )

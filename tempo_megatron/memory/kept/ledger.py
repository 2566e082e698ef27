"""The ledger: measures what a model keeps for backward, operation by operation, on the real modules.

A model with one transformer layer in each stack runs forward on a random micro batch; then the distinct storages that
autograd holds are counted. "sbh" is bytes divided by s * b * h, the whole s and h in any parallel layout. That is the
unit of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), where a stock layer keeps
34 sbh + 5 a s**2 b.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_kernels.offload import MIN_BYTES
from tempo_megatron import cpu
from tempo_megatron.memory.fake_tensors import simulate_layout, use_fake_tensors
from tempo_megatron.memory.kept.attribution import LayerKind, Row, attribute_all, find_row, sum_rows
from tempo_megatron.memory.kept.recorder import Recorder, SavedStorage
from tempo_megatron.memory.run import Experts, Run
from tempo_megatron.memory.simulated.experts import put_experts
from tempo_megatron.models.build import build_model, build_transformer_config, make_inputs, make_specs
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS, read_layers, write_layers
from tempo_megatron.settings.operations import STACKS, find_offload_row, is_moved
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.choose import Choices, choose
from tempo_megatron.slots.mlp import describe_activation
from tempo_megatron.slots.report import TempoReport, report_on


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What the layers, and the model around them, keep for backward on one rank."""

    layer_kinds: tuple[LayerKind, ...]
    """The layers, those of equal values together."""
    outside_rows: tuple[Row, ...]
    """Embedding, final norm, output layer and loss."""
    seq_length: int
    micro_batch_size: int
    hidden_size: int
    choices: Choices
    """What was measured, and why "auto" was less than its first choice."""
    report: TempoReport
    """What became of the slots of all layers."""

    def convert_to_sbh(self, num_bytes: int) -> float:
        """Bytes in units of s * b * h."""
        return num_bytes / self.sbh_bytes

    @property
    def sbh_bytes(self) -> int:
        """s * b * h."""
        return self.seq_length * self.micro_batch_size * self.hidden_size

    @property
    def layer_rows(self) -> tuple[Row, ...]:
        """The rows of the first kind of layer."""
        return self.layer_kinds[0].rows

    @property
    def rows(self) -> tuple[Row, ...]:
        return (*self.layer_rows, *self.outside_rows)

    @property
    def layer_bytes(self) -> int:
        """One layer of the first kind, s*s tensors included; in T5 one of the encoder and one of the decoder."""
        return self.layer_kinds[0].layer_bytes

    @property
    def scores_bytes(self) -> int:
        """The part of `layer_bytes` that grows with s**2."""
        return sum(row.num_bytes for row in self.layer_rows if row.is_scores)

    @property
    def layer_sbh(self) -> float:
        """One layer of the first kind without its s*s tensors, in sbh."""
        return self.convert_to_sbh(self.layer_bytes - self.scores_bytes)

    def count_layer(self, layer: int) -> int:
        """Bytes of one layer, counted from 0."""
        return next(kind.layer_bytes for kind in self.layer_kinds if layer in read_layers(kind.layers))

    @property
    def most_moving_bytes(self) -> int:
        """Of what is sent to the host, what is on the device at once: that of two layers."""
        by_layer = {layer: kind.host_bytes for kind in self.layer_kinds for layer in read_layers(kind.layers)}
        moved = [by_layer[layer] for layer in sorted(by_layer)]
        return max(map(sum, itertools.pairwise(moved)), default=0) if len(moved) > 1 else sum(moved)

    @property
    def num_layers(self) -> int:
        return sum(kind.num_layers for kind in self.layer_kinds)

    @property
    def mean_layer_bytes(self) -> float:
        """The mean of all layers."""
        return sum(kind.num_layers * kind.layer_bytes for kind in self.layer_kinds) / self.num_layers

    @property
    def model_bytes(self) -> int:
        """All layers, embedding, final norm, output layer and loss."""
        return round(self.num_layers * self.mean_layer_bytes) + sum(row.num_bytes for row in self.outside_rows)


def measure_run(run: Run, shape: ModelShape | None = None) -> Ledger:
    """The ledger of a run on rank 0 of a simulated tensor-parallel group, with Megatron's local modules on a CPU.

    Experts share their tokens equally, as a rank of one that has all experts sees them whatever its router says.

    Args:
        run: of no shape with experts or latent attention, unless there is a shape.
        shape: the model with its parts; None is that of the run.

    Raises ValueError as `measure`.
    """
    cpu.use_cpu()
    shape = shape or run.model
    with simulate_layout(run.tensor_parallel):
        config = build_ledger_config(
            shape, sequence_parallel=run.sequence_parallel, dtype=run.dtype, recompute=run.recompute
        )
        return measure(
            config,
            run.tempo,
            shape=shape,
            experts=run.experts,
            vocab_size=run.padded_vocab_size,
            micro_batch_size=run.micro_batch_size,
            on_fake_tensors=True,
        )


def measure(
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig,
    *,
    vocab_size: int,
    seq_length: int | None = None,
    micro_batch_size: int = 1,
    num_layers: int | None = None,
    shape: ModelShape | None = None,
    experts: Experts | None = None,
    on_fake_tensors: bool = False,
) -> Ledger:
    """Run one layer of each kind forward in training mode and count what autograd holds.

    Args:
        transformer_config: Megatron's. Model parallelism must be initialised with its sizes (see
            `tempo_megatron.memory.fake_tensors.simulate_layout`).
        tempo_config: `TempoConfig.off()` for stock; "auto" becomes what the configuration allows.
        vocab_size: padded size of the vocabulary, divisible by the tensor parallel size.
        seq_length, micro_batch_size: s (default: the shape's) and b; a T5's decoder has at most s tokens.
        num_layers: layers of the whole model (default: transformer_config.num_layers).
        shape: what `transformer_config` does not say: family, positions, heads (default: those of a GPT-2).
        experts: of a shape with experts, on fake tensors, whose router cannot say which tokens an expert gets.
        on_fake_tensors: measure on fake tensors, in seconds at any size. The result is the same, except that the
            in-place norm keeps slightly more where a gamma is nearly 0, and a 64th of its output on a GPU.

    Returns:
        The ledger of this rank.

    Raises ValueError as `tempoize`.
    """
    whole = dataclasses.replace(transformer_config, num_layers=num_layers or transformer_config.num_layers)
    if shape is None:
        assert seq_length is not None, "give seq_length or shape"
        shape = _make_gpt_shape(whole, seq_length)
    seq_length = seq_length or shape.seq_length
    choices, specs = choose(whole, tempo_config), make_specs(shape, whole, tempo_config)
    kinds: dict[tuple[bool, tuple[TempoConfig, ...]], list[int]] = {}
    mixed = shape.layers_with_experts if shape.num_experts else [False] * whole.num_layers
    # The first kind is the one that most layers are of, of equally many the first.
    for layer in sorted(range(whole.num_layers), key=lambda layer: sum(mixed) * 2 > len(mixed) and not mixed[layer]):
        values_of_layer = tuple(choices.config.for_layer(layer, stack) for stack in specs)
        kinds.setdefault((mixed[layer], values_of_layer), []).append(layer)
    num_positions = max(shape.max_position_embeddings, seq_length)
    lengths = seq_length, min(seq_length, shape.decoder_seq_length or seq_length)
    measured: list[tuple[Row, ...]] = []
    for (_, kind), (layer, *_) in kinds.items():
        of_one_layer = dataclasses.replace(shape.take_layers([layer]), max_position_embeddings=num_positions)
        freq = {} if shape.num_experts is None else {"moe_layer_freq": [int(mixed[layer])]}
        one_layer = dataclasses.replace(transformer_config, num_layers=1, **freq)
        # The model around the layer has the values of the fields, whatever those of the layer are.
        values = {
            f"{stack} 0": {name: getattr(config, name) for name in LAYER_OPERATIONS}
            for stack, config in zip(specs, kind, strict=True)
        }
        config = dataclasses.replace(choices.config, layers=values if choices.config.layers else {})
        # Before tensors are fake: random states are values.
        model_parallel_cuda_manual_seed(1234)
        dropout_rng.set_micro_batch(1234, 0)
        with use_fake_tensors() if on_fake_tensors else contextlib.nullcontext():
            saved = _list_saved(of_one_layer, one_layer, config, experts, vocab_size, micro_batch_size, seq_length)
        moved = [_send_to_host(storage, dict(zip(specs, kind, strict=True)), lengths) for storage in saved]
        measured.append(sum_rows(moved, lengths, describe_activation(one_layer)))
    return Ledger(
        layer_kinds=tuple(
            LayerKind(write_layers(layers), len(layers), tuple(row for row in rows if row.is_in_layer))
            for layers, rows in zip(kinds.values(), measured, strict=True)
        ),
        outside_rows=tuple(row for row in measured[0] if not row.is_in_layer),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        hidden_size=whole.hidden_size,
        choices=choices,
        report=sum((report_on(spec, choices) for spec in specs.values()), TempoReport()),
    )


def _send_to_host(storage: SavedStorage, values: dict[str, TempoConfig], lengths: tuple[int, ...]) -> SavedStorage:
    """What a layer with these values, by stack, keeps, on the host if they send it there."""
    row = find_row(storage.operation, storage.shape, lengths)
    name, config = find_offload_row(row), values.get(row.stack or "")
    if name is None or config is None or storage.num_bytes < MIN_BYTES:
        return storage
    return dataclasses.replace(storage, is_on_host=is_moved(name, config.offload))


def _list_saved(
    shape: ModelShape,
    one_layer: TransformerConfig,
    tempo_config: TempoConfig,
    experts: Experts | None,
    vocab_size: int,
    micro_batch_size: int,
    seq_length: int,
) -> list[SavedStorage]:
    """What autograd holds after the forward of a model with one layer in each stack."""
    model = build_model(shape, one_layer, tempo_config, vocab_size)
    if experts is not None:
        put_experts(model, experts, is_fused=False)
    convert_parameters(model, one_layer.params_dtype)
    model.train()
    # Stock attention on a CPU needs the causal mask as an input.
    gives_mask = cpu.is_used() and any(tempo_config.for_layer(0, stack).attention == "off" for stack in STACKS)
    inputs = make_inputs(shape, vocab_size, micro_batch_size, seq_length=seq_length, causal_mask=gives_mask)
    if shape.family == "gpt" or tempo_config.loss == "fused":
        # As in training: the loss head knows which losses count, and may compute gradients in forward.
        labels = inputs["labels" if shape.family == "gpt" else "lm_labels"]
        inputs["loss_mask"] = torch.ones(labels.shape, dtype=torch.float32)
    recorder = Recorder(model, exclude=tuple(value for value in inputs.values() if value is not None))
    with attribute_all(recorder, model), recorder.record():
        outputs = model(**inputs)
    saved = recorder.list_saved()
    del outputs
    return saved


def _make_gpt_shape(transformer_config: TransformerConfig, seq_length: int) -> ModelShape:
    """A shape with the sizes of a TransformerConfig; the rest is GPT-2's."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels")
    return make_shape(**{name: getattr(transformer_config, name) for name in names}, seq_length=seq_length)


def build_ledger_config(
    shape: ModelShape,
    *,
    sequence_parallel: bool,
    dtype: torch.dtype,
    recompute: tuple[str, ...],
    fuse_swiglu: bool = False,
) -> TransformerConfig:
    """The model's TransformerConfig under the initialised model parallelism.

    Args:
        recompute: nothing, or "full", or names of Megatron's recompute modules ("core_attn", "mlp").
        fuse_swiglu: Megatron's fused SwiGLU, where that is the activation.
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
        fuse_swiglu=fuse_swiglu,
        # Drawing the values of a large model's weights would take longer than its forward.
        perform_initialization=False,
        **choices,
    )


def convert_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters as `model.to(dtype)` does, which fake tensors refuse."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype != dtype:
                converted = torch.nn.Parameter(parameter.detach().to(dtype))
                converted.__dict__.update(parameter.__dict__)
                module._parameters[name] = converted

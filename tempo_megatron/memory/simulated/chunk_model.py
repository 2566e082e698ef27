"""Builds the real modules of a chunk on fake tensors, with what stands for those of Transformer Engine and others.

References are to megatron-core 0.16.1, from megatron/core/.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron import cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk_memory import compress
from tempo_megatron.memory.simulated.device import (
    choose_attention,
    compute_fused_loss,
    put_kernels,
    put_stock_attention,
    recompute_norms,
)
from tempo_megatron.memory.simulated.experts import leave_out_experts, put_experts
from tempo_megatron.memory.simulated.float8 import keep_float8_inputs
from tempo_megatron.memory.simulated.hybrid import put_hybrid_layers
from tempo_megatron.memory.simulated.latent_attention import put_latent_attention
from tempo_megatron.models.build import build_model, build_transformer_config, make_specs, prepare_for_recomputation
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS
from tempo_megatron.settings.operations import STACKS_OF_FAMILIES
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.block_slots import find_inner_name
from tempo_megatron.slots.choose import Choices, choose
from tempo_megatron.slots.layer_spec import tempoize

_OF_STAND_INS = ("layernorm", "mla_up_proj", "moe_act")


def leave_out_stand_ins(recompute: Iterable[str]) -> tuple[str, ...]:
    """Megatron's recompute modules without those that modules of `memory.simulated` recompute themselves."""
    return tuple(name for name in recompute if name not in _OF_STAND_INS)


@contextlib.contextmanager
def simulate_rank(tensor_parallel: int) -> Iterator[None]:
    """Inside, this process is rank 0 of that many tensor-parallel ranks, on a CPU, with Megatron's random states."""
    cpu.use_cpu()
    with simulate_layout(tensor_parallel):
        model_parallel_cuda_manual_seed(1234)
        dropout_rng.set_micro_batch(1234, 0)
        yield


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
    if shape.num_experts is not None:
        # Experts are all on one rank, until what stands for them is put there.
        choices = {"expert_tensor_parallel_size": 1}
    if "full" in recompute:
        choices |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute:
        choices |= {"recompute_granularity": "selective", "recompute_modules": list(recompute)}
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


class Ends(NamedTuple):
    """What a chunk has beside its layers, and whether it has any."""

    embedding: bool
    norm: bool
    """Behind the model's last layer."""

    prediction: bool
    """Layers of multi-token prediction."""

    head: bool
    layers: bool = True


def replace_attention(config: TempoConfig, before: str = "off", then: str = "flash") -> TempoConfig:
    """`config` with another attention where it has this one: Tempo's keeps what Transformer Engine's does."""

    def replace(values: Mapping[str, str]) -> dict[str, str]:
        return {name: then if (name, value) == ("attention", before) else value for name, value in values.items()}

    layers = {key: replace(values) for key, values in config.layers.items()}
    return dataclasses.replace(config, **replace({"attention": config.attention}), layers=layers)


def describe_parts(config: TransformerConfig, run: Run) -> TransformerConfig:
    """`config` with the parts and the layout that decide which of Tempo's operations a run can have."""
    config = dataclasses.replace(
        config, multi_latent_attention=run.model.multi_latent_attention, mtp_num_layers=run.mtp_num_layers or None
    )
    if run.model.num_experts is not None:
        # Set behind Megatron's own checks, which ask for what is not installed here.
        config.expert_model_parallel_size = run.layout.ep
        config.expert_tensor_parallel_size = run.layout.etp
        config.moe_token_dispatcher_type = run.layout.dispatcher
        config.overlap_moe_expert_parallel_comm = run.layout.overlaps
    return config


def _leave_latent_attention(run: Run) -> TempoConfig:
    """The run's choices, in which latent attention is that of Transformer Engine."""
    if not run.model.multi_latent_attention:
        return run.tempo
    values = run.tempo.values_of("attention") - {"auto", "off"}
    if values:
        raise ValueError(
            f"tempo.attention is {values.pop()} with latent attention, which the estimate knows as Transformer "
            'Engine\'s only; set it to "off"'
        )
    return dataclasses.replace(run.tempo, attention="off")


def _find_predicting(run: Run, has_experts: Sequence[bool]) -> int:
    """The layer that each further token repeats: the last one; of a hybrid, the last that its pattern names."""
    if run.hybrid is None:
        return len(has_experts) - 1
    wanted = run.hybrid.mtp_pattern == "*E"
    found = [place for place, has in enumerate(has_experts) if has == wanted]
    if not found:
        raise ValueError(
            f"multi-token prediction of {run.hybrid.mtp_pattern} stands behind {run.hybrid.pattern}, which has no such "
            "layer, and the estimate needs one there; change --hybrid-layer-pattern"
        )
    return found[-1]


def _place_final_norm(decoder: Any, *, has_norm: bool) -> None:
    """With multi-token prediction the final norm is in the chunk of the last layer (core/transformer/
    transformer_block.py: has_final_layernorm_in_this_stage), not in that of the head."""
    if not has_norm:
        decoder.final_layernorm = None
    elif decoder.final_layernorm is None:
        config = decoder.config
        values = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        decoder.final_layernorm = build_module(decoder.submodules.layer_norm, config=config, **values)


def _put_multi_token_prediction(model: Any, layer_spec: Any, run: Run, tempo_config: TempoConfig) -> None:
    """Let the GPTModel of a chunk predict more tokens.

    Args:
        model: of the chunk. Where it has no embedding, it gets a copy (models/gpt/gpt_model.py:149).
        layer_spec: of the layer that each further token takes.
        run: whose multi-token prediction it is.
        tempo_config: the values of its layers, without "auto".
    """
    config, number = model.config, run.mtp_num_layers
    norm = WrappedTorchNorm
    of_layer = {find_inner_name(MultiTokenPredictionLayerSubmodules): layer_spec}
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, layer_norm=norm, **of_layer
        ),
    )
    layers = [layer] * (1 if run.mtp_repeats_layer else number)
    spec = tempoize(MultiTokenPredictionBlockSubmodules(layer_specs=layers), config, tempo_config)
    # By default a newer megatron-core has groups for the layers, but none for their routers.
    groups = {"pg_collection": model.pg_collection} if hasattr(model, "pg_collection") else {}
    model.mtp = MultiTokenPredictionBlock(config, spec, **groups)
    if run.mtp_repeats_layer:
        # One layer, which runs for every token (--mtp-use-repeated-layer).
        model.mtp.layers = torch.nn.ModuleList([*model.mtp.layers] * number)
    dropout_rng.count_depths(model.mtp.layers)
    prepare_for_recomputation(model.mtp, config)
    model.mtp_process = True
    if not model.pre_process:
        model.embedding = LanguageModelEmbedding(
            config,
            vocab_size=run.padded_vocab_size,
            max_sequence_length=run.model.max_position_embeddings,
            position_embedding_type=run.built_model.position_embedding_type,
        )


class ChunkModel:
    """The model of one chunk, built of the layers that stand for all.

    Args:
        run: of one stage, which is the chunk.
        ends: what it has beside the layers.
        longest_row: how many layers alike run; of more than that, three stand for all.

    Attributes:
        rows: (index of a layer, how many alike it stands for), as they are built.
        model: Megatron's, in training mode.
        shape: the model's, with as many layers as are built.
        tempo: what its layers have of Tempo's.
        stacks: the model's, of an encoder and of a decoder.
        layers: (layer, how many it stands for) of one stack after the other; a layer's place is that in this list.
        further: the layers of multi-token prediction, which runs inside the head and embeds tokens.
        in_float8: for each of `layers` whether its linears are in float8.
    """

    def __init__(self, run: Run, ends: Ends, longest_row: int = 3) -> None:
        shape, attention = run.built_model, choose_attention(run)
        is_fused, has_engine = attention != "unfused", run.stock == "transformer_engine"
        fuses_activation = has_engine and shape.is_gated if run.fuses_activation is None else run.fuses_activation
        config = build_ledger_config(
            shape,
            sequence_parallel=run.layout.sp,
            dtype=run.dtype,
            recompute=leave_out_stand_ins(run.recompute),
            fuse_swiglu=fuses_activation,
        )
        if run.moe_shared_expert_gate:
            # Before 0.16 no configuration has it.
            config = dataclasses.replace(config, moe_shared_expert_gate=True)
        asked = choose(describe_parts(config, run), _leave_latent_attention(run)).config
        chosen = replace_attention(asked) if is_fused else asked
        stacks = STACKS_OF_FAMILIES[shape.family]
        layers = range(shape.num_layers)
        kinds = [{stack: chosen.for_layer(layer, stack) for stack in stacks} for layer in layers]
        recomputed = [run.find_recomputed(layer) for layer in layers]
        mixed = shape.layers_with_experts
        pattern = run.hybrid.pattern if run.hybrid is not None else " " * shape.num_layers
        in_float8 = run.float8_layers or [run.float8 is not None] * shape.num_layers
        self.rows = rows = compress(zip(kinds, recomputed, mixed, pattern, in_float8, strict=True), longest_row)
        built = [index for index, _ in rows]
        changes: dict[str, Any] = {"num_layers": len(rows)}
        if shape.num_experts is not None:
            changes["moe_layer_freq"] = [int(mixed[index]) for index in built]
        if run.recompute_num_layers is not None:
            num_recomputed = sum(recomputed[index] != () for index in built)
            changes |= {"recompute_method": "block", "recompute_num_layers": num_recomputed}
        config = dataclasses.replace(config, **changes)
        values = {
            f"{stack} {place}": {name: getattr(kinds[index][stack], name) for name in LAYER_OPERATIONS}
            for place, index in enumerate(built)
            for stack in stacks
        }
        self.tempo = dataclasses.replace(chosen, layers=values if chosen.layers else {})
        self.shape = shape.take_layers(built)
        # All experts are on one rank in this model, which could not choose all that the run can.
        taken = Choices(config=self.tempo, written=self.tempo, reasons={})
        with leave_out_experts():
            self.model = model = build_model(
                self.shape,
                config,
                taken,
                run.padded_vocab_size,
                pre_process=ends.embedding,
                post_process=ends.head,
            ).train()
            if run.mtp_num_layers and run.hybrid is None:
                _place_final_norm(model.decoder, has_norm=ends.norm)
            if run.mtp_num_layers and (ends.head or ends.prediction):
                # For the losses of further tokens, and where they are noted for a log, which else is made on a GPU.
                model.config.mtp_num_layers = run.mtp_num_layers
                MTPLossLoggingHelper.tracker = {"values": torch.zeros(run.mtp_num_layers, dtype=torch.float32)}
            if ends.prediction:
                of_all = dataclasses.replace(chosen, layers={})
                taken = Choices(config=of_all, written=of_all, reasons={})
                specs = make_specs(self.shape, model.config, taken)["decoder"].layer_specs
                spec = specs[_find_predicting(run, [mixed[index] for index in built])]
                _put_multi_token_prediction(model, spec, run, of_all)
                model.train()
        if run.model.multi_latent_attention:
            put_latent_attention(model, config, run, is_fused=is_fused)
        if run.hybrid is not None:
            letters = [pattern[index] for index in built]
            put_hybrid_layers(model.decoder, config, run.hybrid, letters, run.chip.multiprocessors)
        convert_parameters(model, run.dtype)
        if shape.num_experts is not None:
            put_experts(model, run, is_fused=fuses_activation)
        if run.fuses_cross_entropy and chosen.loss != "fused":
            model.compute_language_model_loss = compute_fused_loss
        self.stacks = [getattr(model, stack) for stack in stacks]
        further = model.mtp.layers if ends.prediction else []
        if is_fused:
            copies = attention == "flash" and run.micro_batch_size > 1
            values_asked = [asked.for_layer(index, stack) for stack in stacks for index in built]
            own = [layer for block in self.stacks for layer in block.layers]
            own += [getattr(layer, find_inner_name(layer)) for layer in further]
            for layer, value in zip(own, [*values_asked, *[asked] * len(further)], strict=True):
                if value.attention == "off":
                    put_stock_attention(layer, copies=copies)
        put_kernels(model, run)
        if "layernorm" in run.recompute:
            recompute_norms(model, has_latent_attention=run.model.multi_latent_attention)
        self.layers, self.in_float8 = [], []
        for block in self.stacks:
            if not ends.layers:
                # No ModelShape is without layers.
                block.layers = torch.nn.ModuleList()
            for layer, (index, times) in zip(block.layers, rows, strict=ends.layers):
                self.layers.append((layer, times))
                self.in_float8.append(in_float8[index])
        # Layers of multi-token prediction have no number, by which they could be left out.
        self.further = dict.fromkeys(further, 1)
        self.layers += self.further.items()
        self.in_float8 += [run.float8 is not None] * len(self.further)
        if run.float8 is not None:
            of_float8 = (layer for (layer, _), has in zip(self.layers, self.in_float8, strict=True) if has)
            keep_float8_inputs(of_float8, run.float8, is_fused=is_fused)

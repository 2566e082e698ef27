"""Builds the real modules of a chunk on fake tensors, with what stands for those of Transformer Engine and others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk_memory import compress
from tempo_megatron.memory.simulated.configuration import build_ledger_config, convert_parameters, leave_out_stand_ins
from tempo_megatron.memory.simulated.cross_entropy import put_fused_cross_entropy
from tempo_megatron.memory.simulated.device import put_softmax_kernels
from tempo_megatron.memory.simulated.experts import leave_out_experts, put_experts
from tempo_megatron.memory.simulated.float8 import keep_float8_inputs
from tempo_megatron.memory.simulated.hybrid import put_hybrid_layers
from tempo_megatron.memory.simulated.latent_attention import put_latent_attention
from tempo_megatron.memory.simulated.multi_token_prediction import (
    note_losses,
    place_final_norm,
    put_multi_token_prediction,
)
from tempo_megatron.memory.simulated.transformer_engine import (
    choose_attention,
    keep_padding_masks,
    put_norm_kernels,
    put_stock_attention,
    recompute_norms,
)
from tempo_megatron.models.build import build_model, make_specs
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS
from tempo_megatron.slots.block_slots import find_inner_name
from tempo_megatron.slots.choose import Choices, choose

STACKS_OF_FAMILIES = {"gpt": ("decoder",), "bert": ("encoder",), "t5": ("encoder", "decoder")}


class Ends(NamedTuple):
    """What a chunk has beside its layers."""

    embedding: bool
    norm: bool
    """Behind the model's last layer."""

    prediction: bool
    """Layers of multi-token prediction."""

    head: bool


def fuse_attention(config: TempoConfig) -> TempoConfig:
    """`config` with Tempo's attention where it is stock: it keeps what Transformer Engine's does."""

    def fuse(block: Mapping[str, str]) -> dict[str, str]:
        return {name: "flash" if (name, value) == ("attention", "off") else value for name, value in block.items()}

    layers = {key: fuse(values) for key, values in config.layers.items()}
    return dataclasses.replace(config, attention=fuse({"attention": config.attention})["attention"], layers=layers)


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


def _take_as_chosen(config: TempoConfig) -> Choices:
    """`config` for a model in which all experts are on one rank, which could not have all that the run can."""
    return Choices(config=config, written=config, reasons={})


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
    """The layer whose like multi-token prediction has: the last, or of a hybrid the last that is as its pattern says.

    Raises ValueError where there is none.
    """
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
        in_float8: (layer, how many it stands for, whether its linears are in float8).
    """

    def __init__(self, run: Run, ends: Ends, longest_row: int = 3) -> None:
        shape, fuses = run.built_model, run.fuses_activation
        if fuses is None:
            fuses = run.stock == "transformer_engine" and shape.is_gated
        config = build_ledger_config(
            shape,
            sequence_parallel=run.layout.sp,
            dtype=run.dtype,
            recompute=leave_out_stand_ins(run.recompute),
            fuse_swiglu=fuses,
        )
        if run.moe_shared_expert_gate:
            # Before 0.16 no configuration has it.
            config = dataclasses.replace(config, moe_shared_expert_gate=True)
        asked = chosen = choose(describe_parts(config, run), _leave_latent_attention(run)).config
        attention = choose_attention(run)
        if attention != "unfused":
            chosen = fuse_attention(chosen)
        stacks = STACKS_OF_FAMILIES[shape.family]
        layers = range(shape.num_layers)
        kinds = [{stack: chosen.for_layer(layer, stack) for stack in stacks} for layer in layers]
        recomputed = [run.find_recomputed(layer) for layer in layers]
        mixed = shape.layers_with_experts
        pattern = run.hybrid.pattern if run.hybrid is not None else " " * shape.num_layers
        in_float8 = run.float8_layers or [run.float8 is not None] * shape.num_layers
        rows = compress(zip(kinds, recomputed, mixed, pattern, in_float8, strict=True), longest_row)
        if shape.num_experts is not None:
            freq = [int(mixed[index]) for index, _ in rows]
            config = dataclasses.replace(config, num_layers=len(rows), moe_layer_freq=freq)
        values = {
            f"{stack} {place}": {name: getattr(kinds[index][stack], name) for name in LAYER_OPERATIONS}
            for place, (index, _) in enumerate(rows)
            for stack in stacks
        }
        self.rows = rows
        copies = attention == "flash" and run.micro_batch_size > 1
        if run.recompute_num_layers is not None:
            num_recomputed = sum(recomputed[index] != () for index, _ in rows)
            config = dataclasses.replace(config, recompute_method="block", recompute_num_layers=num_recomputed)
        self.tempo = dataclasses.replace(chosen, layers=values if chosen.layers else {})
        self.shape = shape.take_layers([index for index, _ in rows])
        with leave_out_experts():
            self.model = build_model(
                self.shape,
                dataclasses.replace(config, num_layers=len(rows)),
                _take_as_chosen(self.tempo),
                run.padded_vocab_size,
                pre_process=ends.embedding,
                post_process=ends.head,
            ).train()
            if run.mtp_num_layers and run.hybrid is None:
                place_final_norm(self.model.decoder, has_norm=ends.norm)
            if run.mtp_num_layers and (ends.head or ends.prediction):
                note_losses(self.model.config, run.mtp_num_layers)
            if ends.prediction:
                of_all = dataclasses.replace(chosen, layers={})
                specs = make_specs(self.shape, self.model.config, _take_as_chosen(of_all))["decoder"].layer_specs
                spec = specs[_find_predicting(run, [mixed[index] for index, _ in rows])]
                put_multi_token_prediction(self.model, spec, run, of_all)
                self.model.train()
        if run.model.multi_latent_attention:
            put_latent_attention(
                self.model,
                config,
                run,
                is_fused=attention != "unfused",
                recomputes_up="mla_up_proj" in run.recompute,
            )
        if run.hybrid is not None:
            letters = [pattern[index] for index, _ in rows]
            put_hybrid_layers(self.model.decoder, config, run.hybrid, letters, run.chip.multiprocessors)
        convert_parameters(self.model, run.dtype)
        if run.stock != "cpu" and run.masked_softmax_fusion and run.dtype.itemsize == 2:
            put_softmax_kernels(self.model)
        if shape.num_experts is not None:
            put_experts(self.model, run, is_fused=fuses)
        if run.fuses_cross_entropy and chosen.loss != "fused":
            put_fused_cross_entropy(self.model)
        self.stacks = [getattr(self.model, stack) for stack in stacks]
        for stack, block in zip(stacks, self.stacks, strict=True):
            for layer, (index, _) in zip(block.layers, rows, strict=True):
                if attention != "unfused" and asked.for_layer(index, stack).attention == "off":
                    put_stock_attention(layer, copies=copies)
        if attention != "unfused" and ends.prediction and asked.attention == "off":
            for layer in self.model.mtp.layers:
                put_stock_attention(getattr(layer, find_inner_name(layer)), copies=copies)
        if run.stock == "transformer_engine":
            put_norm_kernels(self.model)
            keep_padding_masks(self.model)
        if "layernorm" in run.recompute:
            recompute_norms(self.model, has_latent_attention=run.model.multi_latent_attention)
        self.layers = [
            (layer, times) for stack in self.stacks for layer, (_, times) in zip(stack.layers, rows, strict=True)
        ]
        self.further = dict.fromkeys(self.model.mtp.layers, 1) if ends.prediction else {}
        self.layers += self.further.items()
        # Layers of multi-token prediction have no number, by which they could be left out.
        places = [in_float8[index] for _ in stacks for index, _ in rows] + [run.float8 is not None] * len(self.further)
        self.in_float8 = [(*each, has) for each, has in zip(self.layers, places, strict=True)]
        if run.float8 is not None:
            keep_float8_inputs(
                (layer for layer, _, has in self.in_float8 if has), run.float8, is_fused=attention != "unfused"
            )

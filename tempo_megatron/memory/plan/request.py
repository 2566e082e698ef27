"""Builds the planner's request from a model, its layout and the allowed choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tempo_megatron.memory.estimate.estimate import RankLayout
from tempo_megatron.memory.estimate.model_states import OptimizerSettings
from tempo_megatron.memory.plan.fixed import PlanEstimates
from tempo_megatron.memory.plan.formula import LayerShape
from tempo_megatron.memory.plan.gpu import Gpu
from tempo_megatron.memory.plan.planner import CountFixedBytes, FixedBytes, PlanRequest
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import ModelShape, pad_vocab_size
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import CHOICES
from tempo_megatron.slots.choose import find_refusal, refuse_written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned."""

    shape: ModelShape
    layout: RankLayout
    """Without recomputation; its stock modules as the estimate knows them."""
    optimizer: OptimizerSettings
    gpu: Gpu
    tempo: TempoConfig = dataclasses.field(default_factory=TempoConfig)
    """Its "auto" is planned, and any other value stays."""
    recompute: frozenset[str] = frozenset(("core_attn", "mlp", "full"))
    """What Megatron may recompute, or, where `is_written`, what it does."""
    is_written: bool = False
    num_full: int | None = None
    """Of full recomputation: the first layers of each stage; None is any number."""
    remedy: str = PlanRequest.remedy
    """What a user can do where nothing fits."""
    fixed_sizes: tuple[int, ...] = ()
    """What the GPUs hold whatever the layers keep, of all stages or of each; empty is to be estimated."""


def make_plan_request(question: Question) -> tuple[PlanRequest, PlanEstimates | None]:
    """What the planner is asked, and the estimates; None where `fixed_sizes` take their place.

    Raises ValueError where the planner does not know the model, the layout does not go with it, or it cannot have a
    written value.
    """
    shape, layout = question.shape, question.layout
    _check(question)
    values = list_values(question)
    layer = make_layer(shape, layout)
    # Of the formula's two stacks, the one that has the modules: those on a CPU keep no less than on a GPU.
    stock = "transformer_engine" if layout.stock == "transformer_engine" else "local"
    estimates = None
    if question.fixed_sizes:
        count_fixed_bytes = read_fixed_bytes(question.fixed_sizes, layout.pipeline_parallel)
    else:
        estimates = PlanEstimates(
            shape, layout, layer, values, question.optimizer, stock=stock, stock_attention=layout.stock_attention
        )
        count_fixed_bytes = estimates.count_fixed_bytes
        values["loss"] = (estimates.choose_loss(values["loss"]),)
    assert shape.vocab_size is not None
    tp = layout.tensor_parallel
    vocab_size = pad_vocab_size(shape.vocab_size, shape.make_vocab_size_divisible_by, tp)
    request = PlanRequest(
        shape=layer,
        num_layers=shape.num_layers,
        pipeline_parallel=layout.pipeline_parallel,
        num_microbatches=layout.num_micro_batches,
        gpu=question.gpu,
        count_fixed_bytes=count_fixed_bytes,
        values=values,
        recompute=question.recompute,
        keeps_recompute=question.is_written,
        num_full=question.num_full,
        is_causal=shape.family == "gpt",
        stock=stock,
        stock_attention=layout.stock_attention,
        remedy=question.remedy,
        head_flops=2 * shape.seq_length * layout.micro_batch_size * shape.hidden_size * vocab_size // tp,
    )
    return request, estimates


def read_written_recomputation(
    granularity: str | None,
    method: str | None,
    num_layers: int | None,
    modules: Sequence[str] | None,
    layers_of_stage: int,
) -> dict[str, Any]:
    """Fields of a Question for Megatron's recomputation as a user wrote it; none where nobody did.

    Raises ValueError for what the planner does not know.
    """
    if granularity is None:
        return {}
    if granularity == "selective":
        taken = frozenset(modules or ("core_attn",))
        if unknown := sorted(taken - {"core_attn", "mlp"}):
            raise ValueError(
                f"--recompute-modules is {' '.join(unknown)}, and the planner knows core_attn and mlp; leave the "
                "budget out or change the modules"
            )
        return {"recompute": taken, "is_written": True}
    if method == "uniform" and num_layers != 1:
        raise ValueError(
            f"--recompute-method uniform has --recompute-num-layers {num_layers}, and the planner knows 1; leave the "
            "budget out, or give 1 or --recompute-method block"
        )
    count = layers_of_stage if method == "uniform" or num_layers is None else min(num_layers, layers_of_stage)
    return {"recompute": frozenset(("full",)), "is_written": True, "num_full": count}


def _check(question: Question) -> None:
    shape, tempo = question.shape, question.tempo
    if shape.family == "t5":
        raise ValueError("the planner does not support T5; give a GPT or a BERT")
    if shape.qk_layernorm:
        raise ValueError(
            "the model has qk_layernorm, whose kept bytes the planner's formula does not know; leave the budget out, "
            "and compare values with `tempo-megatron estimate`, which follows the real modules"
        )
    if tempo.layers:
        raise ValueError(
            "tempo.layers is given, and a plan gives the layers their values; leave it out, or leave the budget out"
        )


def list_values(question: Question) -> dict[str, tuple[str, ...]]:
    """Operation -> the values that the model may have, stock first: of two that cost and keep the same it stays.

    Raises ValueError where it cannot have a written one.
    """
    config = build_transformer_config(question.shape, dtype=question.layout.dtype)
    refuse_written(config, question.tempo)

    def list_of(name: str, choices: Sequence[str]) -> tuple[str, ...]:
        written = getattr(question.tempo, name)
        if written != "auto":
            return (written,)
        ordered = sorted(choices, key=lambda value: value != "off")
        return tuple(value for value in ordered if value != "auto" and find_refusal(name, value, config) is None)

    return {name: list_of(name, choices) for name, choices in CHOICES.items()}


def make_layer(shape: ModelShape, layout: RankLayout) -> LayerShape:
    """One layer of the model on one rank, without recomputation."""
    return LayerShape(
        seq_length=shape.seq_length,
        micro_batch_size=layout.micro_batch_size,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        dtype=layout.dtype,
        tensor_parallel=layout.tensor_parallel,
        sequence_parallel=layout.sequence_parallel,
        hidden_dropout=shape.hidden_dropout,
        attention_dropout=shape.attention_dropout,
        activation=shape.activation,
        normalization=shape.normalization,
        rotary=shape.position_embedding_type == "rope",
        has_window=shape.window_size is not None,
    )


def read_fixed_bytes(sizes: Sequence[int], pipeline_parallel: int) -> CountFixedBytes:
    """What --fixed-memory says. Raises ValueError unless there is one size, or one for each stage."""
    if len(sizes) not in (1, pipeline_parallel):
        raise ValueError(
            f"--fixed-memory has {len(sizes)} sizes; expected one, or one for each of --pp {pipeline_parallel}"
        )

    def count_fixed_bytes(stage: int, loss: str) -> FixedBytes:
        size = sizes[stage if len(sizes) > 1 else 0]
        return FixedBytes(size, size)

    return count_fixed_bytes

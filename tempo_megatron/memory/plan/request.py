"""Builds the planner's request from a model, its layout and the allowed choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tempo_megatron.memory.plan.fixed import PlanEstimates
from tempo_megatron.memory.plan.formula import LayerShape
from tempo_megatron.memory.plan.gpu import Gpu
from tempo_megatron.memory.plan.planner import CountFixedBytes, FixedBytes, PlanRequest
from tempo_megatron.memory.run import Run
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import ModelShape, pad_vocab_size
from tempo_megatron.settings.operations import CHOICES
from tempo_megatron.slots.choose import find_refusal, refuse_written

RECOMPUTED = frozenset(("core_attn", "mlp", "full"))
"""All of Megatron's recomputation that the planner knows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned."""

    run: Run
    """What of its `tempo` is "auto" is planned, and any other value stays."""
    gpu: Gpu
    recompute: frozenset[str] | None = RECOMPUTED
    """What Megatron may recompute; None is what the run says, no more and no less."""
    remedy: str = PlanRequest.remedy
    """What a user can do where nothing fits."""
    fixed_sizes: tuple[int, ...] = ()
    """What the GPUs hold whatever the layers keep, of all stages or of each; empty is to be estimated."""


def make_plan_request(question: Question) -> tuple[PlanRequest, PlanEstimates | None]:
    """What the planner is asked, and the estimates; None where `fixed_sizes` take their place.

    Raises ValueError where the planner does not know the model, the layout does not go with it, or it cannot have a
    written value.
    """
    shape, layout = question.run.model, question.run
    _check(question.run)
    values = list_values(question.run)
    layer = make_layer(shape, layout)
    # Of the formula's two stacks, the one that has the modules: those on a CPU keep no less than on a GPU.
    stock = "transformer_engine" if layout.stock == "transformer_engine" else "local"
    estimates = None
    if question.fixed_sizes:
        count_fixed_bytes = read_fixed_bytes(question.fixed_sizes, layout.pipeline_parallel)
    else:
        estimates = PlanEstimates(
            shape, layout, layer, values, layout.optimizer, stock=stock, stock_attention=layout.stock_attention
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
        recompute=frozenset(layout.recompute) if question.recompute is None else question.recompute,
        keeps_recompute=question.recompute is None,
        num_full=_count_full(layout) if question.recompute is None else None,
        is_causal=shape.family == "gpt",
        stock=stock,
        stock_attention=layout.stock_attention,
        remedy=question.remedy,
        head_flops=2 * shape.seq_length * layout.micro_batch_size * shape.hidden_size * vocab_size // tp,
    )
    return request, estimates


def _count_full(run: Run) -> int | None:
    """How many layers of each stage a run recomputes as a whole; None where it recomputes none so."""
    if "full" not in run.recompute:
        return None
    per_stage = run.model.num_layers // run.pipeline_parallel
    return per_stage if run.recompute_num_layers is None else min(run.recompute_num_layers, per_stage)


def _check(run: Run) -> None:
    shape, tempo = run.model, run.tempo
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


def list_values(run: Run) -> dict[str, tuple[str, ...]]:
    """Operation -> the values that the model may have, stock first: of two that cost and keep the same it stays.

    Raises ValueError where it cannot have a written one.
    """
    config = build_transformer_config(run.model, dtype=run.dtype)
    refuse_written(config, run.tempo)

    def list_of(name: str, choices: Sequence[str]) -> tuple[str, ...]:
        written = getattr(run.tempo, name)
        if written != "auto":
            return (written,)
        ordered = sorted(choices, key=lambda value: value != "off")
        return tuple(value for value in ordered if value != "auto" and find_refusal(name, value, config) is None)

    return {name: list_of(name, choices) for name, choices in CHOICES.items()}


def make_layer(shape: ModelShape, layout: Run) -> LayerShape:
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

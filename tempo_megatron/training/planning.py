"""Reads a Run from the trainer's RunConfig, and plans its memory budget before its model is built."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tempo_megatron.memory.chips import find_chip
from tempo_megatron.memory.live.aside import RunPlan, plan_for_all_ranks, share_host
from tempo_megatron.memory.plan.gpu import find_gpu
from tempo_megatron.memory.plan.planner import RECOMPUTED, PlanRequest
from tempo_megatron.memory.run import OptimizerSettings, Run, cut_layers, read_recomputation
from tempo_megatron.models.build import DTYPES
from tempo_megatron.models.layout import Layout
from tempo_megatron.training.model import has_fused_softmax
from tempo_megatron.training.run.run_config import RunConfig

_REMEDY = (
    "raise the budget, --tensor-model-parallel-size or --pipeline-model-parallel-size, or lower --micro-batch-size"
)


def plan_memory(run: RunConfig, padded_vocab_size: int) -> tuple[RunConfig, RunPlan | None]:
    """Returns the run as planned for its memory budget, and the plan; without a budget the run itself and None.

    All ranks call it, once their process group exists. Rank 0 plans, and every rank gets its plan or its error.

    Raises ValueError if nothing fits, or the planner does not know the model.
    """
    if run.memory_budget is None:
        return run, None

    def make_request() -> PlanRequest:
        return PlanRequest(
            run=read_run(run, padded_vocab_size),
            gpu=find_gpu(torch.cuda.get_device_name() if run.on_gpu else None),
            remedy=_REMEDY,
            host_bytes=share_host(run.host_memory),
            recompute=None if run.recompute_granularity else RECOMPUTED,
        )

    plan = plan_for_all_ranks(make_request, run.memory_budget)
    changes: dict[str, Any] = {"tempo": dataclasses.replace(plan.tempo, check=run.tempo.check)}
    if run.recompute_granularity is None and plan.num_full:
        changes |= {"recompute_granularity": "full", "recompute_method": "block"}
        changes["recompute_num_layers"] = plan.num_full
    elif run.recompute_granularity is None and plan.recompute:
        changes |= {"recompute_granularity": "selective", "recompute_modules": plan.recompute}
    return dataclasses.replace(run, **changes), plan


def read_run(run: RunConfig, padded_vocab_size: int | None) -> Run:
    """Converts a RunConfig to the Run of the memory estimate.

    `padded_vocab_size` has the rows of the embedding; None, before the tokenizer is read, pads --vocab-size.

    Raises ValueError for a recomputation that the estimate does not know.
    """
    model = run.model
    if padded_vocab_size is not None:
        model = dataclasses.replace(model, vocab_size=padded_vocab_size, make_vocab_size_divisible_by=1)
    # An expert is split as the layers are, but for one with biases (core/transformer/moe/experts.py).
    is_split = model.num_experts is not None and not model.add_bias_linear
    stages, per_chunk = run.pipeline_model_parallel_size, run.num_layers_per_virtual_pipeline_stage
    return Run(
        model=model,
        tempo=run.tempo,
        optimizer=OptimizerSettings.from_deepspeed(run.deepspeed),
        layout=Layout(
            tp=run.tensor_model_parallel_size,
            pp=stages,
            dp=run.data_parallel_size,
            sp=run.sequence_parallel,
            etp=run.tensor_model_parallel_size if is_split else 1,
            chunks=run.layers_of_chunks or cut_layers(model.num_layers, stages, per_chunk=per_chunk),
        ),
        micro_batch_size=run.micro_batch_size,
        num_micro_batches=run.num_micro_batches,
        dtype=DTYPES[run.precision],
        chip=find_chip(),
        stock="local" if run.on_gpu else "cpu",
        masked_softmax_fusion=run.masked_softmax_fusion and has_fused_softmax(),
        **read_recomputation(
            run.recompute_granularity,
            run.recompute_method,
            run.recompute_num_layers,
            run.recompute_modules,
            model=model,
        ),
    )

"""Builds the model of a run: Megatron's configuration of the layers, and the chunks of this rank."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tempo_megatron.memory.plan.gpu import find_chip
from tempo_megatron.memory.run import OptimizerSettings, Run, cut_layers, read_recomputation
from tempo_megatron.models import build as models
from tempo_megatron.models.build import DTYPES
from tempo_megatron.models.layout import Layout
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.models.stage import PipelineStage, list_chunks
from tempo_megatron.slots.choose import Choices
from tempo_megatron.slots.report import TempoReport, report_on
from tempo_megatron.training.ranks import MPU, gather
from tempo_megatron.training.run.deepspeed_config import copy_deepspeed_config, read_zero_stage
from tempo_megatron.training.run.run_config import RunConfig

_FUSED_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda"


def build_transformer_config(run: RunConfig) -> TransformerConfig:
    """Builds Megatron's configuration of the layers. A fusion needs a GPU and its extension, except that of GELU.

    As in Megatron-LM, the fused GELU is the tanh form and the unfused one the erf form.
    """
    on_gpu = run.on_gpu
    return models.build_transformer_config(
        run.model,
        dtype=DTYPES[run.precision],
        tensor_model_parallel_size=run.tensor_model_parallel_size,
        **_list_pipeline_settings(run),
        sequence_parallel=run.sequence_parallel,
        fuse_gelu=run.bias_gelu_fusion,
        fuse_swiglu=on_gpu and run.bias_swiglu_fusion,
        use_cpu_initialization=run.use_cpu_initialization or not on_gpu,
        bias_dropout_fusion=on_gpu and run.bias_dropout_fusion,
        masked_softmax_fusion=on_gpu and run.masked_softmax_fusion and has_fused_softmax(),
        # Needs Apex. gradient_accumulation_fusion stays off: it needs buffers of Megatron's own optimizer.
        persist_layer_norm=on_gpu and importlib.util.find_spec("apex") is not None,
        recompute_granularity=run.recompute_granularity,
        recompute_method=run.recompute_method,
        recompute_num_layers=run.recompute_num_layers,
        recompute_modules=None if run.recompute_modules is None else list(run.recompute_modules),
    )


def has_fused_softmax() -> bool:
    """Whether Apex's softmax kernels, which Megatron's fused softmax calls, are installed."""
    return importlib.util.find_spec(_FUSED_SOFTMAX) is not None


def get_gelu_form(shape: ModelShape, config: TransformerConfig) -> str | None:
    """Returns tanh or erf, or None for an activation without GELU."""
    if shape.activation not in ("gelu", "geglu"):
        return None
    return "tanh" if config.bias_activation_fusion else "erf"


def describe_activation(shape: ModelShape, gelu_form: str | None) -> str:
    """Names an activation for the banner: `erf GELU`, `swiglu`."""
    name = {"gelu": "GELU", "geglu": "GEGLU"}.get(shape.activation, shape.activation)
    return f"{gelu_form} {name}" if gelu_form else name


def _list_pipeline_settings(run: RunConfig) -> Mapping[str, Any]:
    """Returns the fields of TransformerConfig that a pipeline needs; none without one."""
    if run.pipeline_model_parallel_size == 1:
        return {}
    interleaves = run.num_chunks > 1
    return {
        "pipeline_model_parallel_size": run.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": run.num_chunks if interleaves else None,
        "pipeline_model_parallel_layout": run.pipeline_model_parallel_layout,
        # As in Megatron-LM. Two stages that interleave are each other's neighbours on both sides, and a batch of
        # transfers would mix up what goes forward and backward.
        "overlap_p2p_comm": interleaves,
        "batch_p2p_comm": not interleaves,
        # Backward needs a sent output's place in the graph alone. Gloo still reads it while transfers overlap.
        "deallocate_pipeline_outputs": run.on_gpu or not interleaves,
        "batch_p2p_sync": run.on_gpu,  # it waits for the GPU
    }


def build_model(run: RunConfig, config: TransformerConfig, choices: Choices, padded_vocab_size: int) -> Any:
    """Builds this rank's model: the whole one, or the stage of a pipeline. ZeRO 3 partitions it at once."""
    config = dataclasses.replace(
        config,
        init_method=_extend_to_partitioned(config.init_method),
        embedding_init_method=_extend_to_partitioned(config.embedding_init_method),
    )
    stage, last_stage = parallel_state.get_pipeline_model_parallel_rank(), run.pipeline_model_parallel_size - 1
    chunks = []
    with _choose_construction_context(run):
        # A copy of tied word embeddings gets the values of the first stage's, as Megatron builds it.
        for chunk in range(run.num_chunks):
            place: Any = {
                "pre_process": stage == 0 and chunk == 0,
                "post_process": stage == last_stage and chunk == run.num_chunks - 1,
                "vp_stage": chunk if run.num_chunks > 1 else None,
            }
            chunks.append(models.build_model(run.model, config, choices, padded_vocab_size, **place))
    if last_stage:
        return PipelineStage(chunks)
    _zero_partitioned_biases(chunks[0])
    return chunks[0]


def _choose_construction_context(run: RunConfig) -> contextlib.AbstractContextManager[Any]:
    """Returns the context to build the model in: ZeRO-3's partitions each module at once, so that it never is whole."""
    config = run.deepspeed
    if read_zero_stage(config) < 3 or parallel_state.get_data_parallel_world_size() == 1:
        return contextlib.nullcontext()
    partitioning: contextlib.AbstractContextManager[Any] = deepspeed.zero.Init(
        data_parallel_group=parallel_state.get_data_parallel_group(),
        config_dict_or_path=copy_deepspeed_config(config),
        mpu=MPU(),
    )
    return partitioning


def _extend_to_partitioned(init_method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Extends `init_method` to weights that _choose_construction_context has already partitioned.

    Megatron draws the learned positions after torch has made the Embedding; they would keep torch's values.
    """

    def initialize(weight: Tensor) -> Any:
        if not hasattr(weight, "ds_id"):
            return init_method(weight)
        # Every rank draws, so that their generators stay equal; rank 0's numbers are kept.
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            return init_method(weight)

    return initialize


def _zero_partitioned_biases(model: torch.nn.Module) -> None:
    """Zeroes the biases of torch's linears (BERT's heads) that _choose_construction_context has partitioned.

    Megatron zeroes them itself, but only after the partitioning, when it finds empty tensors.
    """
    for module in model.modules():
        if type(module) is torch.nn.Linear and hasattr(module.bias, "ds_id"):
            with deepspeed.zero.GatheredParameters([module.bias], modifier_rank=0), torch.no_grad():
                module.bias.zero_()


def report_on_all(model: Any, choices: Choices) -> TempoReport:
    """Reports on the slots of every stage, in the order of the model; `model` is this rank's stage or the whole."""
    own = [report_on(chunk, choices) for chunk in list_chunks(model)]
    of_stages = gather(own, parallel_state.get_pipeline_model_parallel_group())
    return sum(itertools.chain.from_iterable(zip(*of_stages, strict=True)), TempoReport())


def count_all_parameters(model: Any, tensor_parallel_size: int) -> int:
    """Counts the parameters of the whole model, of which `model` is this rank's stage or the whole."""
    own = models.count_parameters(model, tensor_parallel_size)
    if isinstance(model, PipelineStage) and (copy := model.find_embedding_copy()) is not None:
        own -= copy.numel() * tensor_parallel_size
    return sum(gather(own, parallel_state.get_pipeline_model_parallel_group()))


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
        **read_recomputation(run, model=model),
    )

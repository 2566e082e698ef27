"""A run of Megatron-LM as the estimate knows it, from Megatron's own arguments."""

from __future__ import annotations

from typing import Any

import torch

from tempo_megatron.config import TempoConfig
from tempo_megatron.memory.estimate import RankLayout
from tempo_megatron.memory.model_states import OptimizerSettings
from tempo_megatron.memory.out_of_memory import Order
from tempo_megatron.models.shape import make_shape

_SAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "normalization",
    "position_embedding_type",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "attention_dropout",
    "hidden_dropout",
)


def make_order(run: Any, tempo_config: TempoConfig, stage: int) -> Order:
    """The order of a GPT that Megatron's arguments `run` describe, for a rank of this pipeline stage.

    Raises ValueError for what the estimate does not know.
    """
    if getattr(run, "num_experts", None) or getattr(run, "multi_latent_attention", False):
        raise ValueError("the estimate does not know experts and latent attention")
    if getattr(run, "context_parallel_size", 1) > 1:
        raise ValueError("the estimate does not know context parallelism")
    values = {name: getattr(run, name) for name in _SAME if getattr(run, name, None) is not None}
    if values.get("add_bias_linear"):
        values["add_qkv_bias"] = False  # every linear has a bias, that of q, k and v too
    if getattr(run, "group_query_attention", False):
        values["num_query_groups"] = run.num_query_groups
    activation = "squared_relu" if getattr(run, "squared_relu", False) else "swiglu" if run.swiglu else "gelu"
    recompute: tuple[str, ...] = ()
    if run.recompute_granularity == "full":
        recompute = ("full",)
    elif run.recompute_granularity == "selective":
        recompute = tuple(run.recompute_modules or ("core_attn",))
    is_local = getattr(run, "transformer_impl", "local") == "local"
    layout = RankLayout(
        tensor_parallel=run.tensor_model_parallel_size,
        pipeline_parallel=run.pipeline_model_parallel_size,
        data_parallel=run.data_parallel_size,
        sequence_parallel=run.sequence_parallel,
        layers_per_virtual_stage=getattr(run, "num_layers_per_virtual_pipeline_stage", None),
        micro_batch_size=run.micro_batch_size,
        num_micro_batches=run.global_batch_size // (run.micro_batch_size * run.data_parallel_size),
        dtype=run.params_dtype,
        recompute=recompute,
        stock=("local" if is_local else "transformer_engine") if torch.cuda.is_available() else "cpu",
    )
    shape = make_shape(**values, activation=activation, vocab_size=run.padded_vocab_size)
    optimizer = OptimizerSettings(kind="megatron", distributed=run.use_distributed_optimizer)
    return Order(shape, layout, tempo_config, optimizer, stage, run.global_batch_size)

"""Reads a Run from a run of Megatron-LM, for the planner and for the report after out-of-memory.

It is read from the model that the run builds, not from its command line: that leaves most sizes out, says nothing of
the model's class, and has several names for one activation.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.transformer.enums import AttnBackend

from tempo_megatron.memory.run import OptimizerSettings, Run, read_recomputation
from tempo_megatron.models.shape import make_shape
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.mlp import describe_activation

_FAMILIES = {"GPTModel": "gpt", "BertModel": "bert"}
# What a TransformerConfig and a ModelShape call by the same name.
_SAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "qk_layernorm",
    "window_size",
    "add_bias_linear",
    "attention_dropout",
    "hidden_dropout",
)
# Fields of a TransformerConfig that change what a layer keeps, in ways that the estimate does not know.
_UNKNOWN_IN_LAYERS = {
    "heterogeneous_block_specs": "layers of several kinds",
    "num_moe_experts": "layers of experts",
    "multi_latent_attention": "latent attention",
    "fp8": "float8",
    "fp4": "float4",
    "fp32_residual_connection": "a float32 residual stream",
    "attention_output_gate": "gates on attention's output",
    "experimental_attention_variant": "an experimental attention",
    "window_attn_skip_freq": "layers with and without a window",
}
# And those that change what a step holds beside.
_UNKNOWN_IN_RUNS = {
    "mtp_num_layers": "multi-token prediction",
    "cpu_offloading": "activations on the host",
    "fine_grained_activation_offloading": "activations on the host",
    "distribute_saved_activations": "saved activations that tensor-parallel ranks share",
    "pipeline_model_parallel_layout": "a pipeline layout of its own",
    "account_for_embedding_in_pipeline_split": "an embedding that counts as a layer of its stage",
    "account_for_loss_in_pipeline_split": "a loss that counts as a layer of its stage",
}

# --attention-backend; "auto" and "fused" are fused.
_STOCK_ATTENTIONS = {AttnBackend.flash: "flash", AttnBackend.unfused: "unfused", AttnBackend.local: "unfused"}


def find_unknown(model_name: str, config: Any, run: Any) -> str | None:
    """What a run has that the estimate does not know, as `the run has ...` goes on; None where there is nothing.

    Args:
        model_name: class of the model, as Megatron calls it.
        config: its TransformerConfig.
        run: Megatron's arguments.
    """
    if unknown := find_unknown_in_layers(model_name, config) or _find_field(_UNKNOWN_IN_RUNS, config):
        return unknown
    if getattr(run, "use_megatron_fsdp", False):
        return "weights sharded by Megatron-FSDP"
    if run.optimizer != "adam":
        return f"the optimizer {run.optimizer}, and what is known is adam"
    return "optimizer states on the host" if getattr(run, "optimizer_cpu_offload", False) else None


def find_unknown_in_layers(model_name: str, config: Any) -> str | None:
    """As `find_unknown`, but only what decides what a layer keeps for backward."""
    if model_name not in _FAMILIES:
        return f"a {model_name}, and what is known are GPTModel and BertModel"
    if config.context_parallel_size > 1:
        return f"context parallel size {config.context_parallel_size}"
    return _find_field(_UNKNOWN_IN_LAYERS, config)


def _find_field(unknown: Mapping[str, str], config: Any) -> str | None:
    return next((words for name, words in unknown.items() if getattr(config, name, None)), None)


def read_run(
    model_name: str,
    config: Any,
    arguments: Mapping[str, Any],
    run: Any,
    tempo: TempoConfig,
    *,
    layers_only: bool = False,
) -> Run:
    """A run of which `find_unknown` finds nothing, or, with layers_only, `find_unknown_in_layers`.

    Args:
        model_name: class of the model, as Megatron calls it.
        config: its TransformerConfig.
        arguments: of its constructor; of a BertModel num_tokentypes and add_binary_head too.
        run: Megatron's arguments.
        tempo: what its operations do.
        layers_only: leaves out what the layers do not depend on, recomputation too.

    Raises ValueError where the model has a part, such as an activation, that no ModelShape has, and for a recomputation
    that the estimate does not know.
    """
    recomputation = {}
    if not layers_only:
        recomputation = read_recomputation(
            config.recompute_granularity,
            config.recompute_method,
            config.recompute_num_layers,
            config.recompute_modules,
        )
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    is_local = getattr(run, "transformer_impl", "local") == "local"
    model = make_shape(
        **{name: getattr(config, name) for name in _SAME},
        # Megatron's is of all linears, or of q, k and v only.
        add_qkv_bias=config.add_qkv_bias and not config.add_bias_linear,
        family=_FAMILIES[model_name],
        activation=describe_activation(config),
        seq_length=run.seq_length,
        max_position_embeddings=arguments["max_sequence_length"],
        # As this run pads it.
        vocab_size=arguments["vocab_size"],
        make_vocab_size_divisible_by=1,
        position_embedding_type=arguments["position_embedding_type"],
        untie_embeddings_and_output_weights=not arguments["share_embeddings_and_output_weights"],
        num_tokentypes=arguments.get("num_tokentypes") or 0,
        add_binary_head=bool(arguments.get("add_binary_head", False)),
    )
    return Run(
        model=model,
        tempo=tempo,
        optimizer=OptimizerSettings(distributed=run.use_distributed_optimizer),
        tensor_parallel=config.tensor_model_parallel_size,
        pipeline_parallel=stages,
        data_parallel=run.data_parallel_size,
        sequence_parallel=config.sequence_parallel,
        layers_per_virtual_stage=chunks and config.num_layers // (stages * chunks),
        first_stage_layers=config.num_layers_in_first_pipeline_stage,
        last_stage_layers=config.num_layers_in_last_pipeline_stage,
        micro_batch_size=run.micro_batch_size,
        num_micro_batches=max(1, run.global_batch_size // (run.micro_batch_size * run.data_parallel_size)),
        dtype=config.params_dtype,
        stock=("local" if is_local else "transformer_engine") if torch.cuda.is_available() else "cpu",
        stock_attention=_STOCK_ATTENTIONS.get(config.attention_backend, "fused"),
        masked_softmax_fusion=config.masked_softmax_fusion,
        **recomputation,
    )


def read_built_run(run: Any) -> Run:
    """The run of this process, whose model is built, or was begun to be.

    run: Megatron's arguments.

    Raises ValueError for what the estimate does not know.
    """
    found = [read_model(model, run) for model in _find_models()]
    if not found:
        raise ValueError("no GPTModel, BertModel or T5Model is built")
    if any(other.model != found[0].model for other in found):
        raise ValueError("models of several shapes are built, and the estimate knows one")
    return found[0]


def _find_models() -> list[Any]:
    """Every model of Megatron's that this process has; a pipeline stage has one for each of its chunks."""
    return [each for each in gc.get_objects() if issubclass(type(each), (GPTModel, BertModel, T5Model))]


def read_model(model: Any, run: Any, *, layers_only: bool = False) -> Run:
    """The run of one model; see `read_run`.

    Raises ValueError for what the estimate does not know.
    """
    bases = (base.__name__ for base in (GPTModel, BertModel, T5Model) if isinstance(model, base))
    name = next(bases, type(model).__name__)
    unknown = find_unknown_in_layers(name, model.config) if layers_only else find_unknown(name, model.config, run)
    if unknown is not None:
        raise ValueError(f"the run has {unknown}")
    names = ("vocab_size", "max_sequence_length", "position_embedding_type", "share_embeddings_and_output_weights")
    arguments = {name: getattr(model, name) for name in names}
    if name == "BertModel":
        arguments["add_binary_head"] = model.add_binary_head
        # The last stages have no embedding, and there nothing depends on it; a binary head tells two segments apart.
        segments = 2 if model.add_binary_head else 0
        arguments["num_tokentypes"] = getattr(getattr(model, "embedding", None), "num_tokentypes", segments)
    choices = getattr(model.transformer_layer_spec, "choices", None)
    tempo = TempoConfig.off() if choices is None else choices.config
    return read_run(name, model.config, arguments, run, tempo, layers_only=layers_only)

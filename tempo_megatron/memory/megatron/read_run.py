"""Reads a Run from Megatron's configuration and arguments, whether a model was built from them or a command gives them.

`megatron_lm.run_reader` has the configuration of a built model, `read_command` a command's words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tempo_megatron.memory.megatron.options import ACCOUNTS, UNKNOWN_IN_LAYERS, UNKNOWN_IN_RUNS, list_options
from tempo_megatron.memory.run import Hybrid, OptimizerSettings, Run, cut_layers, read_recomputation
from tempo_megatron.models.layout import Layout
from tempo_megatron.models.shape import LATENT, SAME, SAME_IN_EXPERTS, make_shape
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.words.pipeline_layout import parse_pipeline_layout

_FAMILIES = {"GPTModel": "gpt", "BertModel": "bert", "T5Model": "t5"}
# What not every TransformerConfig has, and its default.
_YOUNG = {"softmax_type": "vanilla", "window_attn_skip_freq": None, "activation_func_clamp_value": None}

_UNKNOWN_IN_EXPERTS = {
    "moe_input_jitter_eps": "--moe-input-jitter-eps gives the router inputs with noise",
    "moe_apply_probs_on_input": "--moe-apply-probs-on-input weights the experts' inputs",
    "moe_router_padding_for_quantization": "--moe-router-padding-for-quantization pads the experts' tokens",
    "moe_paged_stash": "--moe-paged-stash keeps the experts' tokens elsewhere",
    "moe_layer_recompute": "--moe-layer-recompute recomputes experts",
    "moe_latent_size": "--moe-latent-size gives experts other tokens than the layer's",
    "moe_shared_expert_overlap": "--moe-shared-expert-overlap runs shared experts beside communication",
}

_STOCK_ATTENTIONS = {"flash": "flash", "unfused": "unfused", "local": "unfused"}
"""--attention-backend; "auto" and "fused" are fused."""


def find_unknown(model_name: str, config: Any, run: Any) -> str | None:
    """What a built run has that the estimate does not know, as `the run has ...` goes on; None where there is nothing.

    Args:
        model_name: class of the model, as Megatron calls it.
        config: its TransformerConfig.
        run: Megatron's arguments.
    """
    if unknown := find_unknown_in_layers(model_name, config) or _find_given(UNKNOWN_IN_RUNS, config):
        return unknown
    if getattr(run, "use_megatron_fsdp", False):
        return "weights sharded by Megatron-FSDP"
    if getattr(run, "use_torch_fsdp2", False):
        return "weights sharded by torch's FSDP"
    if run.optimizer != "adam":
        return f"the optimizer {run.optimizer}, and what is known is adam"
    return _find_given(["optimizer_cpu_offload"], run)


def find_unknown_in_layers(model_name: str, config: Any) -> str | None:
    """As `find_unknown`, but only what decides what a layer keeps for backward."""
    if model_name not in ("GPTModel", "BertModel"):
        return f"a {model_name}, and what is known are GPTModel and BertModel"
    if config.context_parallel_size > 1:
        return f"context parallel size {config.context_parallel_size}"
    return _find_given(UNKNOWN_IN_LAYERS, config)


def _find_given(fields: Iterable[str], config: Any) -> str | None:
    given = (field for field in fields if getattr(config, field, None))
    return next((option.gives for field in given for option in list_options(field).values()), None)


def read_run(
    model_name: str,
    config: Any,
    arguments: Mapping[str, Any],
    run: Any,
    tempo: TempoConfig,
    *,
    activation: str,
    stock: str,
    fuses_activation: bool | None = None,
    layers_only: bool = False,
) -> Run:
    """A run of which nothing is unknown, or, with layers_only, nothing of its layers.

    Args:
        model_name: class of the model, as Megatron calls it.
        config: its TransformerConfig, or what has the same fields.
        arguments: of its constructor; of a BertModel num_tokentypes and add_binary_head too, of a T5Model
            decoder_seq_length.
        run: Megatron's arguments.
        tempo: what its operations do.
        activation: a name of `tempo_megatron.settings.activations`.
        stock, fuses_activation: whose modules stock ones are, and how they activate; see Run.
        layers_only: leaves out what the layers do not depend on, recomputation too.

    Raises ValueError where the model has a part, such as an activation, that no ModelShape has, and for a recomputation
    that the estimate does not know.
    """
    of_model, of_layout, of_run = _read_experts(config) if config.num_moe_experts else ({}, {}, {})
    model = make_shape(
        **{name: getattr(config, name) for name in SAME},
        # Megatron's is of all linears, or of q, k and v only.
        add_qkv_bias=config.add_qkv_bias and not config.add_bias_linear,
        family=_FAMILIES[model_name],
        activation=activation,
        seq_length=run.seq_length,
        decoder_seq_length=arguments.get("decoder_seq_length"),
        max_position_embeddings=arguments["max_sequence_length"],
        # As this run pads it.
        vocab_size=arguments["vocab_size"],
        make_vocab_size_divisible_by=1,
        untie_embeddings_and_output_weights=not arguments["share_embeddings_and_output_weights"],
        num_tokentypes=arguments.get("num_tokentypes") or 0,
        add_binary_head=bool(arguments.get("add_binary_head", False)),
        **{name: value for name, default in _YOUNG.items() if (value := getattr(config, name, default)) != default},
        **_read_positions(config, arguments, stock),
        **of_model,
    )
    fuses_norms = stock == "transformer_engine"
    recomputation = {} if layers_only else read_recomputation(config, model=model, fuses_norms=fuses_norms)
    return Run(
        model=model,
        tempo=tempo,
        hybrid=_read_hybrid(config),
        optimizer=OptimizerSettings(
            distributed=run.use_distributed_optimizer, instances=getattr(run, "num_distributed_optimizer_instances", 1)
        ),
        layout=Layout(
            tp=config.tensor_model_parallel_size,
            pp=config.pipeline_model_parallel_size,
            dp=run.data_parallel_size,
            cp=config.context_parallel_size,
            sp=config.sequence_parallel,
            chunks=deal_out_layers(config),
            **of_layout,
        ),
        mtp_num_layers=getattr(config, "mtp_num_layers", None) or 0,
        mtp_repeats_layer=getattr(config, "mtp_use_repeated_layer", False),
        mtp_precedes_head=bool(config.pipeline_model_parallel_layout) and _split_layout(config)[-1] == "L",
        micro_batch_group=getattr(config, "microbatch_group_size_per_vp_stage", None),
        micro_batch_size=run.micro_batch_size,
        num_micro_batches=max(1, run.global_batch_size // (run.micro_batch_size * run.data_parallel_size)),
        dtype=config.params_dtype,
        stock=stock,
        # A member of Megatron's enumeration, or its name.
        stock_attention=_STOCK_ATTENTIONS.get(
            getattr(config.attention_backend, "name", config.attention_backend), "fused"
        ),
        fuses_cross_entropy=getattr(config, "cross_entropy_loss_fusion", False)
        and config.cross_entropy_fusion_impl == "native",
        fuses_activation=fuses_activation,
        masked_softmax_fusion=config.masked_softmax_fusion,
        learns_positions=config.multi_latent_attention and arguments["position_embedding_type"] == "learned_absolute",
        # Megatron-LM's arguments.py: validate_args.
        fuses_latent_rope=config.multi_latent_attention
        and config.apply_rope_fusion
        and config.position_embedding_type == "rope",
        **of_run,
        **recomputation,
    )


def deal_out_layers(config: Any) -> tuple[int, ...] | None:
    """How many layers each chunk has; None is one chunk for each stage, all alike.

    As transformer_block.py: get_num_layers_to_build of megatron-core 0.16.1 deals them out. Raises ValueError where
    they do not divide.
    """
    main_pattern = (getattr(config, "hybrid_layer_pattern", None) or "").partition("/")[0]
    if "|" in main_pattern:
        return tuple(map(len, main_pattern.split("|")))
    if config.pipeline_model_parallel_layout:
        return tuple(chunk.count("t") for chunk in _split_layout(config))
    stages, num_chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    extra = [getattr(config, name) for name in ACCOUNTS]
    if not any(extra):
        return cut_layers(
            config.num_layers,
            stages,
            per_chunk=num_chunks and config.num_layers // (stages * num_chunks),
            first=config.num_layers_in_first_pipeline_stage,
            last=config.num_layers_in_last_pipeline_stage,
        )
    num_chunks = stages * (num_chunks or 1)
    per_chunk, rest = divmod(config.num_layers + sum(extra), num_chunks)
    if rest:
        raise ValueError(
            f"{config.num_layers} layers and what counts as one with --account-for-embedding-in-pipeline-split and "
            f"--account-for-loss-in-pipeline-split do not divide into {num_chunks} chunks; change one of them"
        )
    found = [per_chunk] * num_chunks
    found[0] -= extra[0]
    found[-1] -= extra[1]
    return tuple(found)


def _split_layout(config: Any) -> list[str]:
    """As parse_pipeline_layout returns it, where m stands as Megatron wants it: in one chunk behind the first stage."""
    given, stages = config.pipeline_model_parallel_layout, config.pipeline_model_parallel_size
    number = config.mtp_num_layers or 0
    chunks = parse_pipeline_layout(given, config.num_layers, stages, number)
    with_m = [place for place, chunk in enumerate(chunks) if "m" in chunk]
    if number and (len(with_m) > 1 or with_m[0] < len(chunks) - min(2, stages)):
        raise ValueError(
            f"--pipeline-model-parallel-layout {given} has m in chunk {' and '.join(map(str, with_m))} of "
            f"0 to {len(chunks) - 1}; expected all of them in the last or in the one before it; move them"
        )
    return chunks


def _read_hybrid(config: Any) -> Hybrid | None:
    """None without a pattern. Raises ValueError for layers that the estimate does not know."""
    if not (given := getattr(config, "hybrid_layer_pattern", None)):
        return None
    pattern, _, predicting = given.partition("/")
    return Hybrid(
        pattern=pattern.replace("|", ""),
        mtp_pattern=predicting.partition("/")[0],
        state_dim=config.mamba_state_dim,
        head_dim=config.mamba_head_dim,
        num_groups=config.mamba_num_groups,
        num_heads=config.mamba_num_heads,
    )


def _read_positions(config: Any, arguments: Mapping[str, Any], stock: str) -> dict[str, Any]:
    """The fields of a ModelShape for positions, and for latent attention, which rotates a part of each head."""
    if not config.multi_latent_attention:
        return {"position_embedding_type": arguments["position_embedding_type"]}
    if stock != "transformer_engine":
        raise ValueError(
            "--multi-latent-attention needs --transformer-impl transformer_engine: Megatron's own attention takes no "
            "values of another size than keys; leave one of them out"
        )
    position = "rope" if getattr(config, "rope_type", None) == "rope" else "yarn"
    sizes = {name: getattr(config, name) for name in LATENT}
    return {"multi_latent_attention": True, "position_embedding_type": position, **sizes}


def _read_experts(config: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The fields of a ModelShape, of a Layout and of a Run for experts."""
    for field, words in _UNKNOWN_IN_EXPERTS.items():
        if getattr(config, field, None):
            raise ValueError(f"{words}, which the estimate does not know")
    routing, coefficient = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if not isinstance(routing, str):
        if len(routing) > 1:
            raise ValueError("several kinds of load balancing at once are given, and the estimate knows one")
        routing = routing[0]
    capacity = config.moe_expert_capacity_factor
    of_model = {
        **{name: getattr(config, name) for name in (*SAME_IN_EXPERTS, "moe_layer_freq", "moe_ffn_hidden_size")},
        "num_experts": config.num_moe_experts,
        "moe_router_load_balancing_type": routing,
        "moe_aux_loss_coeff": float(coefficient if isinstance(coefficient, (int, float)) else coefficient[0]),
        "moe_expert_capacity_factor": None if capacity is None or capacity < 0 else float(capacity),
    }
    of_layout = {
        "ep": config.expert_model_parallel_size,
        "etp": config.expert_tensor_parallel_size or config.tensor_model_parallel_size,
        "dispatcher": config.moe_token_dispatcher_type,
        "overlaps": bool(getattr(config, "overlap_moe_expert_parallel_comm", False)),
    }
    of_run = {
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "moe_permute_fusion": config.moe_permute_fusion,
        "moe_shared_expert_gate": bool(getattr(config, "moe_shared_expert_gate", False)),
        "moe_imbalance": 1.0 if config.moe_router_force_load_balancing else None,
    }
    return of_model, of_layout, of_run

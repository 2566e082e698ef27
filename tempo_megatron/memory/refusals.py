"""What a run cannot have together, or the estimate does not know together: one table, which `Run.check` asks.

A row is what concerns a run, and the sentence that a user reads. In a sentence `{0.x}` is what the run has, and a name
such as `{tp}` is the option as the user typed it: Megatron-LM's, which are our trainer's too, or a command's of ours.
`memory.megatron.derived` has the like for options of Megatron-LM that no Run has. What is wrong with one argument by
itself is said where that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Refusal = tuple[Callable[[Any], object], str]
"""What says whether it concerns a run, by true or by a dictionary of what the sentence takes too, and the sentence."""

MEGATRONS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "dp": "--world-size",
    "stock": "--transformer-impl",
}
"""Name in a sentence -> the option of Megatron-LM and of our trainer."""

OURS = {**MEGATRONS, "tp": "--tp", "pp": "--pp", "ep": "--ep", "dp": "--dp", "stock": "--stock"}
"""Likewise, of the commands estimate, plan and ledger."""


def refuse(rows: Iterable[Refusal], given: Any, names: Mapping[str, str] = MEGATRONS) -> None:
    """Raise ValueError with the sentence of the first row that concerns what is given."""
    for concerns, sentence in rows:
        if found := concerns(given):
            raise ValueError(sentence.format(given, **{**names, **(found if isinstance(found, dict) else {})}))


def _misses_ends(run: Any) -> dict[str, Any] | None:
    """Of a pipeline whose ends have numbers of layers, with which the stages between them cannot share the rest."""
    given = {"first": run.first_stage_layers, "last": run.last_stage_layers}
    ends = {name: number for name, number in given.items() if number is not None}
    rest, others = run.model.num_layers - sum(ends.values()), run.pipeline_parallel - len(ends)
    if not ends or (others > 0 and rest >= others and rest % others == 0) or (others == 0 and rest == 0):
        return None
    options = " and ".join(f"--decoder-{name}-pipeline-num-layers {number}" for name, number in ends.items())
    wanted = "a positive multiple of them" if others > 0 else "none"
    return {"ends": options, "rest": rest, "others": max(others, 0), "wanted": wanted}


def _has_uneven_stages(run: Any) -> dict[str, int] | None:
    if run.layers_per_virtual_stage is None or run.layers_of_chunks is not None:
        return None
    layers = run.list_stage_layers()
    return {"least": min(layers), "most": max(layers)} if min(layers) < max(layers) else None


def _misses_groups(run: Any) -> dict[str, int] | None:
    """Of an interleaved pipeline, whose micro batches pass through each chunk in groups."""
    stages = run.pipeline_parallel
    group, number = run.micro_batch_group or stages, run.num_micro_batches or 0
    if run.layers_per_virtual_stage is None or run.layers_of_chunks is not None:
        return None
    return {"group": group} if 0 < number % group < stages or 0 < number < group or group < stages else None


def _lacks_rows(run: Any) -> dict[str, str] | None:
    """Of experts that are padded to their capacity: their rows are taken from the tokens, which are fewer
    (core/transformer/moe/moe_utils.py: permute of megatron-core 0.16.1)."""
    experts = run.experts
    if experts is None or experts.capacity_factor is None or not experts.pads_to_capacity:
        return None
    most = experts.num_experts / experts.per_token
    return {"most": f"{most:g}"} if experts.dispatcher == "alltoall" and experts.capacity_factor > most else None


def _misdivides_mamba(run: Any) -> dict[str, int] | None:
    """As ssm/mamba_mixer.py and ssm/mamba_context_parallel.py of megatron-core 0.16.1."""
    if run.hybrid is None or "M" not in run.hybrid.pattern:
        return None
    tp, cp, groups = run.tensor_parallel, run.context_parallel, run.hybrid.num_groups
    heads = run.hybrid.find_num_heads(run.model.hidden_size)
    of_rank = max(1, groups // tp)
    divides = not (heads % groups or groups % tp or heads % (tp * cp)) and 0 in (of_rank % cp, cp % of_rank)
    return None if divides else {"heads": heads}


def _is_cut(run: Any) -> bool:
    """Whether each pipeline stage has several chunks, where there are stages."""
    return run.pipeline_parallel == 1 or len(run.list_chunks(0)) > 1


REFUSALS: tuple[Refusal, ...] = (
    (lambda run: run.model.vocab_size is None, "the model has no vocab_size; give --vocab-size"),
    # Layers in the stages of a pipeline.
    (
        lambda run: run.model.family == "t5" and run.pipeline_parallel > 1,
        "{pp} is {0.pipeline_parallel}, and the model is a T5, whose encoder and decoder have stages of their own, "
        "which the estimate does not know; leave it out",
    ),
    (
        lambda run: (
            run.layers_of_chunks is not None
            and (
                len(run.layers_of_chunks) % run.pipeline_parallel
                or sum(run.layers_of_chunks) != run.model.num_layers
                or min(run.layers_of_chunks) < 0
            )
            and {"number": len(run.layers_of_chunks), "layers": sum(run.layers_of_chunks)}
        ),
        "the pipeline's {number} chunks have {layers} layers; expected a multiple of {pp} {0.pipeline_parallel}, and "
        "the model's {0.model.num_layers} layers",
    ),
    (
        lambda run: (
            run.layers_of_chunks is None
            and run.first_stage_layers is None
            and run.last_stage_layers is None
            and run.model.num_layers % run.pipeline_parallel
        ),
        "{0.model.num_layers} layers are not a multiple of {pp} {0.pipeline_parallel}; change one of them",
    ),
    (
        lambda run: run.pipeline_parallel == 1 and _misses_ends(run),
        "{ends} needs at least 2 stages, and there is 1; leave it out, or raise {pp}",
    ),
    (
        _misses_ends,
        "{ends} leaves {rest} of {0.model.num_layers} layers for {others} other stages; expected {wanted}; change one "
        "of them",
    ),
    (
        _has_uneven_stages,
        "--num-layers-per-virtual-pipeline-stage is {0.layers_per_virtual_stage} and stages have {least} to {most} "
        "layers; expected stages of equally many; leave one out",
    ),
    (
        lambda run: (
            run.layers_per_virtual_stage is not None
            and run.layers_of_chunks is None
            and (run.pipeline_parallel == 1 or run.list_stage_layers()[0] % run.layers_per_virtual_stage)
            and {"layers": run.list_stage_layers()[0]}
        ),
        "--num-layers-per-virtual-pipeline-stage is {0.layers_per_virtual_stage}; expected a divisor of the {layers} "
        "layers of one of at least 2 stages; change it or leave it out",
    ),
    (
        _misses_groups,
        "{0.num_micro_batches} micro batches pass through chunks in groups of {group}, of which none may be smaller "
        "than {pp} {0.pipeline_parallel}, as interleaving needs; change one of them",
    ),
    # Multi-token prediction, and layers of several kinds.
    (
        lambda run: run.mtp_num_layers and run.model.family != "gpt",
        "--mtp-num-layers is {0.mtp_num_layers}, and the model is no GPT; leave it out",
    ),
    (
        _misdivides_mamba,
        "the {heads} heads of a Mamba layer and --mamba-num-groups {0.hybrid.num_groups} do not divide over each other "
        "and over {tp} {0.tensor_parallel} and {cp} {0.context_parallel}; change --mamba-num-heads or "
        "--mamba-num-groups",
    ),
    # Tokens, experts and states over ranks.
    (
        lambda run: run.context_parallel > 1 and (run.model.family != "gpt" or run.stock != "transformer_engine"),
        "{cp} is {0.context_parallel}, which Megatron has for a GPT with Transformer Engine's attention only; leave it "
        "out, or give {stock} transformer_engine",
    ),
    (
        lambda run: run.context_parallel > 1 and run.model.seq_length % (2 * run.context_parallel),
        "--seq-length {0.model.seq_length} is not a multiple of twice {cp} {0.context_parallel}, as each rank takes "
        "two chunks; change one of them",
    ),
    (
        lambda run: run.experts is not None and run.experts.num_experts % run.experts.expert_parallel,
        "{ep} {0.experts.expert_parallel} does not divide the model's {0.experts.num_experts} experts; change it",
    ),
    (
        lambda run: (
            run.experts is not None and run.ranks_of_stage % (run.experts.expert_parallel * run.experts.tensor_parallel)
        ),
        "{ep} {0.experts.expert_parallel} times {0.experts.tensor_parallel}, over which an expert is split, does not "
        "divide the {0.ranks_of_stage} ranks of a pipeline stage; change {ep}, {tp} or {dp}",
    ),
    (
        _lacks_rows,
        "--moe-expert-capacity-factor is {0.experts.capacity_factor:g} and experts are padded to it; Megatron's "
        "all-to-all fails above {most}, where an expert has more rows than there are tokens; lower it, or use "
        "--moe-token-dispatcher-type allgather",
    ),
    (
        lambda run: run.experts is not None and run.experts.pads_to_capacity and run.experts.capacity_factor is None,
        "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor; give both or none",
    ),
    (
        lambda run: run.experts is not None and run.experts.pads_to_capacity and run.experts.dispatcher == "flex",
        "--moe-pad-expert-input-to-capacity and --moe-token-dispatcher-type flex are both given, which DeepEP refuses "
        "and the estimate does not know; change one of them",
    ),
    (
        lambda run: (
            run.experts is not None and run.experts.capacity_factor is not None and run.experts.routing == "sinkhorn"
        ),
        "--moe-expert-capacity-factor and --moe-router-load-balancing-type sinkhorn are both given; leave one of them "
        "out",
    ),
    (
        lambda run: (
            run.experts is not None
            and run.experts.overlaps
            and (run.experts.dispatcher == "allgather" or run.experts.expert_parallel == 1 or not _is_cut(run))
        ),
        "--overlap-moe-expert-parallel-comm needs {ep} of at least 2, --moe-token-dispatcher-type alltoall or flex, "
        "and several chunks of each pipeline stage where there are stages; change what is missing, or leave it out",
    ),
    (
        lambda run: run.experts is not None and run.experts.overlaps and "full" in run.recompute,
        "--overlap-moe-expert-parallel-comm and --recompute-granularity full are both given; leave one of them out",
    ),
    (
        lambda run: run.overlaps_tensor_parallel and not (run.sequence_parallel and run.stock == "transformer_engine"),
        "--tp-comm-overlap needs {tp} of at least 2, --sequence-parallel and {stock} transformer_engine; add what is "
        "missing, or leave it out",
    ),
    (
        lambda run: (
            run.deferred_head_gradients is not None
            and (run.pipeline_parallel == 1 or not run.fuses_gradient_accumulation)
        ),
        "--defer-embedding-wgrad-compute needs {pp} of at least 2 and the fusion of gradient accumulation; add the one "
        "and leave --no-gradient-accumulation-fusion out, or leave it out",
    ),
    (
        lambda run: run.optimizer.fsdp is not None and (run.pipeline_parallel > 1 or run.mtp_num_layers),
        "--use-megatron-fsdp is known to the estimate in one pipeline stage and without multi-token prediction; leave "
        "out what is otherwise",
    ),
    # Float8.
    (
        lambda run: run.float8 is not None and (run.stock != "transformer_engine" or run.gpu == "a100"),
        "--fp8-format needs Transformer Engine's modules and Hopper or Blackwell; leave it out, or change {stock} or "
        "--gpu",
    ),
    (
        lambda run: run.float8 == "mxfp8" and run.gpu == "h100",
        "--fp8-recipe mxfp8 needs Blackwell; leave it out, or give --gpu gb200",
    ),
    (
        lambda run: run.float8 == "delayed" and run.float8_layers is not None,
        "--first-last-layers-bf16 is not for --fp8-recipe delayed; give tensorwise, blockwise or mxfp8, or leave it "
        "out",
    ),
    (
        lambda run: run.float8_weights and run.float8 == "mxfp8",
        "--fp8-param-gather gathers weights of mxfp8 through buffers that the estimate does not know; leave it out",
    ),
    (
        lambda run: run.float8_weights and run.optimizer.fsdp is not None and run.float8 == "blockwise",
        "--use-megatron-fsdp gathers weights of --fp8-recipe {0.float8} through buffers that the estimate does not "
        "know; leave --fp8-param-gather out",
    ),
)
"""Asked in this order: each row takes it that none before it concerns the run."""

KNOWN_IN_COMMANDS = (
    *("mtp_num_layers", "pipeline_model_parallel_layout", "fp8"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "window_attn_skip_freq"),
)
"""Of the next two, what the estimate of a command knows, and the plan of a built run does not."""

UNKNOWN_IN_LAYERS = {
    "heterogeneous_block_specs": "layers of several kinds",
    "fp8": "float8",
    "fp4": "float4",
    "fp32_residual_connection": "a float32 residual stream",
    "attention_output_gate": "gates on attention's output",
    "experimental_attention_variant": "an experimental attention",
    "window_attn_skip_freq": "layers with and without a window",
}
"""Field of a TransformerConfig -> what it gives a run that changes what a layer keeps, in ways that no Run can say."""

UNKNOWN_IN_RUNS = {
    "mtp_num_layers": "multi-token prediction",
    "cpu_offloading": "activations on the host",
    "fine_grained_activation_offloading": "activations on the host (tempo.offload is known)",
    "distribute_saved_activations": "saved activations that tensor-parallel ranks share",
    "pipeline_model_parallel_layout": "a pipeline layout of its own",
    "account_for_embedding_in_pipeline_split": "an embedding that counts as a layer of its stage",
    "account_for_loss_in_pipeline_split": "a loss that counts as a layer of its stage",
}
"""Likewise, what changes what a step holds beside its layers."""

UNKNOWN_IN_COMMANDS = {
    "use_torch_fsdp2": "weights sharded by torch's FSDP (--use-megatron-fsdp is known)",
    "fsdp_double_buffer": "buffers of Megatron-FSDP that stay",
    "megatron_fsdp_version": "another version of Megatron-FSDP",
    "optimizer": "another optimizer than Adam",
    "optimizer_cpu_offload": "optimizer states on the host",
    "offload_optimizer_states": "optimizer states on the host",
    "ddp_reduce_scatter_with_fp32_accumulation": "gradients that are reduced through all-to-all",
    "ddp_param_name_patterns_for_fp32_local_accumulation": "gradients of several dtypes",
    "fp16_lm_cross_entropy": "a cross entropy in float16",
    "cuda_graph_impl": "CUDA graphs, whose pools keep the memory of each layer",
    "cuda_graph_impl_deprecated": "CUDA graphs, whose pools keep the memory of each layer",
    "nccl_ub": "buffers that NCCL registers",
    "keep_fp8_transpose_cache": "transposed weights in float8 that stay",
    "mtp_standalone": "multi-token prediction in a stage of its own",
    "mla_down_proj_fusion": "down projections that are one",
    "tensor_parallel_num_weight_shards": "weights sharded beside tensor parallelism",
    "hybrid_context_parallel": "context parallelism",
    "use_mamba_mem_eff_path": "a scan that keeps what it could compute again",
    "linear_attention_type": "linear attention",
    "dsv4_mode": "an experimental attention",
    "no_rope_freq": "layers with and without rotary embeddings",
    "qk_l2_norm": "an L2 norm of queries and keys",
    "qk_clip": "the largest logits of attention",
    "log_max_attention_logit": "the largest logits of attention",
    "openai_gelu": "OpenAI's GELU",
    "apply_residual_connection_post_layernorm": "a residual stream behind the norms",
    "post_self_attn_layernorm": "a norm behind attention",
    "post_mlp_layernorm": "a norm behind the MLP",
    "use_te_activation_func": "Transformer Engine's activation",
    "use_transformer_engine_op_fuser": "Transformer Engine's fused operations",
    "use_grouped_gemm_for_dense_mlp": "an MLP through grouped matrix products",
    "fused_residual_rmsnorm": "a norm that is fused with the residual stream",
    "mlp_chunks_for_training": "an MLP that runs in chunks",
    "batch_invariant_mode": "batch-invariant kernels",
    "use_kitchen_attention": "Kitchen's attention",
    "te_precision_config_file": "precisions by a file",
    "fp8_output_proj": "an output layer in float8",
    "fp4_param_gather": "weights in float4",
    "sft": "sequences that are packed for fine-tuning",
    "logits_save_dir": "logits that are saved",
    "logits_load_dir": "distillation",
    "use_legacy_models": "models from before Megatron-core",
    "yaml_cfg": "a configuration in a file of its own",
    "perform_rl_step": "reinforcement learning",
    "skip_train": "no training",
    "freeze_all_layers": "frozen layers",
}
"""Likewise, of a command: a run that is built is planned without some of these, whose layers keep what others keep."""

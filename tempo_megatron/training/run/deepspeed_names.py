"""Names and value types that a DeepSpeed JSON may have; DeepSpeed itself ignores unknown names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tempo_megatron.words.json_text import find_near_name

# What would take over a decision that belongs to the trainer, with where to make that decision instead.
REFUSED = {
    "optimizer": "the trainer builds AdamW itself; use --lr, --weight-decay, --adam-beta1, --adam-beta2 and --adam-eps",
    "scheduler": "the trainer has Megatron's schedule; use --lr-decay-style, --lr-warmup-iters and --min-lr",
    "activation_checkpointing": "recomputation is Megatron's; use --recompute-granularity",
    "pipeline": "the trainer has no pipeline parallelism; remove the block",
    "tensor_parallel": "tensor parallelism is Megatron's; use --tensor-model-parallel-size",
    "sequence_parallel_size": "sequence parallelism is Megatron's; use --sequence-parallel",
    "data_efficiency": "the samples come from Megatron's GPTDataset; remove the block",
    "curriculum_learning": "the samples come from Megatron's GPTDataset; remove the block",
    "hybrid_engine": "it is for generation; remove the block",
    "amp": "Apex AMP is not supported; use bf16 or fp16",
    "torch_autocast": "the model itself is built in bf16 or fp16; use those blocks",
    "nebula": "checkpoints are written by the trainer; remove the block and use --save",
    "compile": "torch.compile of the whole engine is not supported; remove the block",
    "expert_parallel": "the model has no experts; remove the block",
    "elasticity": "the number of ranks is the launcher's, and --load goes on with any; remove the block",
    "autotuning": "`tempo-megatron plan` chooses the micro batch; remove the block",
    "progressive_layer_drop": "every layer is trained in every step; remove the block",
    "eigenvalue": "it is for quantization in training, which there is not; remove the block",
    "quantize_training": "there is no quantization in training; remove the block",
    "compression_training": "there is no compression in training; remove the block",
    "weight_quantization": "it is for inference; remove the block",
    "sparse_attention": "attention is Megatron's or Tempo's; remove the block",
    "sparse_gradients": "the embedding's gradient is dense; remove it",
    "graph_harvesting": "graphs of the whole engine are not supported; remove it",
    "managed_gradient_accumulation": "the trainer lets DeepSpeed count micro batches; remove it",
    "datastates": "checkpoints are written by the trainer; remove the block and use --save",
}
# Which names people write for others that DeepSpeed, or somebody else, once had.
_OTHER_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_BLOCKS = (
    "bf16 fp16 zero_optimization data_types checkpoint flops_profiler comms_logger tensorboard wandb csv_monitor comet "
    "monitor aio timers tempo"
).split()
_BOOLEANS = (
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients wall_clock_breakdown dump_state "
    "memory_breakdown disable_allgather disable_python_gc dataloader_drop_last use_data_before_expert_parallelism"
).split()
_NUMBERS = ("gradient_clipping", "gradient_predivide_factor", "steps_per_print")
_DTYPES = ("fp32", "bf16", "fp16")
# What DeepSpeed takes there, in capitals or not.
_WORDS: dict[str, tuple[str, ...]] = {
    "communication_data_type": _DTYPES,
    "seq_parallel_communication_data_type": _DTYPES,
    "log_level": ("debug", "info", "warning", "error", "critical"),
    "gradient_allreduce_op": ("mean", "sum"),
}
_ACCUMULATED = {
    "fp32": "fp32 float32 float torch.float32",
    "bf16": "bf16 bfloat16 torch.bfloat16",
    "fp16": "fp16 float16 half torch.float16",
}
_KNOWN = (*BATCH_KEYS, *_BLOCKS, *_BOOLEANS, *_NUMBERS, *_WORDS)
# DeepSpeed refuses other names itself, in its own words and late; here the near ones are found.
_KNOWN_IN = {
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads",
    "zero_optimization": "stage contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions "
    "use_multi_rank_bucket_allreduce allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
    "elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param cpu_offload "
    "cpu_offload_use_pin_memory stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold "
    "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save "
    "ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size "
    "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
    "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
    "save_muon_momentum_buffer_in_memory leaf_module",
    "data_types": "grad_accum_dtype",
}
_OFFLOADS = {"offload_optimizer": ("none", "cpu", "nvme"), "offload_param": ("none", "cpu", "nvme")}


def check_names(path: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that is not used here, and for one that is nearly another one."""
    for key, reason in REFUSED.items():
        if key in config:
            raise ValueError(f'--deepspeed_config {path}: "{key}" is not used here: {reason}')
    for key in find_unknown_keys(config):
        if blocks := [block for block, names in _KNOWN_IN.items() if key in names.split()]:
            raise ValueError(
                f'--deepspeed_config {path}: "{key}" stands at the top, where nobody reads it; it belongs into '
                + " or ".join(f'"{block}"' for block in blocks)
            )
        if near := _OTHER_NAMES.get(key.lower()) or find_near_name(key, (*_KNOWN, *REFUSED)):
            reason = f", which is not used here: {REFUSED[near]}" if near in REFUSED else ""
            raise ValueError(
                f'--deepspeed_config {path}: "{key}" is unknown; the nearest known name is "{near}"{reason}'
            )
    for block, names in _KNOWN_IN.items():
        content = config.get(block)
        for key in content if isinstance(content, Mapping) else ():
            if key not in names.split() and (near := find_near_name(key, names.split())):
                raise ValueError(
                    f'--deepspeed_config {path}: "{block}.{key}" is unknown; the nearest known name is "{block}.{near}"'
                )


def check_kinds(path: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a value of another kind than DeepSpeed has there."""

    def refuse(key: str, value: object, expected: str) -> None:
        raise ValueError(f'--deepspeed_config {path}: "{key}" is {value!r}; expected {expected}')

    for key, value in config.items():
        if key in _BLOCKS and key != "tempo" and not isinstance(value, dict):
            refuse(key, value, "an object {...}")
        elif key in BATCH_KEYS and value not in (None, "auto") and _is_number(value) and not _is_count(value):
            refuse(key, value, 'a whole number of at least 1 or "auto"')
        elif key == "gradient_clipping" and _is_number(value) and not 0 <= value < math.inf:
            refuse(key, value, 'a number of at least 0 or "auto"')
        elif key == "gradient_predivide_factor" and not (_is_number(value) and 0 < value < math.inf):
            refuse(key, value, "a number above 0")
        elif key == "steps_per_print" and value is not None and not _is_count(value):
            refuse(key, value, "a whole number of at least 1")
        elif key in _WORDS and value is not None and str(value).lower() not in _WORDS[key]:
            refuse(key, value, " or ".join(f'"{word}"' for word in _WORDS[key]))
        elif key in _BOOLEANS and key != "memory_breakdown" and not isinstance(value, bool):
            refuse(key, value, "true or false")
    accumulated = config.get("data_types", {}).get("grad_accum_dtype")
    if accumulated is not None and not any(accumulated in names.split() for names in _ACCUMULATED.values()):
        refuse("data_types.grad_accum_dtype", accumulated, " or ".join(f'"{dtype}"' for dtype in _ACCUMULATED))
    zero = config.get("zero_optimization", {})
    for name, devices in _OFFLOADS.items():
        value = zero.get(name)
        if value is not None and not isinstance(value, dict):
            refuse(f"zero_optimization.{name}", value, 'an object such as {"device": "cpu"}')
        if value and value.get("device", "none") not in devices:
            refuse(f"zero_optimization.{name}.device", value["device"], " or ".join(f'"{each}"' for each in devices))


def find_unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """Top-level keys that neither DeepSpeed nor the trainer reads: DeepSpeed accepts any name without a word."""
    return [key for key in config if key not in _KNOWN]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**48

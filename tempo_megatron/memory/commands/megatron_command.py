"""Reads a Run from the command that starts a training script of Megatron-LM.

What Megatron-LM would derive from the words, as arguments.py:validate_args does, is derived here; what it would refuse,
and what the estimate does not know, is one sentence. No model is built, and Megatron's training code is not imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tempo_megatron.memory.chips import H100
from tempo_megatron.memory.commands.megatron_options import find_default, list_options, parse_options
from tempo_megatron.memory.commands.shell_script import ALLOCATORS, WORKSPACE
from tempo_megatron.memory.commands.training_command import MODELS, Command, spell_option, split_command
from tempo_megatron.memory.megatron_run import (
    KNOWN_IN_COMMANDS,
    UNKNOWN_IN_COMMANDS,
    UNKNOWN_IN_LAYERS,
    UNKNOWN_IN_RUNS,
    read_run,
    split_layout,
)
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.run import MegatronFsdp, OptimizerSettings, Run
from tempo_megatron.models.shape import QUICK_GEGLU, pad_vocab_size
from tempo_megatron.settings.arguments import tempo_config_from
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.words.deepspeed_json import read_deepspeed_json
from tempo_megatron.words.json_text import read_object

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_MUONS = ("muon", "dist_muon")
# Tokenizer, or the end of its file -> tokens, where the file cannot be read: OpenAI's, Google's uncased and cased ones
# with [BOS] and [EOS], which Megatron adds, Llama 2's and NVIDIA's.
_TOKENS = {
    "nemotron_2_256k.model": 256000,
    "GPT2BPETokenizer": 50257,
    "BertWordPieceLowerCase": 30522 + 2,
    "BertWordPieceCase": 28996 + 2,
    "Llama2Tokenizer": 32000,
}
# What cuts the layers of a pipeline's stage into chunks.
_CUTS = (
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    "pipeline_model_parallel_layout",
)


_HYBRID_SPECS = [
    ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
]


def write_command(command: Command, options: Sequence[str], expected: Run, vocab_size: int | None) -> str:
    """A line for a shell: the command with Tempo, through launch/run_megatron.py.

    Args:
        command: as it was given.
        options: what stands behind its script now.
        expected: what they say. The line is read again, so that it is what was meant.
        vocab_size: as of `read_command`.
    """
    words = [*(command.launcher or ("python",)), "launch/run_megatron.py", command.script, *options]
    line = shlex.join(words)
    again, _ = read_command(
        split_command(shlex.split(line)), world_size=expected.world_size, vocab_size=vocab_size, gpu=expected.gpu
    )
    # No command says which chip; plans may be for one of which Run.gpu knows nothing.
    assert dataclasses.replace(again, chip=expected.chip) == expected, line
    return line


def read_command(
    command: Command,
    tempo: TempoConfig | None = None,
    *,
    world_size: int | None = None,
    vocab_size: int | None = None,
    gpu: str | None = None,
) -> tuple[Run, list[str]]:
    """The run, and warnings for a user.

    Args:
        command: of `split_command`.
        tempo: what Tempo's operations do in it; None is what the command says.
        world_size: GPUs of the whole run, where the launcher does not say it.
        vocab_size: tokens, where the command does not say it.
        gpu: what it runs on; see Run.

    Raises ValueError for what Megatron-LM would refuse, and what the estimate does not know.
    """
    args, warnings = parse_options(command.options)
    if tempo is None:
        tempo = tempo_config_from(args, _read_tempo_block(args))
    _complete_hybrid(args, command, warnings)
    _refuse_unknown(args, command.family)
    _complete_layout(args, _agree_on_world_size(command, world_size), warnings)
    _complete_model(args, command.family)
    _complete_step(args)
    arguments = {
        "vocab_size": _find_padded_vocab_size(args, command.family, vocab_size, warnings),
        "max_sequence_length": args.max_position_embeddings,
        "position_embedding_type": args.position_embedding_type,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
    }
    if command.family == "bert":
        # pretrain_bert.py: segments are told apart for the binary head.
        arguments |= {"num_tokentypes": 2 * args.bert_binary_head, "add_binary_head": args.bert_binary_head}
    if command.family == "t5":
        arguments["decoder_seq_length"] = args.decoder_seq_length
    run = read_run(
        MODELS[command.family],
        args,
        arguments,
        args,
        tempo,
        activation=_find_activation(args),
        stock=_find_stock(args, command.family),
        fuses_activation=_fuses_activation(args),
    )
    optimizer = _read_muon(args) if args.optimizer in _MUONS else run.optimizer
    run = dataclasses.replace(
        run,
        optimizer=dataclasses.replace(
            optimizer,
            gradient_bytes=_find_gradient_bytes(args),
            state_bytes=_find_state_bytes(args),
            overlaps_reduction=args.overlap_grad_reduce,
            bucket_elements=args.ddp_bucket_size,
            num_buckets=args.ddp_num_buckets,
            fsdp=_read_fsdp(args) if args.use_megatron_fsdp else None,
        ),
        deterministic=args.deterministic_mode,
        cublas_workspace_bytes=_read_workspace(command.launcher),
        expandable_segments=_has_expandable_segments(command.launcher),
        fuses_gradient_accumulation=args.gradient_accumulation_fusion,
        overlaps_tensor_parallel=_overlaps_tensor_parallel(args, run.stock),
        deferred_head_gradients=_find_deferred(args),
        float8=_find_float8(args),
        float8_layers=_find_float8_layers(args),
        float8_weights=_keeps_float8_weights(args),
        data_has_masks=args.create_attention_mask_in_dataloader,
    )
    run = set_gpu(run, gpu)
    run.check()
    return run, warnings


def set_gpu(run: Run, gpu: str | None) -> Run:
    """The run on a GPU, given as `read_gpu` takes it, with its chip; without one its chip is an H100's.

    The libraries are those of an A100, an H100 or a GB200, by the compute capability.
    """
    if gpu is None:
        return dataclasses.replace(run, gpu=None, chip=H100)
    chip = read_gpu(gpu).chip
    if chip is None:
        raise ValueError(f'--gpu {gpu} has no "chip", by which libraries choose; add it as in configs/gpu/h100.json')
    return dataclasses.replace(run, gpu={9: "h100", 10: "gb200"}.get(chip.major, "a100"), chip=chip)


def _read_muon(args: argparse.Namespace) -> OptimizerSettings:
    """As arguments.py:1724-1738 of Megatron-LM at d98e8a64dd divides its states.

    Raises ValueError for what it refuses, and what the estimate does not know.
    """
    is_divided = args.use_distributed_optimizer or args.optimizer == "dist_muon"
    way = "whole" if not is_divided else "laid out" if args.use_layer_wise_param_layout else "dealt"
    if args.fp16:
        raise ValueError(f"--optimizer {args.optimizer} does not train with --fp16; give --bf16")
    if args.num_distributed_optimizer_instances > 1:
        raise ValueError(
            f"--num-distributed-optimizer-instances {args.num_distributed_optimizer_instances} is not for --optimizer "
            f"{args.optimizer}; leave one of them out"
        )
    if args.muon_scalar_optimizer != "adam":
        raise ValueError(
            f"--muon-scalar-optimizer {args.muon_scalar_optimizer} is not known to the estimate, which knows adam"
        )
    if way == "laid out" and args.overlap_grad_reduce:
        raise ValueError(
            f"--overlap-grad-reduce pads each of several buckets of --optimizer {args.optimizer}, and the estimate "
            "knows one bucket; leave it out, or add --no-use-layer-wise-param-layout"
        )
    return OptimizerSettings(distributed=False, muon=way)


def _read_fsdp(args: argparse.Namespace) -> MegatronFsdp:
    """Raises ValueError for what Megatron-LM (arguments.py: validate_args) refuses, and what the estimate does not
    know."""
    strategies = args.data_parallel_sharding_strategy, args.outer_dp_sharding_strategy
    if strategies != ("optim_grads_params", "no_shard") or args.num_distributed_optimizer_instances > 1:
        raise ValueError(
            "--use-megatron-fsdp is known to the estimate with --data-parallel-sharding-strategy optim_grads_params "
            "and one group of ranks; leave out what says otherwise, --outer-dp-sharding-strategy and "
            "--num-distributed-optimizer-instances among it"
        )
    if args.optimizer != "adam" or args.use_precision_aware_optimizer or not args.use_distributed_optimizer:
        raise ValueError(
            "--use-megatron-fsdp needs --use-distributed-optimizer, and the estimate knows it with Adam and without "
            "--use-precision-aware-optimizer; change what is otherwise"
        )
    if args.pipeline_model_parallel_size > 1 or args.mtp_num_layers:
        raise ValueError(
            "--use-megatron-fsdp is known to the estimate in one pipeline stage and without multi-token prediction; "
            "leave out what is otherwise"
        )
    if args.fp8_param_gather and args.fp8_recipe not in ("tensorwise", "delayed"):
        raise ValueError(
            f"--use-megatron-fsdp gathers weights of --fp8-recipe {args.fp8_recipe} through buffers that the estimate "
            "does not know; leave --fp8-param-gather out"
        )
    _check_positive(args, "suggested_communication_unit_size")
    size = args.suggested_communication_unit_size
    return MegatronFsdp(
        main_bytes=_BYTES.get(args.megatron_fsdp_main_params_dtype),
        gradient_bytes=_BYTES.get(args.megatron_fsdp_main_grads_dtype),
        communicated_bytes=_BYTES.get(args.megatron_fsdp_grad_comm_dtype),
        **({} if size is None else {"unit_elements": size}),
    )


def _overlaps_tensor_parallel(args: argparse.Namespace, stock: str) -> bool:
    """Raises ValueError where Megatron-LM (arguments.py: validate_args) or its modules could not."""
    if args.tp_comm_overlap and not (args.sequence_parallel and stock == "transformer_engine"):
        raise ValueError(
            "--tp-comm-overlap needs --tensor-model-parallel-size of at least 2, --sequence-parallel and "
            "--transformer-impl transformer_engine; add what is missing, or leave it out"
        )
    return bool(args.tp_comm_overlap)


def _find_float8(args: argparse.Namespace) -> str | None:
    """Raises ValueError for a recipe that the estimate does not know."""
    if args.fp8 is None:
        return None
    if args.fp8_recipe == "custom":
        raise ValueError(
            "--fp8-recipe custom gives the run scales that the estimate does not know; it knows tensorwise, delayed, "
            "blockwise and mxfp8"
        )
    return str(args.fp8_recipe)


def _find_float8_layers(args: argparse.Namespace) -> tuple[bool, ...] | None:
    """As core/fp8_utils.py: is_first_last_bf16_layer. Raises ValueError for what Megatron-LM refuses."""
    if args.fp8 is None or not args.first_last_layers_bf16:
        return None
    if args.fp8_recipe == "delayed":
        raise ValueError(
            "--first-last-layers-bf16 is not for --fp8-recipe delayed; give tensorwise, blockwise or mxfp8, or leave "
            "it out"
        )
    first, last = args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16
    of_stage = args.num_layers // args.pipeline_model_parallel_size
    if not (0 <= first <= of_stage and 0 <= last <= of_stage):
        raise ValueError(
            f"--num-layers-at-start-in-bf16 {first} and --num-layers-at-end-in-bf16 {last} are not from 0 to the "
            f"{of_stage} layers of a pipeline stage; change one of them"
        )
    return tuple(first <= layer < args.num_layers - last for layer in range(args.num_layers))


def _keeps_float8_weights(args: argparse.Namespace) -> bool:
    """Raises ValueError for what Megatron-LM refuses, and what the estimate does not know."""
    if not args.fp8_param_gather:
        return False
    if args.fp8 is None:
        raise ValueError("--fp8-param-gather needs --fp8-format; add it, or leave the other out")
    if not args.use_distributed_optimizer:
        raise ValueError("--fp8-param-gather needs --use-distributed-optimizer; add it, or leave the other out")
    if args.fp8_recipe == "mxfp8":
        raise ValueError(
            "--fp8-param-gather gathers weights of mxfp8 through buffers that the estimate does not know; leave it out"
        )
    return True


def _find_deferred(args: argparse.Namespace) -> int | None:
    """Raises ValueError as core/model_parallel_config.py of megatron-core."""
    if not args.defer_embedding_wgrad_compute:
        return None
    if args.pipeline_model_parallel_size == 1 or not args.gradient_accumulation_fusion:
        raise ValueError(
            "--defer-embedding-wgrad-compute needs --pipeline-model-parallel-size of at least 2 and the fusion of "
            "gradient accumulation; add the one and leave --no-gradient-accumulation-fusion out, or leave it out"
        )
    if args.wgrad_deferral_limit < 0:
        raise ValueError(f"--wgrad-deferral-limit is {args.wgrad_deferral_limit}; expected 0 or more")
    return int(args.wgrad_deferral_limit)


def _find_gradient_bytes(args: argparse.Namespace) -> int | None:
    """As arguments.py:1203-1217 of Megatron-LM at d98e8a64dd decides it; None is the usual.

    Raises ValueError where the words contradict one another.
    """
    adds_in_float32 = args.accumulate_allreduce_grads_in_fp32
    if adds_in_float32 and args.main_grads_dtype != "fp32":
        raise ValueError(
            f"--accumulate-allreduce-grads-in-fp32 and --main-grads-dtype {args.main_grads_dtype} are both given; "
            "leave one of them out"
        )
    if args.bf16 and (args.grad_reduce_in_bf16 or args.main_grads_dtype == "bf16"):
        return 2
    return 4 if args.fp16 and adds_in_float32 else None


def _find_state_bytes(args: argparse.Namespace) -> tuple[int, int, int] | None:
    """Of the precision-aware optimizer: main copy and both moments of a parameter; None without it.

    Of a bf16 weight's float32 copy it keeps the 16 bits that the weight lacks (core/optimizer/optimizer_config.py:192
    of Megatron-LM at d98e8a64dd, pytorch/optimizers/fused_adam.py:414 of Transformer Engine).

    Raises ValueError for what Megatron-LM refuses.
    """
    dtypes = {name: getattr(args, name) for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")}
    if not args.use_precision_aware_optimizer:
        for name, value in {"main_grads_dtype": args.main_grads_dtype, **dtypes}.items():
            if value != "fp32":
                raise ValueError(f"{spell_option(name)} {value} needs --use-precision-aware-optimizer; add it")
        return None
    if not args.use_distributed_optimizer or args.optimizer != "adam":
        raise ValueError(
            "--use-precision-aware-optimizer needs --use-distributed-optimizer and Adam; add the one, or leave it out"
        )
    main, *moments = (_BYTES[value] for value in dtypes.values())
    return (2 if args.bf16 else main, moments[0], moments[1])


def _read_workspace(launcher: Sequence[str]) -> int | None:
    """The bytes that CUBLAS_WORKSPACE_CONFIG names before a command, as `:size in KiB:number` once or more often.

    Raises ValueError where it is something else.
    """
    given = _find_setting(launcher, WORKSPACE)
    if given is None:
        return None
    if not re.fullmatch(r"(:\d+:\d+)+", given):
        raise ValueError(f"{WORKSPACE} is {given}; expected sizes in KiB and how many of each, such as :4096:8")
    return sum(int(size) * int(number) << 10 for size, number in re.findall(r":(\d+):(\d+)", given))


def _has_expandable_segments(launcher: Sequence[str]) -> bool:
    """Whether PYTORCH_ALLOC_CONF before a command, `name:value` by commas, lets torch's allocator grow its segments."""
    given = next((found for name in reversed(ALLOCATORS) if (found := _find_setting(launcher, name)) is not None), "")
    return "expandable_segments:true" in given.lower().replace(" ", "").split(",")


def _find_setting(launcher: Sequence[str], name: str) -> str | None:
    return next((word.partition("=")[2] for word in launcher if word.startswith(f"{name}=")), None)


def _read_tempo_block(args: argparse.Namespace) -> dict[str, Any]:
    """The "tempo" block of --tempo-config or --deepspeed_config, as a DeepSpeed JSON holds it."""
    if args.tempo_config is not None:
        content = read_object(args.tempo_config)
        return content if "tempo" in content else {"tempo": content}
    return read_deepspeed_json(args.deepspeed_config) if args.deepspeed_config is not None else {}


def _refuse_unknown(args: argparse.Namespace, family: str) -> None:
    """Raise ValueError for the first field that no Run has and that is not what it is by default."""
    if not args.num_moe_experts:
        args.num_moe_experts = None
    for field, words in {**UNKNOWN_IN_LAYERS, **UNKNOWN_IN_RUNS, **UNKNOWN_IN_COMMANDS}.items():
        if (
            field not in KNOWN_IN_COMMANDS
            and not (field == "optimizer" and args.optimizer in _MUONS)
            and hasattr(args, field)
            and (value := getattr(args, field)) != find_default(field)
        ):
            options = " or ".join(list_options(field))
            of = (
                "" if isinstance(value, bool) else f" {' '.join(map(str, value)) if isinstance(value, list) else value}"
            )
            raise ValueError(
                f"{options}{of} gives the run {words}, which the estimate does not know; leave it out for an estimate "
                "without"
            )
    if args.delay_wgrad_compute and not args.overlap_moe_expert_parallel_comm:
        raise ValueError(
            "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm; add it, or leave the other out"
        )
    if args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "linear":
        raise ValueError(
            "--cross-entropy-fusion-impl linear gives the run a fused output layer, which the estimate does not know; "
            "it knows native and te"
        )
    if args.transformer_impl == "inference_optimized":
        raise ValueError("--transformer-impl inference_optimized trains nothing; give local or transformer_engine")
    is_known = args.spec == ["local"] if family == "bert" else args.hybrid_layer_pattern and args.spec in _HYBRID_SPECS
    if args.spec and not is_known:
        raise ValueError(f"--spec {' '.join(args.spec)} names layers that the estimate does not know; leave it out")
    if args.position_embedding_type in ("yarn", "mrope", "relative"):
        raise ValueError(
            f"--position-embedding-type {args.position_embedding_type} is not known to the estimate; it knows "
            "learned_absolute, rope and none"
        )


def _complete_hybrid(args: argparse.Namespace, command: Command, warnings: list[str]) -> None:
    """Fill in what a hybrid's pattern says, as arguments.py:744-897 of Megatron-LM at d98e8a64dd.

    Raises ValueError for what it refuses, and what the estimate does not know.
    """
    ratios = [name for name in ("hybrid_attention_ratio", "hybrid_mlp_ratio") if getattr(args, name) is not None]
    pattern = args.hybrid_layer_pattern
    if pattern is None:
        if command.trains_hybrid or args.is_hybrid_model or ratios or args.mtp_hybrid_override_pattern:
            raise ValueError(
                "the layers are of several kinds, and no pattern says which; give --hybrid-layer-pattern with a letter "
                "for each: M, *, - or E"
            )
        return
    if ratios:
        raise ValueError(f"{spell_option(ratios[0])} and --hybrid-layer-pattern are both given; leave the first out")
    if command.family != "gpt" or args.transformer_impl == "local" or args.multi_latent_attention:
        raise ValueError(
            "--hybrid-layer-pattern is for pretrain_hybrid.py with --transformer-impl transformer_engine and without "
            "--multi-latent-attention; change what is otherwise, or leave it out"
        )
    if not command.trains_hybrid:
        warnings.append(f"{command.script} is taken as pretrain_hybrid.py, as --hybrid-layer-pattern is given")
    for name in (*_CUTS, "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if getattr(args, name):
            raise ValueError(
                f"{spell_option(name)} is given beside --hybrid-layer-pattern, whose | cut the pipeline; leave it out"
            )
    predicting, args.mtp_hybrid_override_pattern = args.mtp_hybrid_override_pattern, None
    if predicting and args.mtp_num_layers and "/" not in pattern:
        pattern = "/".join([pattern, *[predicting] * args.mtp_num_layers])
    main, *further = pattern.split("/")
    if len({*further}) > 1:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} has {' and '.join(dict.fromkeys(further))} for multi-token prediction; "
            "give one pattern as often as it has layers"
        )
    if args.mtp_num_layers and not further:
        raise ValueError(
            f"--mtp-num-layers {args.mtp_num_layers} needs a pattern for its layers; write it behind "
            f"--hybrid-layer-pattern {pattern}, after a / for each"
        )
    sizes = [len(chunk) for chunk in main.split("|")]
    stages = args.pipeline_model_parallel_size
    if len(sizes) > 1 and (len(sizes) % stages or args.num_layers_in_first_pipeline_stage is not None):
        raise ValueError(
            f"--hybrid-layer-pattern cuts the pipeline into {len(sizes)} chunks; expected a multiple of "
            f"--pipeline-model-parallel-size {stages}, and no numbers of layers for its ends; change one of them"
        )
    args.hybrid_layer_pattern, args.num_layers, args.encoder_num_layers = pattern, sum(sizes), None
    args.mtp_num_layers = len(further) or None
    if "E" in main:
        if not args.num_moe_experts:
            raise ValueError("--hybrid-layer-pattern has E, and there are no experts; give --num-experts")
        args.moe_layer_freq = f"[{','.join('01'[letter == 'E'] for letter in main.replace('|', ''))}]"
    else:
        args.num_moe_experts = None


def _agree_on_world_size(command: Command, given: int | None) -> int:
    if given is not None and command.world_size not in (None, given):
        raise ValueError(
            f"--world-size is {given}, and the launcher starts {command.world_size} ranks; leave --world-size out, or "
            "change one of them"
        )
    found = given or command.world_size
    if found is None:
        raise ValueError("the command does not say how many GPUs it runs on; give --world-size")
    return found


def _complete_layout(args: argparse.Namespace, world_size: int, warnings: list[str]) -> None:
    """Raises ValueError where ranks or layers do not divide."""
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "num_virtual_stages_per_pipeline_rank",
    ):
        _check_positive(args, name)
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if world_size % (tp * pp * cp):
        raise ValueError(
            f"{world_size} GPUs are not a multiple of --tensor-model-parallel-size {tp} times "
            f"--pipeline-model-parallel-size {pp}{f' times --context-parallel-size {cp}' if cp > 1 else ''}; change "
            "one of them"
        )
    args.world_size, args.data_parallel_size = world_size, world_size // (tp * pp * cp)
    if args.sequence_parallel and tp == 1:
        warnings.append("--sequence-parallel is off, as Megatron-LM switches it off without tensor parallelism")
        args.sequence_parallel = False
    instances = args.num_distributed_optimizer_instances
    for name in ("num_distributed_optimizer_instances", "ddp_bucket_size", "ddp_num_buckets"):
        _check_positive(args, name)
    if args.ddp_bucket_size and args.ddp_num_buckets:
        raise ValueError("--ddp-bucket-size and --ddp-num-buckets are both given; leave one of them out")
    if instances > 1 and not args.use_distributed_optimizer:
        raise ValueError(
            f"--num-distributed-optimizer-instances {instances} needs --use-distributed-optimizer; add it, or leave "
            "the instances out"
        )
    if args.data_parallel_size * cp % instances:
        raise ValueError(
            f"--num-distributed-optimizer-instances {instances} does not divide the {args.data_parallel_size * cp} "
            "ranks that share states; change it"
        )
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        raise ValueError(
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; add them, or leave it "
            "out"
        )


def _complete_model(args: argparse.Namespace, family: str) -> None:
    """Fill in what Megatron-LM derives. Raises ValueError for what is missing or contradictory."""
    _join(args, "num_layers", "encoder_num_layers")
    _join(args, "seq_length", "encoder_seq_length")
    required = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "seq_length")
    for name in (*required, *(("decoder_seq_length",) if family == "t5" else ())):
        if getattr(args, name) is None:
            raise ValueError(f"{spell_option(name)} is missing, and Megatron-LM has no default for it; give it")
        _check_positive(args, name)
    _check_positive(args, "mtp_num_layers")
    for name in ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"):
        _check_positive(args, name)
    latent = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    for name in ("ffn_hidden_size", "kv_channels", "num_query_groups", *latent):
        _check_positive(args, name)
    if args.decoder_num_layers not in (None, args.num_layers):
        raise ValueError(
            f"--decoder-num-layers is {args.decoder_num_layers}, and the estimate knows as many as the encoder's "
            f"{args.num_layers}; change one of them"
        )
    longest = max(args.seq_length, args.decoder_seq_length or 0)
    if args.max_position_embeddings < longest:
        raise ValueError(
            f"--max-position-embeddings {args.max_position_embeddings} is less than the {longest} tokens of a sample; "
            "raise it"
        )
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if not (args.add_position_embedding or args.position_embedding_type == "rope"):
        raise ValueError("--no-position-embedding is taken no longer; give --position-embedding-type none")
    args.num_query_groups = args.num_query_groups if args.group_query_attention else None
    pp = args.pipeline_model_parallel_size
    per_chunk, chunks = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    given = {name: getattr(args, name) for name in _CUTS if getattr(args, name) is not None}
    if len(given) > 1:
        first, second, *_ = map(spell_option, given)
        raise ValueError(f"{first} and {second} are both given; leave one of them out")
    if args.pipeline_model_parallel_layout is not None:
        chunks = len(split_layout(args)) // pp
    if args.hybrid_layer_pattern is not None:
        chunks = max(1, len(args.hybrid_layer_pattern.partition("/")[0].split("|")) // pp)
    if per_chunk is not None:
        _check_positive(args, "num_layers_per_virtual_pipeline_stage")
        chunks, rest = divmod(_count_places(args), pp * per_chunk)
        if rest or pp == 1:
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {per_chunk} does not divide the {args.num_layers} layers of "
                f"{pp} pipeline stages into chunks; change it or leave it out"
            )
    elif args.num_virtual_stages_per_pipeline_rank is not None and _count_places(args) % (pp * chunks):
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {chunks} does not divide the {args.num_layers} layers of {pp} "
            "pipeline stages; change it or leave it out"
        )
    # One chunk a stage is no interleaving.
    args.virtual_pipeline_model_parallel_size = None if chunks == 1 else chunks


def _count_places(args: argparse.Namespace) -> int:
    """Layers, and what counts as one in the pipeline."""
    extra = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    return int(args.num_layers + extra)


def _complete_step(args: argparse.Namespace) -> None:
    """Raises ValueError where batch sizes do not divide, or precision or recomputation contradicts itself."""
    if args.micro_batch_size is None:
        raise ValueError("--micro-batch-size is missing, and Megatron-LM has no default for it; give it")
    _check_positive(args, "micro_batch_size")
    _check_positive(args, "global_batch_size")
    per_round = args.micro_batch_size * args.data_parallel_size
    if args.step_batch_size_schedule:
        args.global_batch_size = _find_last_batch_size(args)
    args.global_batch_size = args.global_batch_size or per_round
    if args.global_batch_size % per_round:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} times {args.data_parallel_size} data-parallel ranks; change one of them"
        )
    if args.bf16 and args.fp16:
        raise ValueError("--bf16 and --fp16 are both given; leave one of them out")
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    if args.recompute_granularity == "full" and args.recompute_method is None:
        raise ValueError("--recompute-granularity full needs --recompute-method uniform or block; give one")
    if args.recompute_granularity == "full":
        _check_positive(args, "recompute_num_layers")
        if args.recompute_num_layers is None:
            raise ValueError(f"--recompute-method {args.recompute_method} needs --recompute-num-layers; give it")
    if args.recompute_granularity == "selective" and args.recompute_method is not None:
        raise ValueError("--recompute-method is for --recompute-granularity full; leave it out")


def _find_last_batch_size(args: argparse.Namespace) -> int:
    """Of --step-batch-size-schedule, such as 0:384 200B:768: a batch that grows has most micro batches at its end.

    Raises ValueError where it is something else, or the batch size is given twice.
    """
    words = args.step_batch_size_schedule.split()
    if args.global_batch_size is not None or args.rampup_batch_size is not None:
        raise ValueError(
            "--step-batch-size-schedule is given beside --global-batch-size or --rampup-batch-size; leave one out"
        )
    if not all(re.fullmatch(r"[\d.]+[KMBT]?:[1-9]\d*", word) for word in words):
        raise ValueError(
            f"--step-batch-size-schedule is {' '.join(words)}; expected when and how many samples, such as "
            "0:384 200B:768"
        )
    return int(words[-1].rpartition(":")[2])


def _find_activation(args: argparse.Namespace) -> str:
    given = [name for name in ("swiglu", "squared_relu", QUICK_GEGLU) if getattr(args, name)]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(map(spell_option, given))} are both given; leave one of them out")
    return given[0] if given else "gelu"


def _fuses_activation(args: argparse.Namespace) -> bool:
    """As arguments.py: core_transformer_config_from_args of Megatron-LM at d98e8a64dd."""
    if args.squared_relu:
        return bool(args.use_fused_weighted_squared_relu)
    return bool(args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion)


def _find_stock(args: argparse.Namespace, family: str) -> str:
    if args.attention_backend == "local" and args.spec != ["local"]:
        raise ValueError("--attention-backend local needs --spec local; give another one")
    # pretrain_bert.py does not read --transformer-impl.
    is_local = args.spec == ["local"] if family == "bert" else args.transformer_impl == "local"
    return "local" if is_local else "transformer_engine"


def _find_padded_vocab_size(args: argparse.Namespace, family: str, given: int | None, warnings: list[str]) -> int:
    """Rows of the embedding. Raises ValueError where nothing says how many tokens there are."""
    if args.padded_vocab_size is not None:
        _check_positive(args, "padded_vocab_size")
        return int(args.padded_vocab_size)
    tokenizer = args.tokenizer_type or ("GPT2BPETokenizer" if family == "gpt" else "BertWordPieceLowerCase")
    size = given or _count_tokens(args, tokenizer)
    if size is None:
        named = (str(args.tokenizer_model), tokenizer)
        size = next((tokens for end, tokens in _TOKENS.items() if any(name.endswith(end) for name in named)), None)
        if size is None:
            raise ValueError(f"how many tokens {tokenizer} has cannot be read here; give --vocab-size before the --")
        size += args.vocab_extra_ids
        warnings.append(
            f"the file of {tokenizer} cannot be read here, and {size} tokens are assumed; --vocab-size before the -- "
            "gives another number"
        )
    _check_positive(args, "make_vocab_size_divisible_by")
    if not args.pad_vocab_size:
        return size
    return pad_vocab_size(size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)


def _count_tokens(args: argparse.Namespace, tokenizer: str) -> int | None:
    """As the tokenizer would; None where its file is not here."""
    if tokenizer in ("NullTokenizer", "NullMultimodalTokenizer"):
        _check_positive(args, "vocab_size")
        return args.vocab_size if args.vocab_size is None else int(args.vocab_size)
    try:
        text = Path(args.vocab_file or "").read_text(encoding="utf-8")
        if tokenizer.startswith("BertWordPiece"):
            # [BOS] and [EOS] are added.
            return len(text.splitlines()) + 2 + int(args.vocab_extra_ids)
        return len(json.loads(text)) if tokenizer == "GPT2BPETokenizer" else None
    except (OSError, ValueError):
        return None


def _join(args: argparse.Namespace, name: str, other: str) -> None:
    """Give `name` the value of its other name. Raises ValueError where both are given."""
    first, second = getattr(args, name), getattr(args, other)
    if first is not None and second is not None:
        raise ValueError(f"{spell_option(name)} and {spell_option(other)} are both given; leave one of them out")
    setattr(args, name, second if first is None else first)


def _check_positive(args: argparse.Namespace, name: str) -> None:
    value = getattr(args, name)
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ValueError(f"{spell_option(name)} is {value}; expected a positive number")

"""What Megatron-LM derives from the options of a command, and what it refuses of them.

As arguments.py: validate_args of Megatron-LM at d98e8a64dd, which is not imported. `list_contradictions` has what
options say that no Run has, and which contradict each other; `list_misfits` what does not fit once all is derived.
What an option by itself needs, excludes or gives stands in `options`, and what a Run can say in `memory.refusals`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tempo_megatron.memory.megatron.command import Command
from tempo_megatron.memory.megatron.options import ACCOUNTS, CUTS, KNOWN_IN_COMMANDS, READ, get_field, list_options
from tempo_megatron.memory.refusals import refuse
from tempo_megatron.memory.run import MegatronFsdp, OptimizerSettings
from tempo_megatron.models.layout import pad_vocab_size
from tempo_megatron.models.shape import QUICK_GEGLU

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
_HYBRID_SPECS = [
    ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
]
_ACTIVATIONS = ("swiglu", "squared_relu", QUICK_GEGLU)
# Fields of which one must have a value; the last is a T5's.
_REQUIRED = (
    *(("num_layers", "encoder_num_layers", "hybrid_layer_pattern"), ("hidden_size",), ("num_attention_heads",)),
    *(("max_position_embeddings",), ("micro_batch_size",), ("seq_length", "encoder_seq_length")),
    ("decoder_seq_length",),
)


def _list_given(args: argparse.Namespace, *fields: str) -> list[str]:
    """The options of these fields that are not what they are by default, as they were typed: with a value, but for a
    switch."""
    found = []
    for field in fields:
        options = list_options(field)
        if (value := getattr(args, field)) != next(iter(options.values())).default:
            words = value if isinstance(value, list) else [] if isinstance(value, bool) else [value]
            found.append(" ".join([" or ".join(options), *map(str, words)]))
    return found


def _list_refused_options(args: argparse.Namespace) -> Iterator[str]:
    """A sentence for each option that does not go with the others, or that the estimate does not know."""
    for name, option in READ.items():
        for given in _list_given(args, field := get_field(name)):
            is_known = field in KNOWN_IN_COMMANDS or (field == "optimizer" and args.optimizer in _MUONS)
            if option.gives is not None and not is_known:
                yield (
                    f"{given} gives the run {option.gives}, which the estimate does not know; leave it out for an "
                    "estimate without"
                )
            for other in _list_given(args, *option.excludes):
                yield f"{other.split()[0]} and {given.split()[0]} are both given; leave one of them out"
            missing = [next(iter(list_options(each))) for each in option.needs if not _list_given(args, each)]
            if missing:
                yield f"{given} needs {' and '.join(missing)}; add it, or leave the other out"


def list_contradictions(args: argparse.Namespace) -> Iterator[str]:
    """A sentence for each thing that the options, as they were typed, cannot say or the estimate does not know."""
    has_pattern = args.hybrid_layer_pattern is not None
    if (args.family == "hybrid" or args.is_hybrid_model) and not has_pattern:
        yield (
            "the layers are of several kinds, and no pattern says which; give --hybrid-layer-pattern with a letter for "
            "each: M, *, - or E"
        )
    is_encoder = args.family in ("bert", "t5")
    if has_pattern and (is_encoder or args.transformer_impl == "local" or args.multi_latent_attention):
        yield (
            "--hybrid-layer-pattern is for pretrain_hybrid.py with --transformer-impl transformer_engine and without "
            "--multi-latent-attention; change what is otherwise, or leave it out"
        )
    yield from _list_refused_options(args)
    if args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "linear":
        yield (
            "--cross-entropy-fusion-impl linear gives the run a fused output layer, which the estimate does not know; "
            "give native or te"
        )
    if args.transformer_impl == "inference_optimized":
        yield "--transformer-impl inference_optimized trains nothing; give local or transformer_engine"
    is_known = args.spec == ["local"] if args.family == "bert" else has_pattern and args.spec in _HYBRID_SPECS
    if args.spec and not is_known:
        yield f"--spec {' '.join(args.spec)} names layers that the estimate does not know; leave it out"
    position = args.position_embedding_type
    if position in ("yarn", "mrope", "relative"):
        yield (
            f"--position-embedding-type {position} is not known to the estimate; give learned_absolute, rope or none"
        )
    if not (args.position_embedding or args.use_rotary_position_embeddings or position == "rope"):
        yield "--no-position-embedding is taken no longer; give --position-embedding-type none"
    for required in _REQUIRED if args.family == "t5" else _REQUIRED[:-1]:
        if all(getattr(args, field) is None for field in required):
            yield f"{next(iter(list_options(required[0])))} is missing, and Megatron-LM has no default for it; give it"
    if args.attention_backend == "local" and args.spec != ["local"]:
        yield "--attention-backend local needs --spec local; give another one"
    yield from _list_refused_optimizers(args)
    if args.fp8 is not None and args.fp8_recipe == "custom":
        yield (
            "--fp8-recipe custom gives the run scales that the estimate does not know; give tensorwise, delayed, "
            "blockwise or mxfp8"
        )
    if args.defer_embedding_wgrad_compute and args.wgrad_deferral_limit < 0:
        yield f"--wgrad-deferral-limit is {args.wgrad_deferral_limit}; expected 0 or more"


def _list_refused_optimizers(args: argparse.Namespace) -> Iterator[str]:
    is_muon, instances = args.optimizer in _MUONS, args.num_distributed_optimizer_instances
    if is_muon and args.fp16:
        yield f"--optimizer {args.optimizer} does not train with --fp16; give --bf16"
    if is_muon and instances > 1:
        yield f"--num-distributed-optimizer-instances {instances} is not for --optimizer {args.optimizer}; leave it out"
    if is_muon and args.muon_scalar_optimizer != "adam":
        yield f"--muon-scalar-optimizer {args.muon_scalar_optimizer} is not known to the estimate; give adam"
    if is_muon and _divide_muon(args) == "laid out" and args.overlap_grad_reduce:
        yield (
            f"--overlap-grad-reduce pads each of several buckets of --optimizer {args.optimizer}, and the estimate "
            "knows one bucket; leave it out, or add --no-use-layer-wise-param-layout"
        )
    if args.use_precision_aware_optimizer and args.optimizer != "adam":
        yield f"--use-precision-aware-optimizer is for --optimizer adam, and it is {args.optimizer}; leave one out"
    strategies = args.data_parallel_sharding_strategy, args.outer_dp_sharding_strategy
    is_plain = args.optimizer == "adam" and not args.use_precision_aware_optimizer and instances == 1
    if args.use_megatron_fsdp and not (is_plain and strategies == ("optim_grads_params", "no_shard")):
        yield (
            "--use-megatron-fsdp is known to the estimate with Adam and without --use-precision-aware-optimizer, with "
            "--data-parallel-sharding-strategy optim_grads_params and one group of ranks; leave out what says "
            "otherwise, --outer-dp-sharding-strategy and --num-distributed-optimizer-instances among it"
        )


def list_misfits(args: argparse.Namespace) -> Iterator[str]:
    """A sentence for each thing that does not fit once all is derived."""
    pp, cp, dp = args.pipeline_model_parallel_size, args.context_parallel_size, args.data_parallel_size
    if args.spare_ranks:
        yield (
            f"{args.world_size} GPUs are not a multiple of --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} times --pipeline-model-parallel-size {pp} times "
            f"--context-parallel-size {cp}; change one of them"
        )
    if dp * cp % args.num_distributed_optimizer_instances:
        yield (
            f"--num-distributed-optimizer-instances {args.num_distributed_optimizer_instances} does not divide the "
            f"{dp * cp} ranks that share states; change it"
        )
    if args.decoder_num_layers not in (None, args.num_layers):
        yield (
            f"--decoder-num-layers is {args.decoder_num_layers}, and the estimate knows as many as the encoder's "
            f"{args.num_layers}; change one of them"
        )
    longest, positions = max(args.seq_length, args.decoder_seq_length or 0), args.max_position_embeddings
    if positions < longest:
        yield f"--max-position-embeddings {positions} is less than the {longest} tokens of a sample; raise it"
    per_chunk, chunks = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    is_one_stage = per_chunk is not None and pp == 1
    if is_one_stage or any(number and _count_places(args) % (pp * number) for number in (per_chunk, chunks)):
        yield (
            f"{_list_given(args, *CUTS)[0]} does not divide the {args.num_layers} layers of "
            f"--pipeline-model-parallel-size {pp} into chunks; change it or leave it out"
        )
    if args.global_batch_size % (args.micro_batch_size * dp):
        yield (
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} times {dp} data-parallel ranks; change one of them"
        )
    method, granularity = args.recompute_method, args.recompute_granularity
    if granularity == "full" and method is None:
        yield "--recompute-granularity full needs --recompute-method uniform or block; give one"
    if granularity == "full" and args.recompute_num_layers is None:
        yield f"--recompute-method {method} needs --recompute-num-layers; give it"
    if granularity == "selective" and method is not None:
        yield "--recompute-method is for --recompute-granularity full; leave it out"
    first, last, of_stage = args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16, args.num_layers // pp
    is_left_out = args.fp8 is not None and args.first_last_layers_bf16 and args.fp8_recipe != "delayed"
    if is_left_out and not (0 <= first <= of_stage and 0 <= last <= of_stage):
        yield (
            f"--num-layers-at-start-in-bf16 {first} and --num-layers-at-end-in-bf16 {last} are not from 0 to the "
            f"{of_stage} layers of a pipeline stage; change one of them"
        )


def _count_places(args: argparse.Namespace) -> int:
    """Layers, and what counts as one in the pipeline."""
    return int(args.num_layers + sum(getattr(args, name) for name in ACCOUNTS))


def derive(args: argparse.Namespace, command: Command, world_size: int | None, warnings: list[str]) -> None:
    """Fill in what Megatron-LM derives from the options of a command, and add warnings for a user.

    Args:
        args: of `parse_options`; the values are put there, under the names of a TransformerConfig.
        command: whose options they are.
        world_size: GPUs of the whole run, where the launcher does not say it.

    Raises ValueError for what Megatron-LM refuses, and what the estimate does not know.
    """
    args.family = command.family
    args.num_moe_experts = args.num_moe_experts or None
    refuse(list_contradictions(args))
    if args.hybrid_layer_pattern is not None:
        if command.family != "hybrid":
            warnings.append(f"{command.script} is taken as pretrain_hybrid.py, as --hybrid-layer-pattern is given")
        _derive_hybrid(args)
    if world_size is not None and command.world_size not in (None, world_size):
        raise ValueError(
            f"--world-size is {world_size}, and the launcher starts {command.world_size} ranks; leave --world-size "
            "out, or change one of them"
        )
    args.world_size = world_size or command.world_size
    if args.world_size is None:
        raise ValueError("the command does not say how many GPUs it runs on; give --world-size")
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    args.data_parallel_size, args.spare_ranks = max(1, args.world_size // ranks), args.world_size % ranks
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        warnings.append("--sequence-parallel is off, as Megatron-LM switches it off without tensor parallelism")
        args.sequence_parallel = False
    args.num_layers = args.encoder_num_layers if args.num_layers is None else args.num_layers
    args.seq_length = args.encoder_seq_length if args.seq_length is None else args.seq_length
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    args.num_query_groups = args.num_query_groups if args.group_query_attention else None
    if args.step_batch_size_schedule:
        # Such as 0:384 200B:768: a batch that grows has most micro batches at its end.
        words = args.step_batch_size_schedule.split()
        if not all(re.fullmatch(r"[\d.]+[KMBT]?:[1-9]\d*", word) for word in words):
            raise ValueError(
                f"--step-batch-size-schedule is {' '.join(words)}; expected when and how many samples, such as "
                "0:384 200B:768"
            )
        args.global_batch_size = int(words[-1].rpartition(":")[2])
    args.global_batch_size = args.global_batch_size or args.micro_batch_size * args.data_parallel_size
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    refuse(list_misfits(args))
    per_chunk, number = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if per_chunk is not None:
        number = _count_places(args) // (args.pipeline_model_parallel_size * per_chunk)
    args.virtual_pipeline_model_parallel_size = None if number == 1 else number


def _derive_hybrid(args: argparse.Namespace) -> None:
    """What a hybrid's pattern says. Raises ValueError where it does not go with the other options."""
    pattern = args.hybrid_layer_pattern
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
    args.num_layers, args.encoder_num_layers = sum(sizes), None
    args.mtp_num_layers = len(further) or None
    if "E" not in main:
        args.num_moe_experts = None
    elif args.num_moe_experts is None:
        raise ValueError("--hybrid-layer-pattern has E, and there are no experts; give --num-experts")
    else:
        args.moe_layer_freq = f"[{','.join('01'[letter == 'E'] for letter in main.replace('|', ''))}]"


def read_optimizer(args: argparse.Namespace) -> OptimizerSettings:
    """Of options that are derived; arguments.py:1203-1217 and 1724-1738 of Megatron-LM at d98e8a64dd.

    Of a bf16 weight's float32 copy the precision-aware optimizer keeps the 16 bits that the weight lacks
    (core/optimizer/optimizer_config.py:192, pytorch/optimizers/fused_adam.py:414 of Transformer Engine).
    """
    gradient_bytes = 4 if args.fp16 and args.accumulate_allreduce_grads_in_fp32 else None
    if args.bf16 and (args.grad_reduce_in_bf16 or args.main_grads_dtype == "bf16"):
        gradient_bytes = 2
    muon = _divide_muon(args) if args.optimizer in _MUONS else None
    main = 2 if args.bf16 else _BYTES[args.main_params_dtype]
    of_states = main, _BYTES[args.exp_avg_dtype], _BYTES[args.exp_avg_sq_dtype]
    unit = args.suggested_communication_unit_size
    fsdp = MegatronFsdp(
        main_bytes=_BYTES.get(args.megatron_fsdp_main_params_dtype),
        gradient_bytes=_BYTES.get(args.megatron_fsdp_main_grads_dtype),
        communicated_bytes=_BYTES.get(args.megatron_fsdp_grad_comm_dtype),
        **({} if unit is None else {"unit_elements": unit}),
    )
    return OptimizerSettings(
        distributed=args.use_distributed_optimizer and muon is None,
        instances=1 if muon else args.num_distributed_optimizer_instances,
        muon=muon,
        gradient_bytes=gradient_bytes,
        state_bytes=of_states if args.use_precision_aware_optimizer else None,
        overlaps_reduction=args.overlap_grad_reduce,
        bucket_elements=args.ddp_bucket_size,
        num_buckets=args.ddp_num_buckets,
        fsdp=fsdp if args.use_megatron_fsdp else None,
    )


def _divide_muon(args: argparse.Namespace) -> str:
    """How its states lie over ranks."""
    if not args.use_distributed_optimizer and args.optimizer != "dist_muon":
        return "whole"
    return "laid out" if args.use_layer_wise_param_layout else "dealt"


def find_float8_layers(args: argparse.Namespace) -> tuple[bool, ...] | None:
    """Which layers compute in float8, as core/fp8_utils.py: is_first_last_bf16_layer; None is all, or none."""
    if args.fp8 is None or not args.first_last_layers_bf16:
        return None
    first, end = args.num_layers_at_start_in_bf16, args.num_layers - args.num_layers_at_end_in_bf16
    return tuple(first <= layer < end for layer in range(args.num_layers))


def read_modules(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `read_run` that say whose modules there are, and which activation they have how.

    As arguments.py: core_transformer_config_from_args of Megatron-LM at d98e8a64dd; pretrain_bert.py does not read
    --transformer-impl.
    """
    is_local = args.spec == ["local"] if args.family == "bert" else args.transformer_impl == "local"
    fuses = args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion
    return {
        "activation": next((name for name in _ACTIVATIONS if getattr(args, name)), "gelu"),
        "stock": "local" if is_local else "transformer_engine",
        "fuses_activation": args.use_fused_weighted_squared_relu if args.squared_relu else fuses,
    }


def find_padded_vocab_size(args: argparse.Namespace, given: int | None, warnings: list[str]) -> int:
    """Rows of the embedding. Raises ValueError where nothing says how many tokens there are."""
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    is_encoder = args.family in ("bert", "t5")
    tokenizer = args.tokenizer_type or ("BertWordPieceLowerCase" if is_encoder else "GPT2BPETokenizer")
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
    if not args.pad_vocab_size:
        return size
    return pad_vocab_size(size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)


def _count_tokens(args: argparse.Namespace, tokenizer: str) -> int | None:
    """As the tokenizer would; None where its file is not here."""
    if tokenizer in ("NullTokenizer", "NullMultimodalTokenizer"):
        found: int | None = args.vocab_size
        return found
    try:
        text = Path(args.vocab_file or "").read_text(encoding="utf-8")
        if tokenizer.startswith("BertWordPiece"):
            # [BOS] and [EOS] are added.
            return len(text.splitlines()) + 2 + int(args.vocab_extra_ids)
        return len(json.loads(text)) if tokenizer == "GPT2BPETokenizer" else None
    except (OSError, ValueError):
        return None

"""Checks a completed run before anything slow starts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from tempo_megatron.cluster.versions import find_version
from tempo_megatron.extras import is_installed
from tempo_megatron.models.layout import Layout, check_layout
from tempo_megatron.training.run.deepspeed_config import (
    check_with_deepspeed,
    offloads_optimizer,
    read_offload_device,
    read_zero_stage,
)
from tempo_megatron.training.run.option import name_argument
from tempo_megatron.training.run.run_config import OPTIONS, RunConfig
from tempo_megatron.words.argument_types import format_bytes

# From here on hooks of DeepSpeed's optimizers add up the gradients of micro batches that its engine does not see.
_DEEPSPEED_OF_PIPELINE = (0, 19)
# The package that DeepSpeed imports if the block of that name is enabled.
_OF_MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
_SHORTEST_SAMPLE = 5  # [CLS], a token, [SEP], a token and [SEP]
_SHORTEST_DECODER = 3


def check_run(run: RunConfig) -> None:
    """Raises ValueError for the first combination that cannot train."""
    tp = run.tensor_model_parallel_size
    check_layout(run.model, Layout(tp=tp, sp=run.sequence_parallel, etp=tp))
    for refuse in (
        *(_refuse_parts, _refuse_pipeline, _refuse_batch_ramp, _refuse_precision, _refuse_what_lacks_another),
        *(_refuse_schedule, _refuse_recompute, _refuse_data, _refuse_masking, _refuse_output, _refuse_packages),
    ):
        for sentence in refuse(run):
            raise ValueError(sentence)
    check_with_deepspeed(run.deepspeed_config, run.deepspeed)


def check_weights_fit(run: RunConfig, node_bytes: int, node_ranks: int) -> None:
    """Raises ValueError if the weights alone do not fit: building a model of a mistyped size could take for ever.

    This node has `node_bytes` of memory, GPUs included, and `node_ranks` processes of the run.
    """
    if read_offload_device(run.deepspeed, "offload_param") == "nvme":
        return
    model = run.model
    attention = 2 * model.kv_channels * (model.num_attention_heads + model.num_query_groups)
    mixed = 0 if model.num_experts is None else sum(model.layers_with_experts)
    products = 3 if model.is_gated else 2
    mlp = products * ((model.num_layers - mixed) * model.ffn_hidden_size)
    mlp += products * mixed * (model.num_experts or 0) * model.expert_size
    elements = model.hidden_size * (model.num_layers * attention + mlp)
    shares = run.tensor_model_parallel_size * run.pipeline_model_parallel_size
    if read_zero_stage(run.deepspeed) == 3:
        shares *= run.data_parallel_size
    needed = elements * (4 if run.precision == "fp32" else 2) * node_ranks // shares
    if needed > node_bytes:
        raise ValueError(
            f"the linears of {model.num_layers} layers of hidden size {model.hidden_size} have {elements:,} weights, "
            f"of which this node would hold {format_bytes(needed)}, and it has {format_bytes(node_bytes)} of memory, "
            "GPUs included; check --num-layers and --hidden-size, or divide the model further"
        )


def _refuse_parts(run: RunConfig) -> Iterator[str]:
    model, tp = run.model, run.tensor_model_parallel_size
    what = "latent attention" if model.num_experts is None else "experts"
    if run.memory_budget is not None and (model.num_experts is not None or model.multi_latent_attention):
        yield f"a memory budget is given, and the planner does not know {what}; leave the budget out"
    if model.num_experts is None:
        return
    if tp > 1 and not run.sequence_parallel:
        yield (
            f"--tensor-model-parallel-size is {tp} and the model has experts, which Megatron trains with "
            "--sequence-parallel only; add it"
        )
    stages = run.pipeline_model_parallel_size
    refused = (
        (stages > 1, f"--pipeline-model-parallel-size {stages}, and the trainer has experts in one stage only"),
        (model.moe_expert_capacity_factor is not None, "--moe-expert-capacity-factor, which the trainer does not know"),
        (
            model.moe_router_enable_expert_bias,
            "--moe-router-enable-expert-bias, a buffer that the trainer neither updates nor brings to another layout",
        ),
        (
            model.add_bias_linear,
            "biases of linears (without --disable-bias-linear), which Megatron-core's SequentialMLP adds in place "
            "where autograd forbids it",
        ),
    )
    for given, what in refused:
        if given:
            yield f"the model has experts with {what}; remove it, or train with Megatron-LM (tempo-megatron run)"


def _refuse_pipeline(run: RunConfig) -> Iterator[str]:
    stages, per_chunk = run.pipeline_model_parallel_size, run.num_layers_per_virtual_pipeline_stage
    option, num_layers = f"--pipeline-model-parallel-size {stages}", run.model.num_layers
    layout = run.pipeline_model_parallel_layout
    cuts = {"--num-layers-per-virtual-pipeline-stage": per_chunk, "--pipeline-model-parallel-layout": layout}
    given = [f"{name} {value}" for name, value in cuts.items() if value is not None]
    if stages == 1:
        if given:
            yield f"{given[0]} needs --pipeline-model-parallel-size of at least 2; remove it or raise that"
        return
    if run.model.family == "t5":
        yield (
            f"{option} is given, but encoder and decoder of Megatron's T5 stand in one process; leave it out, and "
            "divide the model by --tensor-model-parallel-size or ZeRO"
        )
    if len(given) > 1:
        yield f"{' and '.join(given)} are both given; leave one of them out"
    if layout is not None:
        # A stage without layers would have no norm, and DeepSpeed one parameter group fewer.
        for stage in range(stages):
            if not sum((run.layers_of_chunks or ())[stage::stages]):
                yield f"--pipeline-model-parallel-layout {layout} gives stage {stage} no layer; give it at least one t"
    elif num_layers % stages:
        yield f"--num-layers {num_layers} is not a multiple of {option}; change one of them"
    if per_chunk is not None and (per_chunk == num_layers // stages or num_layers // stages % per_chunk):
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} does not divide the {num_layers // stages} layers of "
            "a pipeline stage into at least 2 chunks; change it or remove it"
        )
    if run.num_chunks > 1 and run.num_micro_batches % stages:
        yield (
            f"a step has {run.num_micro_batches} micro batches, which are not a multiple of {option}, as interleaving "
            f"needs; change --global-batch-size, or remove {given[0]}"
        )
    if given and run.memory_budget is not None:
        yield f"a memory budget is given with {given[0]}, whose chunks the planner does not know; remove one of them"
    yield from _refuse_deepspeed_of_pipeline(run, option)


def _refuse_deepspeed_of_pipeline(run: RunConfig, option: str) -> Iterator[str]:
    config = run.deepspeed
    stage = read_zero_stage(config)
    unseen = "but DeepSpeed sees no micro batch of a pipeline that it could measure; remove it"
    refused = (
        (
            stage > 1,
            f"ZeRO {stage}, which reduces gradients in each of the backward passes that a pipeline has under way at "
            "once; set zero_optimization.stage to 0 or 1",
        ),
        (
            stage == 1 and config["zero_optimization"].get("overlap_comm"),
            '"zero_optimization.overlap_comm", but the gradients of a pipeline are reduced after its last backward '
            "pass; remove it or set it to false",
        ),
        (
            config.get("bf16", {}).get("immediate_grad_update") is False,
            '"bf16.immediate_grad_update" false, which would add up micro batches in bf16; remove it or set it to true',
        ),
        (config.get("flops_profiler", {}).get("enabled"), f'"flops_profiler", {unseen}'),
        (config.get("wall_clock_breakdown"), f'"wall_clock_breakdown", {unseen}'),
    )
    for is_on, what in refused:
        if is_on:
            yield f"{option} is given with {what}"
    version = find_version("deepspeed") or "0"
    if tuple(map(int, version.split(".")[:2])) < _DEEPSPEED_OF_PIPELINE:
        wanted = ".".join(map(str, _DEEPSPEED_OF_PIPELINE))
        yield (
            f"{option} needs DeepSpeed {wanted}, and {version} is installed, whose optimizers add up gradients "
            f"elsewhere; pip install 'deepspeed>={wanted}'"
        )


def _refuse_batch_ramp(run: RunConfig) -> Iterator[str]:
    if run.rampup_batch_size is None:
        return
    start, increment, _ = run.rampup_batch_size
    option, full = f"--rampup-batch-size {' '.join(map(str, run.rampup_batch_size))}", run.global_batch_size
    if start >= full:
        yield f"{option} begins with {start} samples, which are not below --global-batch-size {full}; lower it"
    if (full - start) % increment:
        yield (
            f"{option}: the {full - start} samples from {start} to --global-batch-size {full} are not a multiple of "
            f"the increment {increment}; change one of them"
        )
    per_round = run.micro_batch_size * run.data_parallel_size
    product = f"micro batch size {run.micro_batch_size} x data parallel size {run.data_parallel_size}"
    if run.num_chunks > 1:
        per_round *= run.pipeline_model_parallel_size
        product += f" x {run.pipeline_model_parallel_size} stages that interleave"
    for name, size in (("first size", start), ("increment", increment)):
        if size % per_round:
            yield f"{option}: the {name} {size} is not a multiple of {per_round} = {product}; change it"


def _refuse_precision(run: RunConfig) -> Iterator[str]:
    config = run.deepspeed
    if run.precision == "fp16" and not run.on_gpu:
        yield "the precision is fp16, but there is no GPU, and DeepSpeed has no fp16 on a CPU; use bf16 or fp32"
    stage = read_zero_stage(config)
    if stage not in (0, 1, 2, 3):
        yield f"zero_optimization.stage in the DeepSpeed JSON is {stage}; expected 0, 1, 2 or 3"
    if stage == 0 and run.precision != "fp32":
        yield (
            f"the precision is {run.precision} without ZeRO, but DeepSpeed's optimizer for that takes an extra step at "
            "the start and clips by the norm of one tensor-parallel rank; set zero_optimization.stage to 1, 2 or 3"
        )
    accumulated = config.get("data_types", {}).get("grad_accum_dtype")
    if stage == 0 and accumulated not in (None, "fp32"):
        yield (
            f'"data_types.grad_accum_dtype" in the DeepSpeed JSON is {accumulated!r}, but without ZeRO gradients are '
            "fp32; remove it"
        )
    if offloads_optimizer(config) and stage == 0:
        yield "zero_optimization.offload_optimizer needs ZeRO; set zero_optimization.stage to 1, 2 or 3"
    if stage < 3 and read_offload_device(config, "offload_param") != "none":
        yield (
            f"zero_optimization.offload_param needs partitioned parameters, but zero_optimization.stage is {stage}, "
            "where DeepSpeed ignores it; set the stage to 3 or remove it"
        )


def _refuse_what_lacks_another(run: RunConfig) -> Iterator[str]:
    for name, option in OPTIONS.items():
        field, _, value = option.needs.partition("=")
        if not (field and getattr(run, name)):
            continue
        found, argument, needed = getattr(run, field), name_argument(name), name_argument(field)
        if value and found != value:
            yield f"{argument} is given, but {needed} is {found or 'none'}; add {needed} {value}, or remove {argument}"
        elif not found:
            others = " or --save" if OPTIONS[field].in_save else ""
            yield f"{argument} is given without {needed}; give {needed}{others} too, or remove it"


def _refuse_schedule(run: RunConfig) -> Iterator[str]:
    if run.min_lr > run.lr:
        yield f"--min-lr {run.min_lr} is above --lr {run.lr}; lower it"
    if run.lr_warmup_iters >= run.lr_decay_iters:
        yield (
            f"--lr-warmup-iters {run.lr_warmup_iters} is not below the {run.lr_decay_iters} steps of decay "
            "(--lr-decay-iters, else --train-iters); shorten the warm-up"
        )
    rest, decay = run.lr_decay_iters - run.lr_warmup_iters, run.lr_wsd_decay_iters
    if run.lr_decay_style == "WSD" and decay is None:
        yield "--lr-decay-style WSD is given without --lr-wsd-decay-iters; give the steps of its decay"
    if decay is not None and decay > rest:
        yield f"--lr-wsd-decay-iters {decay} is more than the {rest} steps that follow the warm-up; lower it"


def _refuse_recompute(run: RunConfig) -> Iterator[str]:
    if run.recompute_granularity == "full" and run.recompute_method is None:
        yield "--recompute-granularity full needs --recompute-method; give uniform or block"
    stages = run.pipeline_model_parallel_size
    num_layers = max(run.layers_of_chunks or (run.model.num_layers // (stages * run.num_chunks),))
    if run.recompute_num_layers is not None and run.recompute_num_layers > num_layers:
        where = "the model's" if stages == 1 else "a pipeline stage's" if run.num_chunks == 1 else "a chunk's"
        yield f"--recompute-num-layers {run.recompute_num_layers} is more than {where} {num_layers} layers; lower it"


def _refuse_data(run: RunConfig) -> Iterator[str]:
    if run.eval_iters and not run.split_weights[1]:
        yield f"--split {run.split} leaves nothing for validation; add --eval-iters 0 or change the split"
    if run.test_iters and not run.split_weights[2]:
        yield f"--split {run.split} leaves nothing for --test-iters; change the split or leave that out"
    has_merges = run.model.family == "gpt" or bool(run.merge_file)  # WordPiece has none
    if bool(run.vocab_file) != bool(run.merge_file) and has_merges:
        given, missing = ("vocab", "merge") if run.vocab_file else ("merge", "vocab")
        yield f"--{given}-file is given without --{missing}-file; give both or none"


def _refuse_masking(run: RunConfig) -> Iterator[str]:
    """Names values at which Megatron's masked dataset of a BERT or a T5 fails."""
    masking, shape, seq_length = run.masking, run.model, run.model.seq_length
    if masking is None:
        return
    if shape.decoder_seq_length is not None and shape.decoder_seq_length < _SHORTEST_DECODER:
        yield (
            f"--decoder-seq-length {shape.decoder_seq_length} has no room for [BOS], a sentinel and a token; expected "
            f"at least {_SHORTEST_DECODER}"
        )
    if seq_length < _SHORTEST_SAMPLE:
        yield (
            f"--seq-length {seq_length} has no room for two segments and what is around them; expected at least "
            f"{_SHORTEST_SAMPLE}"
        )
    tokens = seq_length - 3  # Megatron leaves room for three special tokens even in a sample of one segment
    if masking.mask_prob * tokens < 1:
        # Megatron masks no word of more tokens than this product, and so none at all.
        shortest = math.ceil(1 / masking.mask_prob) + 3
        yield (
            f"--mask-prob {masking.mask_prob:g} of the {tokens} tokens that --seq-length {seq_length} has besides "
            f"[CLS] and [SEP] is less than one token, so nothing would be predicted; expected --mask-prob of at least "
            f"{math.ceil(1e4 / tokens) / 1e4:g}, or --seq-length of at least {shortest}"
        )


def _refuse_output(run: RunConfig) -> Iterator[str]:
    if run.eval_only and run.save:
        yield "--eval-only writes no checkpoint; leave out --save, and give --metrics-file for the losses"
    if run.eval_only and not run.eval_iters and not run.test_iters:
        yield "--eval-only is given with 0 batches to evaluate; raise --eval-iters or --test-iters"
    if run.metrics_file:
        check_metrics_file(run.metrics_file)
    if run.profile is None:
        return
    if run.eval_only:
        yield "--profile records steps of training, of which --eval-only takes none; remove one of them"
    if run.profile[0] > run.train_iters:
        yield f"--profile begins at step {run.profile[0]}, beyond --train-iters {run.train_iters}; lower it"
    if absent := [rank for rank in run.profile_ranks if rank >= run.world_size]:
        yield f"--profile-ranks {absent[0]} is not one of the {run.world_size} ranks, which begin at 0"


def _refuse_packages(run: RunConfig) -> Iterator[str]:
    """Names a package that is missing and would be imported late: by the engine, or at the run's end."""
    asked = {
        f'"{block}" in the DeepSpeed JSON': package
        for block, package in _OF_MONITORS.items()
        if run.deepspeed.get(block, {}).get("enabled")
    }
    if run.loss_plot:
        asked[f"the loss curve {run.loss_plot}"] = "matplotlib"
    for what, package in asked.items():
        if not is_installed(package):
            yield f"{what} needs {package}, which is not installed; pip install {package}"


def check_metrics_file(path: str) -> None:
    """Raises ValueError if `path` holds anything but metrics, which a run must not overwrite."""
    try:
        with open(path, encoding="utf-8") as stream:
            first = stream.readline(1 << 20)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--metrics-file {path} is not a file of metrics ({error}); give another name") from error
    try:
        is_metrics = not first or json.loads(first)["kind"] in ("run", "train", "validation", "test")
    except (ValueError, TypeError, KeyError):
        is_metrics = False
    if not is_metrics:
        raise ValueError(f"--metrics-file {path} exists and does not hold metrics of a run; give another name")

"""The plan command: its arguments, its table and its files."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tempo_megatron.argument_types import parse_fraction, parse_positive
from tempo_megatron.config import TempoConfig
from tempo_megatron.data.tokenizer import pad_vocab_size
from tempo_megatron.extras import check_installed
from tempo_megatron.memory.estimate import RankLayout
from tempo_megatron.memory.formula import LayerShape
from tempo_megatron.memory.gpu import Gpu, parse_size, read_gpu, write_size
from tempo_megatron.memory.ledger_command import format_layout
from tempo_megatron.memory.model_states import OptimizerSettings
from tempo_megatron.memory.plan import CountFixedBytes, Plan, PlanRequest, StagePlan, make_plan
from tempo_megatron.memory.plan_fixed import EstimatedFixedBytes
from tempo_megatron.models.build import DTYPES, build_transformer_config
from tempo_megatron.models.checks import check_layout
from tempo_megatron.models.shape import ModelShape, make_shape, read_shape_file
from tempo_megatron.operations import CHOICES
from tempo_megatron.slots.refusals import find_refusal

_RECOMPUTE = ("core_attn", "mlp", "full")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tempo-megatron plan`."""
    parser.add_argument("--model", required=True, metavar="JSON", help="a model, such as configs/model/gpt3_175b.json")
    parser.add_argument(
        "--gpu", required=True, help="a100, b200, h100, h200, rtx4090, or a file such as configs/gpu/h100.json"
    )
    parser.add_argument(
        "--gpu-memory",
        type=parse_size,
        required=True,
        metavar="SIZE",
        help="what a GPU may hold, such as 76GiB: its memory less what CUDA and NCCL take, and what fragments",
    )
    parser.add_argument(
        "--fixed-memory",
        type=parse_size,
        nargs="+",
        metavar="SIZE",
        help="of it, what each GPU holds whatever its layers keep: weights, gradients, optimizer states, buffers, "
        "embedding and head; one size, or one for each pipeline stage (default: estimated)",
    )
    parser.add_argument(
        "--deepspeed_config",
        metavar="JSON",
        help="estimate what DeepSpeed holds with this file (default: what Megatron's distributed optimizer does)",
    )
    parser.add_argument("--tp", type=parse_positive, default=1, metavar="N", help="tensor parallel size (default 1)")
    parser.add_argument("--pp", type=parse_positive, default=1, metavar="N", help="pipeline stages (default 1)")
    parser.add_argument("--dp", type=parse_positive, default=1, metavar="N", help="data parallel size (default 1)")
    parser.add_argument("--sequence-parallel", action="store_true", help="shard norms and dropout over tokens as well")
    parser.add_argument("--micro-batch-size", type=parse_positive, default=1, metavar="B", help="samples (default 1)")
    parser.add_argument(
        "--num-micro-batches", type=parse_positive, metavar="M", help="of a step (default as many as fill the pipeline)"
    )
    parser.add_argument(
        "--seq-length", type=parse_positive, metavar="S", help="tokens per sample (default the model's)"
    )
    parser.add_argument(
        "--vocab-size", type=parse_positive, metavar="V", help="tokens (default the model's, else 50257)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default %(default)s")
    parser.add_argument(
        "--dropout", type=parse_fraction, metavar="P", help="hidden and attention (default the model's)"
    )
    parser.add_argument(
        "--stock",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="whose modules stock ones are: Transformer Engine's (default), or Megatron's own with unfused attention",
    )
    parser.add_argument(
        "--stock-attention",
        choices=("fused", "flash"),
        default="fused",
        help="Transformer Engine's attention: cuDNN's (default) or FlashAttention 2, which keeps its output twice",
    )
    parser.add_argument(
        "--recompute-allowed",
        nargs="*",
        choices=_RECOMPUTE,
        default=list(_RECOMPUTE),
        metavar="WHAT",
        help="what Megatron may recompute: any of core_attn, mlp and full, or nothing (default all of them)",
    )
    parser.add_argument("--json", metavar="FILE", help='write the "tempo" block, the arguments and the figures to FILE')
    parser.add_argument("--plot", metavar="PNG", help="draw the best step time of every budget, and single switches")


def run_plan(args: argparse.Namespace) -> int:
    """Make the plan and print it. Raises ValueError where nothing fits, or the planner does not know the model."""
    gpu = read_gpu(args.gpu)
    if args.plot:
        check_installed("--plot", "train", "matplotlib")
    request = make_request(read_model(args), gpu, args)
    plan = make_plan(request, args.gpu_memory)
    print(f"{Path(args.model).stem}, {args.dtype}, s {request.shape.seq_length}, b {args.micro_batch_size}, ", end="")
    print(f"{format_layout(args.tp, args.sequence_parallel)}, PP {args.pp}, {write_size(args.gpu_memory)} a GPU")
    print(f"{gpu.title}: {'measured' if gpu.calibrated else 'data-sheet (uncalibrated)'} rates\n")
    print(format_plan(request, plan))
    print(f"\n{json.dumps({'tempo': plan.block})}")
    print(" ".join(plan.megatron_arguments) or "without --recompute-granularity")
    if args.json:
        figures = {
            "tempo": plan.block,
            "megatron_arguments": plan.megatron_arguments,
            "stages": [_list_figures(stage) for stage in plan.stages],
            "gpu": dataclasses.asdict(gpu),
            "arguments": vars(args),
        }
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        from tempo_megatron.memory.plan_plot import plot_plan

        plot_plan(request, plan, args.gpu_memory, args.plot, f"{Path(args.model).stem} on {gpu.title}")
    return 0


def read_model(args: argparse.Namespace) -> ModelShape:
    """The model of the arguments.

    Raises ValueError where it is none, does not lie on the GPUs so, or has what the bytes of a layer are not known of.
    """
    values = read_shape_file(args.model)
    values.setdefault("vocab_size", 50257)
    given = {
        "seq_length": args.seq_length,
        "vocab_size": args.vocab_size,
        "attention_dropout": args.dropout,
        "hidden_dropout": args.dropout,
    }
    shape = make_shape(**{**values, **{name: value for name, value in given.items() if value is not None}})
    check_layout(shape, args.tp, args.sequence_parallel, option="--tp")
    if shape.family == "t5":
        raise ValueError(
            f"--model {args.model} is a T5, whose two stacks the planner does not divide; give a GPT or BERT"
        )
    if shape.qk_layernorm:
        raise ValueError(f"--model {args.model} has qk_layernorm, whose kept bytes have no formula; turn it off")
    return shape


def make_request(shape: ModelShape, gpu: Gpu, args: argparse.Namespace) -> PlanRequest:
    """What the planner is asked. Raises ValueError where the layout does not go with the model."""
    dtype = DTYPES[args.dtype]
    config = build_transformer_config(shape, dtype=dtype)
    values = {
        name: tuple(
            value
            # Stock first: of two that cost and keep the same it stays.
            for value in sorted(choices, key=lambda value: value != "off")
            if value != "auto" and find_refusal(name, value, config) is None
        )
        for name, choices in CHOICES.items()
    }
    layer = LayerShape(
        seq_length=shape.seq_length,
        micro_batch_size=args.micro_batch_size,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        dtype=dtype,
        tensor_parallel=args.tp,
        sequence_parallel=args.sequence_parallel,
        hidden_dropout=shape.hidden_dropout,
        attention_dropout=shape.attention_dropout,
        activation=shape.activation,
        normalization=shape.normalization,
        rotary=shape.position_embedding_type == "rope",
    )
    if args.fixed_memory:
        count_fixed_bytes = read_fixed_bytes(args.fixed_memory, args.pp)
    else:
        count_fixed_bytes = estimate_fixed_bytes(shape, layer, values, args)
    assert shape.vocab_size is not None
    vocab_size = pad_vocab_size(shape.vocab_size, shape.make_vocab_size_divisible_by, args.tp)
    return PlanRequest(
        shape=layer,
        num_layers=shape.num_layers,
        pipeline_parallel=args.pp,
        num_microbatches=args.num_micro_batches,
        gpu=gpu,
        count_fixed_bytes=count_fixed_bytes,
        values=values,
        recompute=frozenset(args.recompute_allowed),
        is_causal=shape.family == "gpt",
        stock=args.stock,
        stock_attention=args.stock_attention,
        head_flops=2 * shape.seq_length * args.micro_batch_size * shape.hidden_size * vocab_size // args.tp,
    )


def read_fixed_bytes(sizes: Sequence[int], pipeline_parallel: int) -> CountFixedBytes:
    """What --fixed-memory says. Raises ValueError unless there is one size, or one for each stage."""
    if len(sizes) not in (1, pipeline_parallel):
        raise ValueError(
            f"--fixed-memory has {len(sizes)} sizes; expected one, or one for each of --pp {pipeline_parallel}"
        )

    def count_fixed_bytes(stage: int, loss: str, recompute: frozenset[str]) -> int:
        return sizes[stage if len(sizes) > 1 else 0]

    return count_fixed_bytes


def estimate_fixed_bytes(
    shape: ModelShape, layer: LayerShape, values: Mapping[str, Sequence[str]], args: argparse.Namespace
) -> CountFixedBytes:
    """What the estimate of a step says. Raises ValueError where the model cannot lie so."""
    optimizer = OptimizerSettings()
    if args.deepspeed_config:
        optimizer = OptimizerSettings.from_deepspeed(
            json.loads(Path(args.deepspeed_config).read_text(encoding="utf-8"))
        )
    layout = RankLayout(
        tensor_parallel=args.tp,
        pipeline_parallel=args.pp,
        data_parallel=args.dp,
        sequence_parallel=args.sequence_parallel,
        micro_batch_size=args.micro_batch_size,
        num_micro_batches=args.num_micro_batches,
        dtype=layer.dtype,
    )
    return EstimatedFixedBytes(shape, layout, layer, values, optimizer)


def format_plan(request: PlanRequest, plan: Plan) -> str:
    """A line per stage, then what its layers have."""
    lines = [
        f"{'stage':>5}{'layers':>10}{'in flight':>11}{'peak':>12}{'kept/micro batch':>18}"
        f"{'recomputed':>14}{'added ms':>11}{'ms':>10}"
    ]
    lines.append("-" * len(lines[0]))
    for index, stage in enumerate(plan.stages):
        flops = f"{stage.recomputed_flops / 1e12:.3f} TFLOP"
        lines.append(
            f"{index:>5}{f'{stage.layers[0]}-{stage.layers[-1]}':>10}{stage.in_flight:>11}"
            f"{write_size(stage.peak_bytes):>12}{write_size(stage.kept_bytes):>18}{flops:>14}"
            f"{stage.added_seconds * 1e3:>11.3f}{stage.seconds * 1e3:>10.3f}"
        )
    stages, added = request.pipeline_parallel, max(stage.added_seconds for stage in plan.stages)
    num_microbatches = request.num_microbatches or stages
    step = plan.seconds * (num_microbatches + stages - 1)
    lines.append(
        f"ms of one micro batch, forward and backward; the slowest stage has {plan.seconds * 1e3:.3f} "
        f"({added * 1e3:.3f} at most added), a step of {num_microbatches} {step * 1e3:.3f}"
    )
    lines.append(TempoConfig.from_dict(plan.block).describe())
    return "\n".join(lines)


def _list_figures(stage: StagePlan) -> dict[str, Any]:
    return {
        "layers": [stage.layers[0], stage.layers[-1]],
        "in_flight": stage.in_flight,
        "peak_bytes": stage.peak_bytes,
        "kept_bytes": stage.kept_bytes,
        "recomputed_flops": stage.recomputed_flops,
        "seconds": stage.seconds,
        "added_seconds": stage.added_seconds,
    }

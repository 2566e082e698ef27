"""Declares the arguments of `tempo-megatron ledger`, `estimate`, `plan`, `order` and `flops`.

They stand apart from the commands, which import torch and Megatron: help and a slip of the pen take no seconds.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from tempo_megatron.memory.plan.gpu import DTYPES, read_gpu
from tempo_megatron.models.shape_file import describe_unreadable
from tempo_megatron.settings.arguments import add_tempo_arguments
from tempo_megatron.words.argument_types import (
    parse_fraction,
    parse_memory,
    parse_output,
    parse_png,
    parse_positive,
    parse_positive_float,
)

_RECOMPUTE = ("core_attn", "mlp", "full")
_OF_PARTS = ("layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")
_RECOMPUTE_ALLOWED = ("core_attn", "mlp", "moe", "mla_up_proj", "full")
_GPUS = "a100, b200, gb200, gh200, h100, h200, rtx4090, or a file such as configs/gpu/h100.json"


def check_files(args: argparse.Namespace) -> None:
    """Raises ValueError if there is no file of that name, or no such GPU, which takes no import of torch to say."""
    for option in ("--model", "--hf", "--deepspeed_config", "--script", "--megatron-yaml", "--kept-bytes"):
        path = getattr(args, option[2:].replace("-", "_"), None)
        is_model = option in ("--model", "--hf")
        # With a command it is said that a model has no place there.
        if path is not None and not (is_model and args.words):
            try:
                os.stat(path)
            except OSError as error:
                unreadable = f"{option} {path} cannot be read ({error.strerror}); correct the path"
                raise ValueError(describe_unreadable(option, path, error) if is_model else unreadable) from error
    if getattr(args, "gpu", None) is not None:
        read_gpu(args.gpu)


def add_ledger_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tempo-megatron ledger`."""
    _add_model(parser, "configs/model/gpt2_124m.json")
    _add_sizes(parser, tp="tensor")
    _add_sequence_parallel(parser)
    _add_shape(parser)
    _add_dropout(parser)
    parser.add_argument("--deepspeed_config", metavar="JSON", help='take the "tempo" block of this file')
    _add_stock(parser, ("transformer_engine", "local", "cpu"), ("fused", "flash", "unfused"))
    _add_outputs(parser, plot="stacked bars, stock beside Tempo,")
    parser.add_argument(
        "--timeline",
        metavar="PNG",
        type=parse_png,
        help="also follow forward and backward of all layers with Tempo, say what stands at the peak, and draw it",
    )
    parser.add_argument(
        "--trace",
        metavar="JSON",
        type=parse_output,
        help="write what is followed as a Chrome trace, for ui.perfetto.dev",
    )
    parser.add_argument(
        "--snapshot",
        metavar="PICKLE",
        type=parse_output,
        help="write what is followed as a memory snapshot of torch, for pytorch.org/memory_viz",
    )
    add_tempo_arguments(parser)


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tempo-megatron estimate`."""
    _add_run(parser)
    _add_estimate_layout(parser.add_argument_group("layout"))
    _add_estimate_step(parser.add_argument_group("training step"))
    group = parser.add_argument_group("output")
    group.add_argument(
        "--gpu",
        help=f"{_GPUS}: count the workspaces that cuBLAS has on it, and take the attention that Transformer Engine "
        "takes, those of an A100, an H100 or a GB200 by its compute capability (default: h100 for a command of "
        "Megatron-LM, else none)",
    )
    group.add_argument(
        "--allocator",
        action="store_true",
        help="also simulate torch's CUDA caching allocator: what it rounds up to, and reserves",
    )
    group.add_argument("--gpu-memory", type=parse_memory, metavar="SIZE", help="say whether it fits, such as 80GiB")
    _add_imbalance(group)
    group.add_argument("--all-ranks", action="store_true", help="a column for every pipeline stage")
    group.add_argument(
        "--tree",
        action="store_true",
        help="also say what one micro batch keeps for backward, layer by layer and module by module, on the stage that "
        "needs most, or with --all-ranks on each; --json has it of all",
    )
    group.add_argument(
        "--kept-bytes",
        metavar="JSON",
        help="say which stand-ins for Transformer Engine's modules are stale, by what bench --kept-bytes measured",
    )
    _add_outputs(group, plot="stacked bars, stock beside Tempo,")
    add_tempo_arguments(parser)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tempo-megatron plan`."""
    _add_run(parser)
    parser.add_argument("--gpu", help=f"{_GPUS} (default: this machine's where it is one of these, else h100)")
    parser.add_argument(
        "--gpu-memory",
        type=parse_memory,
        required=True,
        metavar="SIZE",
        help="what a GPU may hold, such as 76GiB: its memory less what CUDA and NCCL take, and what fragments",
    )
    parser.add_argument(
        "--margin",
        type=_parse_margin,
        default=3.0,
        metavar="PERCENT",
        help="of --gpu-memory, what a plan leaves free, as an estimate may err (default 3)",
    )
    parser.add_argument(
        "--allocator",
        action="store_true",
        help="let what torch's CUDA caching allocator reserves fit, by a simulation, not the tensors alone",
    )
    parser.add_argument(
        "--fixed-memory",
        type=parse_memory,
        nargs="+",
        metavar="SIZE",
        help="of it, what each GPU holds whatever its layers keep: weights, gradients, optimizer states, buffers, "
        "embedding and head; one size, or one for each pipeline stage (default: estimated)",
    )
    parser.add_argument(
        "--deepspeed_config",
        metavar="JSON",
        help="estimate what DeepSpeed holds with this file, which also says the precision and, where they are numbers, "
        "the batch sizes (default: what Megatron's distributed optimizer holds)",
    )
    _add_sizes(parser, tp="tensor", pp="pipeline", dp="data", cp="context")
    _add_expert_parallel(parser)
    _add_sequence_parallel(parser)
    _add_plan_batch(parser)
    _add_stock(parser, ("transformer_engine", "local"), ("fused", "flash", "unfused"))
    parser.add_argument(
        "--recompute-allowed",
        nargs="*",
        choices=_RECOMPUTE_ALLOWED,
        default=list(_RECOMPUTE_ALLOWED),
        metavar="WHAT",
        help="what Megatron may recompute: any of core_attn, mlp, moe, mla_up_proj and full, or nothing (default all)",
    )
    parser.add_argument(
        "--host-memory",
        type=parse_memory,
        metavar="SIZE",
        help="what a node's memory has for activations, such as 1TiB: layers may send there what the link to it takes "
        "while the next layer runs (default: none does)",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=parse_positive,
        metavar="N",
        help="GPUs that share --host-memory (default 8, or all of the run where it has fewer)",
    )
    _add_imbalance(parser)
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=parse_output,
        help='write the "tempo" block, the arguments and the figures to FILE',
    )
    parser.add_argument(
        "--plot", metavar="PNG", type=parse_png, help="draw the best step time of every budget, and single switches"
    )
    _add_html(parser)
    parser.set_defaults(recompute=[])


def add_flops_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tempo-megatron flops`."""
    _add_model(parser)
    _add_shape(parser)
    parser.add_argument(
        "--global-batch-size",
        type=parse_positive,
        metavar="B",
        help="samples of a step, over all GPUs (default --micro-batch-size)",
    )
    parser.add_argument(
        "--tp", type=parse_positive, default=1, metavar="N", help="tensor parallel size, which pads the vocabulary"
    )
    parser.add_argument("--gpus", type=parse_positive, default=1, metavar="N", help="of the whole run (default 1)")
    parser.add_argument(
        "--step-seconds", type=parse_positive_float, metavar="T", help="time of a step, for MFU and HFU (with --gpu)"
    )
    parser.add_argument("--gpu", help=_GPUS)
    parser.add_argument("--json", metavar="FILE", type=parse_output, help="write the figures to FILE too")
    parser.set_defaults(dropout=None)


def add_order_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tempo-megatron order`."""
    _add_model(parser, "configs/model/gpt2_tiny.json")
    _add_shape(parser)
    _add_dropout(parser)
    parser.add_argument("--optimizer", choices=("adam", "adamw", "sgd"), default="adam", help="default %(default)s")
    parser.add_argument("--deepspeed_config", metavar="JSON", help='take the "tempo" block of this file')
    parser.add_argument(
        "--work-limit",
        type=parse_positive,
        default=100_000,
        metavar="N",
        help="operations that the exact search looks at in each part of the graph (default %(default)s)",
    )
    parser.add_argument("--no-layout", action="store_true", help="order only; no addresses in one arena")
    parser.add_argument(
        "--json", metavar="FILE", type=parse_output, help="also write the figures and the order to FILE"
    )
    parser.add_argument(
        "--plot", metavar="PNG", type=parse_png, help="also draw the memory of each operation, before and after"
    )
    _add_html(parser)
    add_tempo_arguments(parser)


_HF = "the folder or config.json of a Hugging Face model"


def _add_model(parser: Any, example: str = "configs/model/gpt3_175b.json") -> None:
    parser.add_argument("--model", required=True, metavar="JSON", help=f"a model, such as {example}, or {_HF}")


def _add_run(parser: argparse.ArgumentParser) -> None:
    """What is trained: a model with the arguments below, or a command of Megatron-LM."""
    parser.usage = (
        "%(prog)s --model JSON ...\n       %(prog)s --world-size N [...] -- [torchrun ...] pretrain_gpt.py ARGS..."
        "\n       %(prog)s --script FILE [--world-size N] [...] -- ARGS..."
    )
    group = parser.add_argument_group("what is trained")
    group.add_argument(
        "--model",
        metavar="JSON",
        help=f"a model, such as configs/model/gpt3_175b.json, or {_HF}",
    )
    group.add_argument(
        "--hf",
        metavar="FOLDER",
        help="take the sizes of a Hugging Face model: its folder or config.json (gpt2, llama, mistral, mixtral, "
        "qwen2, qwen3, qwen3_moe, megatron-bert)",
    )
    group.add_argument(
        "--world-size",
        type=parse_positive,
        metavar="N",
        help="GPUs of the command of Megatron-LM that stands behind --, where its launcher does not say it",
    )
    group.add_argument(
        "--script",
        metavar="FILE",
        help="take the command that a shell script would start; its own arguments stand behind --. bash reads it, and "
        "starts nothing. --world-size goes before what its launcher says",
    )
    group.add_argument(
        "--megatron-yaml",
        metavar="FILE",
        help="take the arguments of a model_config.yaml of Megatron-LM's functional tests",
    )


def _add_sizes(parser: Any, **names: str) -> None:
    """Sizes of parallel groups: --tp, tensor parallel size."""
    for option, what in names.items():
        parser.add_argument(
            f"--{option}", type=parse_positive, default=1, metavar="N", help=f"{what} parallel size (default 1)"
        )


def _add_sequence_parallel(parser: Any) -> None:
    parser.add_argument("--sequence-parallel", action="store_true", help="shard norms and dropout over tokens as well")


def _add_expert_parallel(parser: Any) -> None:
    parser.add_argument(
        "--ep",
        type=parse_positive,
        metavar="N",
        help="expert parallel size: ranks of --tp and --dp that share the experts (default 1)",
    )


def _parse_margin(text: str) -> float:
    margin = float(text)
    if not 0 <= margin < 100:
        raise argparse.ArgumentTypeError(f"{text} is not a percentage from 0 to under 100")
    return margin


def _add_imbalance(parser: Any) -> None:
    parser.add_argument(
        "--moe-imbalance",
        type=_parse_imbalance,
        metavar="FACTOR",
        help="tokens that the experts of the fullest rank get, over an equal share; 1 divides them evenly, max gives "
        "it all that it can get (default: what random routers give tokens as frequent as those of text)",
    )


def _parse_imbalance(text: str) -> float | str:
    return text if text == "max" else parse_positive_float(text)


def _add_outputs(parser: Any, plot: str) -> None:
    parser.add_argument("--json", metavar="FILE", type=parse_output, help="also write the figures to FILE")
    parser.add_argument("--plot", metavar="PNG", type=parse_png, help=f"also draw {plot} to PNG")
    _add_html(parser)


def _add_html(parser: Any) -> None:
    parser.add_argument(
        "--html", metavar="FILE", type=parse_output, help="also write the table and plots to zoom into as one HTML file"
    )


def _add_text(parser: Any, *, reads_deepspeed: bool = False) -> None:
    """Tokens, and what they are computed in; None where --deepspeed_config may say it."""
    parser.add_argument(
        "--seq-length", type=parse_positive, metavar="S", help="tokens per sample (default the model's)"
    )
    parser.add_argument(
        "--vocab-size", type=parse_positive, metavar="V", help="tokens (default the model's, else 50257)"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default=None if reads_deepspeed else "bf16",
        help="default --deepspeed_config's precision, else bf16" if reads_deepspeed else "default %(default)s",
    )


def _add_shape(parser: Any, *, reads_deepspeed: bool = False) -> None:
    """What `read_requested_shape` reads, but for --model and --dropout."""
    _add_text(parser, reads_deepspeed=reads_deepspeed)
    parser.add_argument(
        "--micro-batch-size",
        type=parse_positive,
        default=None if reads_deepspeed else 1,
        metavar="B",
        help=f"samples (default {'that of --deepspeed_config, else ' if reads_deepspeed else ''}1)",
    )
    parser.add_argument(
        "--recompute",
        nargs="+",
        choices=(*_RECOMPUTE, *_OF_PARTS),
        default=[],
        metavar="WHAT",
        help="Megatron's recomputation: full, or any of core_attn and mlp, with experts of moe, moe_act and "
        "shared_experts, with latent attention of mla_up_proj, and with either of layernorm",
    )


def _add_drawn_dropout(parser: Any) -> None:
    """Of commands in which there is dropout whatever the model's file says."""
    parser.add_argument(
        "--dropout", type=parse_fraction, default=0.1, metavar="P", help="hidden and attention (default 0.1)"
    )


def _add_dropout(parser: Any) -> None:
    parser.add_argument(
        "--dropout", type=parse_fraction, metavar="P", help="hidden and attention (default the model's)"
    )


def _add_estimate_layout(group: Any) -> None:
    _add_sizes(group, tp="tensor", pp="pipeline", dp="data")
    _add_expert_parallel(group)
    _add_sequence_parallel(group)
    group.add_argument(
        "--num-layers-per-virtual-pipeline-stage",
        type=parse_positive,
        metavar="N",
        help="interleave chunks of N layers",
    )
    for place in ("first", "last"):
        group.add_argument(
            f"--decoder-{place}-pipeline-num-layers",
            type=parse_positive,
            metavar="N",
            help=f"layers of the {place} stage (default as many as the others)",
        )
    group.add_argument(
        "--num-micro-batches",
        type=parse_positive,
        metavar="M",
        help="of a step, per data-parallel rank (default: twice the pipeline size)",
    )


def _add_estimate_step(group: Any) -> None:
    _add_shape(group, reads_deepspeed=True)
    _add_dropout(group)
    _add_stock(group, ("transformer_engine", "local", "cpu"), ("fused", "unfused"))
    group.add_argument(
        "--optimizer",
        choices=("megatron", "deepspeed", "none"),
        help="default: megatron's distributed one, or deepspeed where --deepspeed_config or --zero is given",
    )
    group.add_argument(
        "--no-distributed-optimizer", action="store_true", help="Megatron's states whole on every data-parallel rank"
    )
    group.add_argument(
        "--deepspeed_config",
        metavar="JSON",
        help='its precision, ZeRO stage, buckets, offload and batch sizes, and its "tempo" block',
    )
    group.add_argument("--zero", type=int, choices=range(4), help="ZeRO stage of DeepSpeed, where there is no file")


def _add_stock(parser: Any, stacks: tuple[str, ...], attentions: tuple[str, ...]) -> None:
    on_cpu = ", or local ones on a CPU" if "cpu" in stacks else ""
    flash = " FlashAttention 2, which keeps its output twice," if "flash" in attentions else ""
    parser.add_argument(
        "--stock",
        choices=stacks,
        help="whose modules stock ones are: Transformer Engine's on a GPU (default), Megatron's local ones on a GPU, "
        f"with unfused attention, which our trainer has (default with --deepspeed_config){on_cpu}",
    )
    parser.add_argument(
        "--stock-attention",
        choices=attentions,
        help=f"Transformer Engine's attention: cuDNN's fused one (default),{flash} or unfused "
        "(--attention-backend unfused)",
    )
    parser.add_argument(
        "--no-masked-softmax-fusion",
        action="store_true",
        help="unfused attention without the softmax kernel of Apex or Transformer Engine: its softmax is in float32",
    )


def _add_plan_batch(parser: Any) -> None:
    parser.add_argument(
        "--micro-batch-size",
        type=_parse_micro_batch,
        metavar="B",
        help="samples, or auto: with which a step takes least time a sample (default that of --deepspeed_config, else "
        "1)",
    )
    parser.add_argument(
        "--global-batch-size",
        type=parse_positive,
        metavar="G",
        help="samples of a step, instead of --num-micro-batches",
    )
    parser.add_argument(
        "--num-micro-batches", type=parse_positive, metavar="M", help="of a step (default as many as fill the pipeline)"
    )
    _add_text(parser, reads_deepspeed=True)
    _add_dropout(parser)


def _parse_micro_batch(text: str) -> int | str:
    return text if text == "auto" else parse_positive(text)

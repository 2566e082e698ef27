"""Declares the arguments of `tempo-megatron ledger`, `estimate`, `plan`, `order` and `flops`, each in one table.

They stand apart from the commands, which import torch and Megatron: help and a slip of the pen take no seconds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
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

_MODEL = "a model, such as configs/model/{}.json, or the folder or config.json of a Hugging Face model"
_GPUS = "a100, b200, gb200, gh200, h100, h200, rtx4090, or a file such as configs/gpu/h100.json"
_RECOMPUTE = ("core_attn", "mlp", "full", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")
_RECOMPUTE_ALLOWED = ("core_attn", "mlp", "moe", "mla_up_proj", "full")


def _parse_margin(text: str) -> float:
    margin = float(text)
    if not 0 <= margin < 100:
        raise argparse.ArgumentTypeError(f"{text} is not a percentage from 0 to under 100")
    return margin


def _or(word: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse`, which takes a word in place of a number, too."""
    return lambda text: text if text == word else parse(text)


_TYPES = {
    **dict.fromkeys(("N", "M", "S", "V", "B", "G"), parse_positive),
    **{"SIZE": parse_memory, "P": parse_fraction, "T": parse_positive_float, "PNG": parse_png, "PICKLE": parse_output},
    **{"PERCENT": _parse_margin, "FACTOR": _or("max", parse_positive_float)},
}
"""Metavar -> what reads the word, which otherwise stays as it is."""
_DIVIDES = {"default": 1}
_WRITTEN = {"type": parse_output}
_OPTIONS: dict[str, str | tuple[str, dict[str, Any]]] = {
    # What is trained.
    "--model JSON": _MODEL.format("gpt3_175b"),
    "--hf FOLDER": "take the sizes of a Hugging Face model: its folder or config.json (gpt2, llama, mistral, mixtral, "
    "qwen2, qwen3, qwen3_moe, megatron-bert)",
    "--world-size N": "GPUs of the command of Megatron-LM that stands behind --, where its launcher does not say it",
    "--script FILE": "take the command that a shell script would start; its own arguments stand behind --. bash reads "
    "it, and starts nothing. --world-size goes before what its launcher says",
    "--megatron-yaml FILE": "take the arguments of a model_config.yaml of Megatron-LM's functional tests",
    "--deepspeed_config JSON": 'take the "tempo" block of this file',
    # Layout.
    "--tp N": ("tensor parallel size (default 1)", _DIVIDES),
    "--pp N": ("pipeline parallel size (default 1)", _DIVIDES),
    "--dp N": ("data parallel size (default 1)", _DIVIDES),
    "--cp N": ("context parallel size (default 1)", _DIVIDES),
    "--ep N": "expert parallel size: ranks of --tp and --dp that share the experts (default 1)",
    "--sequence-parallel": "shard norms and dropout over tokens as well",
    "--num-layers-per-virtual-pipeline-stage N": "interleave chunks of N layers",
    "--decoder-first-pipeline-num-layers N": "layers of the first stage (default as many as the others)",
    "--decoder-last-pipeline-num-layers N": "layers of the last stage (default as many as the others)",
    "--gpus N": ("of the whole run (default 1)", _DIVIDES),
    # A step.
    "--seq-length S": "tokens per sample (default the model's)",
    "--vocab-size V": "tokens (default the model's, else 50257)",
    "--dtype": ("default --deepspeed_config's precision, else bf16", {"choices": DTYPES}),
    "--micro-batch-size B": "samples (default that of --deepspeed_config, else 1)",
    "--num-micro-batches M": "of a step (default as many as fill the pipeline)",
    "--global-batch-size G": "samples of a step, instead of --num-micro-batches",
    "--dropout P": "hidden and attention (default the model's)",
    "--recompute WHAT": (
        "Megatron's recomputation: full, or any of core_attn and mlp, with experts of moe, moe_act and "
        "shared_experts, with latent attention of mla_up_proj, and with either of layernorm",
        {"nargs": "+", "choices": _RECOMPUTE, "default": []},
    ),
    "--optimizer": (
        "default: megatron's distributed one, or deepspeed where --deepspeed_config or --zero is given",
        {"choices": ("megatron", "deepspeed", "none")},
    ),
    "--no-distributed-optimizer": "Megatron's states whole on every data-parallel rank",
    "--zero": ("ZeRO stage of DeepSpeed, where there is no file", {"type": int, "choices": range(4)}),
    "--no-masked-softmax-fusion": "unfused attention without the softmax kernel of Apex or Transformer Engine: its "
    "softmax is in float32",
    "--moe-imbalance FACTOR": "tokens that the experts of the fullest rank get, over an equal share; 1 divides them "
    "evenly, max gives it all that it can get (default: what random routers give tokens as frequent as those of text)",
    # The device, and what a plan may take of it and of its host.
    "--gpu GPU": _GPUS,
    "--gpu-memory SIZE": "say whether it fits, such as 80GiB",
    "--allocator": "also simulate torch's CUDA caching allocator: what it rounds up to, and reserves",
    "--margin PERCENT": (
        "of --gpu-memory, what a plan leaves free, as an estimate may err (default 3)",
        {"default": 3.0},
    ),
    "--fixed-memory SIZE": (
        "of it, what each GPU holds whatever its layers keep: weights, gradients, optimizer states, buffers, embedding "
        "and head; one size, or one for each pipeline stage (default: estimated)",
        {"nargs": "+"},
    ),
    "--recompute-allowed WHAT": (
        "what Megatron may recompute: any of core_attn, mlp, moe, mla_up_proj and full, or nothing (default all)",
        {"nargs": "*", "choices": _RECOMPUTE_ALLOWED, "default": list(_RECOMPUTE_ALLOWED)},
    ),
    "--host-memory SIZE": "what a node's memory has for activations, such as 1TiB: layers may send there what the link "
    "to it takes while the next layer runs (default: none does)",
    "--gpus-per-node N": "GPUs that share --host-memory (default 8, or all of the run where it has fewer)",
    "--step-seconds T": "time of a step, for MFU and HFU (with --gpu)",
    "--work-limit N": (
        "operations that the exact search looks at in each part of the graph (default %(default)s)",
        {"default": 100_000},
    ),
    "--no-layout": "order only; no addresses in one arena",
    # What is written.
    "--all-ranks": "a column for every pipeline stage",
    "--tree": "also say what one micro batch keeps for backward, layer by layer and module by module, on the stage "
    "that needs most, or with --all-ranks on each; --json has it of all",
    "--kept-bytes JSON": "say which stand-ins for Transformer Engine's modules are stale, by what bench --kept-bytes "
    "measured",
    "--json FILE": ("also write the figures, and what is chosen, to FILE", _WRITTEN),
    "--plot PNG": "also draw stacked bars, stock beside Tempo, to PNG",
    "--html FILE": ("also write the table and plots to zoom into as one HTML file", _WRITTEN),
    "--timeline PNG": "also follow forward and backward of all layers with Tempo, say what stands at the peak, and "
    "draw it",
    "--trace JSON": ("write what is followed as a Chrome trace, for ui.perfetto.dev", _WRITTEN),
    "--snapshot PICKLE": "write what is followed as a memory snapshot of torch, for pytorch.org/memory_viz",
}
"""Option and metavar, if any -> help, and what else argparse takes. One with neither is a switch."""


def _add(parser: Any, names: str, **changed: Any) -> None:
    """Adds options of the table by their names without --; what is changed of them is this command's."""
    words_of = {words.split()[0]: words for words in _OPTIONS}
    for option in (f"--{name}" for name in names.split()):
        described, metavar = _OPTIONS[words_of[option]], words_of[option].removeprefix(option).strip()
        help, more = (described, {}) if isinstance(described, str) else described
        how = {"metavar": metavar, "type": _TYPES.get(metavar)} if metavar else {} if more else {"action": "store_true"}
        parser.add_argument(option, **{**how, "help": help, **more, **changed})


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
    _add(parser, "no-masked-softmax-fusion")


def _add_plain_shape(parser: Any, example: str) -> None:
    """What `read_requested_shape` reads, where no file of DeepSpeed says precision and batch."""
    _add(parser, "model", required=True, help=_MODEL.format(example))
    _add(parser, "seq-length vocab-size")
    _add(parser, "dtype", default="bf16", help="default %(default)s")
    _add(parser, "micro-batch-size", default=1, help="samples (default 1)")
    _add(parser, "recompute")


def _add_run(parser: argparse.ArgumentParser) -> None:
    """What is trained: a model with the other arguments, or a command of Megatron-LM."""
    parser.usage = (
        "%(prog)s --model JSON ...\n       %(prog)s --world-size N [...] -- [torchrun ...] pretrain_gpt.py ARGS..."
        "\n       %(prog)s --script FILE [--world-size N] [...] -- ARGS..."
    )
    _add(parser.add_argument_group("what is trained"), "model hf world-size script megatron-yaml")


def add_ledger_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tempo-megatron ledger`."""
    _add_plain_shape(parser, "gpt2_124m")
    _add(parser, "tp sequence-parallel")
    _add(parser, "dropout deepspeed_config")
    _add_stock(parser, ("transformer_engine", "local", "cpu"), ("fused", "flash", "unfused"))
    _add(parser, "json plot html timeline trace snapshot")
    add_tempo_arguments(parser)


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tempo-megatron estimate`."""
    _add_run(parser)
    group = parser.add_argument_group("layout")
    _add(group, "tp pp dp ep sequence-parallel num-layers-per-virtual-pipeline-stage")
    _add(group, "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers")
    _add(group, "num-micro-batches", help="of a step, per data-parallel rank (default: twice the pipeline size)")
    group = parser.add_argument_group("training step")
    _add(group, "seq-length vocab-size dtype micro-batch-size recompute dropout")
    _add_stock(group, ("transformer_engine", "local", "cpu"), ("fused", "unfused"))
    _add(group, "optimizer no-distributed-optimizer")
    of_file = 'its precision, ZeRO stage, buckets, offload and batch sizes, and its "tempo" block'
    _add(group, "deepspeed_config", help=of_file)
    _add(group, "zero")
    group = parser.add_argument_group("output")
    of_gpu = (
        f"{_GPUS}: count the workspaces that cuBLAS has on it, and take the attention that Transformer Engine takes, "
        "those of an A100, an H100 or a GB200 by its compute capability (default: h100 for a command of Megatron-LM, "
        "else none)"
    )
    _add(group, "gpu", help=of_gpu)
    _add(group, "allocator gpu-memory moe-imbalance all-ranks tree kept-bytes json plot html")
    add_tempo_arguments(parser)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tempo-megatron plan`."""
    _add_run(parser)
    _add(parser, "gpu", help=f"{_GPUS} (default: this machine's where it is one of these, else h100)")
    of_memory = "what a GPU may hold, such as 76GiB: its memory less what CUDA and NCCL take, and what fragments"
    _add(parser, "gpu-memory", required=True, help=of_memory)
    _add(parser, "margin")
    reserved = "let what torch's CUDA caching allocator reserves fit, by a simulation, not the tensors alone"
    _add(parser, "allocator", help=reserved)
    _add(parser, "fixed-memory")
    of_file = (
        "estimate what DeepSpeed holds with this file, which also says the precision and, where they are numbers, the "
        "batch sizes (default: what Megatron's distributed optimizer holds)"
    )
    _add(parser, "deepspeed_config", help=of_file)
    _add(parser, "tp pp dp cp ep sequence-parallel")
    sizes = "samples, or auto: with which a step takes least time a sample (default that of --deepspeed_config, else 1)"
    _add(parser, "micro-batch-size", type=_or("auto", parse_positive), help=sizes)
    _add(parser, "global-batch-size num-micro-batches seq-length vocab-size dtype dropout")
    _add_stock(parser, ("transformer_engine", "local"), ("fused", "flash", "unfused"))
    _add(parser, "recompute-allowed host-memory gpus-per-node moe-imbalance json")
    _add(parser, "plot", help="draw the best step time of every budget, and single switches")
    _add(parser, "html")
    parser.set_defaults(recompute=[])


def add_flops_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tempo-megatron flops`."""
    _add_plain_shape(parser, "gpt3_175b")
    samples = "samples of a step, over all GPUs (default --micro-batch-size)"
    _add(parser, "global-batch-size", metavar="B", help=samples)
    _add(parser, "tp", help="tensor parallel size, which pads the vocabulary")
    _add(parser, "gpus step-seconds gpu json")
    parser.set_defaults(dropout=None)


def add_order_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tempo-megatron order`."""
    _add_plain_shape(parser, "gpt2_tiny")
    _add(parser, "dropout")
    _add(parser, "optimizer", choices=("adam", "adamw", "sgd"), default="adam", help="default %(default)s")
    _add(parser, "deepspeed_config work-limit no-layout json")
    _add(parser, "plot", help="also draw the memory of each operation, before and after")
    _add(parser, "html")
    add_tempo_arguments(parser)


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

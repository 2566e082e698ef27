"""Parses the command line of the trainer, one for each family of models, with Megatron-LM's argument names."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tempo_megatron import __version__
from tempo_megatron.models.arguments import add_model_arguments
from tempo_megatron.settings.arguments import add_ledger_argument, add_tempo_arguments
from tempo_megatron.training.run.masking import MASKING_DEFAULTS, SPAN_DEFAULTS, add_masking_arguments
from tempo_megatron.words.argument_types import (
    parse_fault_timeout,
    parse_fraction,
    parse_minutes,
    parse_not_negative,
    parse_not_negative_float,
    parse_png,
    parse_positive,
    parse_positive_float,
    parse_seed,
    parse_steps,
)

# Used if neither the command line, the DeepSpeed JSON nor the checkpoint of --load has a value.
DEFAULTS = {
    "seed": 1234,
    "min_lr": 0.0,
    "lr_warmup_iters": 0,
    "lr_decay_style": "linear",
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "split": "969,30,1",
    "eod_mask_loss": False,
    **MASKING_DEFAULTS,
    **SPAN_DEFAULTS,
    "eval_interval": 1000,
    "eval_iters": 100,
    "test_iters": 0,
    "bias_swiglu_fusion": True,
    "bias_dropout_fusion": True,
    "masked_softmax_fusion": True,
}
LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
_FUSIONS = {
    "bias-gelu-fusion": "fused tanh GELU, or erf GELU, unfused (default: as in the checkpoint, else fused on a GPU)",
    "bias-swiglu-fusion": "fused SwiGLU on a GPU (default yes)",
    "bias-dropout-fusion": "fused bias, dropout and residual on a GPU (default yes)",
    "masked-softmax-fusion": "fused softmax of the attention scores on a GPU with Apex (default yes)",
}
_EXPERT_PARALLEL = "--expert-model-parallel-size"
RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe_act", "moe", "shared_experts", "mla_up_proj")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises a ValueError, so that one rank reports it instead of all."""
        if message.startswith("unrecognized arguments: "):
            words = message.removeprefix("unrecognized arguments: ").split()
            if not words:
                raise ValueError("one of the arguments is an empty word; remove it, or the quotes around nothing")
            unknown = words[0]
            if unknown.split("=")[0] == _EXPERT_PARALLEL:
                raise ValueError(
                    f"{_EXPERT_PARALLEL} is given, and DeepSpeed's engine does not know Megatron's experts, so that "
                    "the trainer has all of them on each rank; remove it, or train with Megatron-LM "
                    "(tempo-megatron run)"
                )
            known = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(unknown.split("=")[0], known, n=1)
            message += f"; the nearest known one is {near[0]}" if near else "; --help lists the known ones"
        raise ValueError(message)


class _Formatter(argparse.HelpFormatter):
    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        """Shows N for a whole number and X for another, instead of repeating the option's name."""
        if action.type in (parse_positive, parse_not_negative, int):
            return "N"
        return "X" if action.type else super()._get_default_metavar_for_optional(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        """Adds the default of DEFAULTS, unless the text itself names the default."""
        text = action.help or ""
        return text if action.dest not in DEFAULTS or "default" in text else f"{text} (default {DEFAULTS[action.dest]})"


def parse_arguments(argv: Sequence[str] | None = None, family: str = "gpt") -> argparse.Namespace:
    """Parses a command line and adds `family`. An argument that is left out is None if a checkpoint may decide it.

    Args:
        argv: the arguments; None means those of the process.
        family: gpt, bert or t5, the program's.

    Raises ValueError for an unknown or malformed argument.
    """
    args = build_parser(family).parse_args(sys.argv[1:] if argv is None else list(argv))
    _check_words(args)
    args.family = family
    return args


def _check_words(args: argparse.Namespace) -> None:
    """Raises ValueError for a word that is empty or has a NUL character, which no file name may have."""
    for name, value in vars(args).items():
        for word in value if isinstance(value, list) else [value]:
            if word == "":
                raise ValueError(f"--{name.replace('_', '-')} is empty; give a value, or leave it out")
            if isinstance(word, str) and "\0" in word:
                raise ValueError(f"--{name.replace('_', '-')} {word!r} has a character of number 0; remove it")


def build_parser(family: str) -> argparse.ArgumentParser:
    models = {"gpt": "GPT", "bert": "BERT or a RoBERTa", "t5": "T5"}
    parser = _Parser(
        prog=f"tempo-pretrain-{family}",
        description=f"Pretrain a {models[family]} with megatron-core and DeepSpeed, stock or with Tempo.",
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    add_model_arguments(parser)
    _add_training(parser)
    _add_optimizer(parser)
    data = _add_data(parser)
    file = "GPT-2 vocab.json" if family == "gpt" else "vocab.txt or vocab.json"
    data.add_argument("--vocab-file", help=f"{file} (default: the tokenizer stored beside the data)")
    if family == "t5":
        data.add_argument(
            "--decoder-seq-length", type=parse_positive, help="tokens of the decoder (default --seq-length)"
        )
    if family != "gpt":
        add_masking_arguments(parser, family)
    else:
        data.add_argument(
            "--eod-mask-loss",
            action=argparse.BooleanOptionalAction,
            help="no loss where the input is end-of-document (default no)",
        )
    _add_recompute_and_fusion(parser)
    _add_output(parser)
    _add_distributed(parser)
    add_tempo_arguments(parser)
    return parser


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=parse_positive, help="samples per device and forward pass")
    group.add_argument(
        "--global-batch-size",
        type=parse_positive,
        help="samples per step over all devices (default micro batch x data parallel size x the JSON's accumulation)",
    )
    group.add_argument(
        "--rampup-batch-size",
        type=parse_positive,
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        help="begin with steps of START samples and add INCREMENT at a time, so that --global-batch-size is reached "
        "after SAMPLES samples",
    )
    group.add_argument("--train-iters", type=parse_positive, help="steps of the whole run; needed without --load")
    group.add_argument("--exit-interval", type=parse_positive, help="save and exit at every multiple of this step")
    group.add_argument(
        "--exit-signal-handler",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on SIGTERM or Ctrl-C, to the launcher or to a rank, finish the step, save and exit; on a second Ctrl-C "
        "exit at once; on SIGUSR1 to a rank finish the step, save and go on (default on)",
    )
    group.add_argument(
        "--eval-only",
        action="store_true",
        help="train nothing: compute the losses of --load's checkpoint on the validation part and, with --test-iters, "
        "the test part",
    )
    group.add_argument("--seed", type=parse_seed, help="of weights, dropout and the order of the samples")
    group.add_argument("--bf16", action="store_true", help="bfloat16 (the DeepSpeed JSON must not say otherwise)")
    group.add_argument("--fp16", action="store_true", help="float16 (the DeepSpeed JSON must not say otherwise)")


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer", "AdamW; parameters with one dimension and biases do not decay")
    group.add_argument("--lr", type=parse_positive_float, help="highest learning rate; needed without --load")
    group.add_argument("--min-lr", type=parse_not_negative_float, help="lowest after warm-up")
    group.add_argument("--lr-warmup-iters", type=parse_not_negative, help="steps of linear warm-up")
    group.add_argument("--lr-decay-style", choices=LR_DECAY_STYLES, help="curve of the learning rate after warm-up")
    group.add_argument("--lr-decay-iters", type=parse_positive, help="steps until --min-lr (default --train-iters)")
    group.add_argument(
        "--lr-wsd-decay-iters",
        type=parse_positive,
        help="the last of these steps, in which a WSD schedule (warm-up, stable, decay) goes down to --min-lr",
    )
    group.add_argument(
        "--lr-wsd-decay-style", choices=WSD_DECAY_STYLES, help=f"curve of that decay (default {WSD_DECAY_STYLES[0]})"
    )
    group.add_argument("--weight-decay", type=parse_not_negative_float, help="of AdamW")
    group.add_argument("--adam-beta1", type=parse_fraction, help="decay of the gradient's mean")
    group.add_argument("--adam-beta2", type=parse_fraction, help="decay of the squared gradient's mean")
    group.add_argument("--adam-eps", type=parse_positive_float, help="added to the denominator")
    group.add_argument(
        "--clip-grad",
        type=parse_not_negative_float,
        help="highest global gradient norm; 0 is no clipping (default the JSON's gradient_clipping, else "
        f"{DEFAULTS['clip_grad']:g})",
    )
    group.add_argument(
        "--override-opt-param-scheduler",
        action="store_true",
        help="on --load take the learning rate schedule from the arguments, their defaults included, instead of going "
        "on with the checkpoint's",
    )


def _add_data(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data-path",
        nargs="+",
        metavar="PREFIX",
        help="prefix of a .bin/.idx pair, or several as WEIGHT PREFIX WEIGHT PREFIX ...; needed without --load",
    )
    group.add_argument("--split", help="train,validation,test weights")
    group.add_argument("--data-cache-path", help="folder for the sample indices (default: beside the data)")
    group.add_argument("--merge-file", help="merges.txt of a byte-level BPE")
    group.add_argument("--num-workers", type=parse_not_negative, help="loader processes (default 2 with a GPU, else 0)")
    group.add_argument("--eval-interval", type=parse_positive, help="steps between validations")
    group.add_argument("--eval-iters", type=parse_not_negative, help="global batches per validation; 0 is none")
    group.add_argument(
        "--test-iters",
        type=parse_not_negative,
        help="global batches of --split's third part, whose loss is computed once, at the end",
    )
    return group


def _add_recompute_and_fusion(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recomputation and fusion")
    group.add_argument(
        "--recompute-activations", action="store_true", help="short for --recompute-granularity selective"
    )
    group.add_argument(
        "--recompute-granularity",
        choices=("full", "selective", "none"),
        help="which activations to recompute (default none)",
    )
    group.add_argument("--recompute-method", choices=("uniform", "block"), help="for full recomputation")
    group.add_argument("--recompute-num-layers", type=parse_positive, help="for full recomputation")
    group.add_argument(
        "--recompute-modules",
        nargs="+",
        choices=RECOMPUTE_MODULES,
        metavar="{core_attn,mlp}",  # check_run refuses the others with a reason
        help="for selective recomputation: core_attn and mlp (default core_attn)",
    )
    for name, text in _FUSIONS.items():
        group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=text)


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--save", metavar="DIR", help="where checkpoints go; every node must see the same folder")
    group.add_argument(
        "--load",
        metavar="DIR",
        help="continue from the latest checkpoint in this folder, which a run of another layout (tensor and pipeline "
        "parallel size, number of processes, ZeRO stage) may have saved, stock or Tempo. What is left out is as in the "
        "checkpoint, but for the layout and what is written where and when; the model, the data, "
        "--global-batch-size, --rampup-batch-size and --seed stay (docs/checkpoints.md)",
    )
    group.add_argument(
        "--pretrained-checkpoint",
        metavar="DIR",
        help="begin with the model and the weights of the latest checkpoint in this folder, which `tempo-megatron "
        "import` or a run of any layout has made; step, optimizer, data and schedule are this run's own. With a "
        "checkpoint in --load the run goes on from that",
    )
    group.add_argument(
        "--save-interval", type=parse_positive, help="steps between checkpoints (default: only at the end)"
    )
    group.add_argument(
        "--async-save",
        action="store_true",
        help="copy the state to the host's memory, which has to hold it, and write it while the training goes on",
    )
    group.add_argument(
        "--keep-checkpoints", type=parse_positive, help="newest checkpoints that stay in --save (default: all of them)"
    )
    group.add_argument(
        "--log-interval", type=parse_positive, default=10, help="steps per log line (default %(default)s)"
    )
    group.add_argument("--tensorboard-dir", metavar="DIR", help="write TensorBoard events there")
    group.add_argument("--metrics-file", metavar="JSONL", help="one JSON line per step (default DIR of --save)")
    group.add_argument(
        "--loss-plot", type=parse_png, metavar="PNG", help="loss curve drawn at the end (default DIR of --save)"
    )
    group.add_argument(
        "--log-dir",
        metavar="DIR",
        help="where each rank writes rank_NNNNN.log when the run fails: its traceback, or where it was when another "
        "rank failed (default logs in DIR of --save)",
    )
    add_ledger_argument(group)
    group.add_argument(
        "--profile",
        type=parse_steps,
        metavar="FIRST-LAST",
        help="record these steps: a trace for Perfetto and, on a GPU, a snapshot for torch's memory viewer",
    )
    group.add_argument(
        "--profile-ranks", type=parse_not_negative, nargs="+", metavar="RANK", help="that record (default 0)"
    )
    group.add_argument("--profile-dir", metavar="DIR", help="where they write (default profile in DIR of --save)")


def _add_distributed(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distributed")
    group.add_argument(
        "--deepspeed_config", "--deepspeed-config", metavar="JSON", required=True, help="the DeepSpeed configuration"
    )
    group.add_argument("--deepspeed", action="store_true", help="accepted as DeepSpeed scripts do; it is always on")
    group.add_argument("--tensor-model-parallel-size", type=parse_positive, default=1, help="default %(default)s")
    group.add_argument(
        "--pipeline-model-parallel-size",
        type=parse_positive,
        default=1,
        help="stages that the layers are divided over, with ZeRO 0 or 1 (default %(default)s)",
    )
    group.add_argument(
        "--num-layers-per-virtual-pipeline-stage",
        type=parse_positive,
        help="interleave: each stage has several chunks of this many layers (default: one chunk)",
    )
    group.add_argument(
        "--pipeline-model-parallel-layout",
        metavar="LAYOUT",
        help="which layers each stage or chunk has, as Et*3|t*5L: E the embedding, t a layer, L the loss, | between",
    )
    group.add_argument(
        "--sequence-parallel", action="store_true", help="also split norms and dropout over the tensor parallel ranks"
    )
    group.add_argument(
        "--use-cpu-initialization", action="store_true", help="draw the weights on the CPU: same for any TP"
    )
    group.add_argument(
        "--distributed-timeout-minutes",
        type=parse_minutes,
        default=10,
        help="how long the ranks wait for one another, at the start and in a collective: a rank that runs but does not "
        "get on ends the run after this (default %(default)s)",
    )
    group.add_argument(
        "--fault-timeout",
        type=parse_fault_timeout,
        default=60.0,
        metavar="SECONDS",
        help="how long a rank may be stopped, or its host silent, until the run ends; a rank that is busy is neither, "
        "and 0 lets the ranks not watch one another (default %(default)g)",
    )
    group.add_argument(
        "--local_rank", "--local-rank", type=int, default=-1, help="set by launchers; LOCAL_RANK decides"
    )


Blend = tuple[tuple[str, ...], tuple[float, ...] | None]
"""Prefixes of data sets, and their weights if there are several."""


def parse_blend(words: list[str]) -> Blend:
    """Returns (prefixes, weights) of `--data-path PREFIX` or `--data-path WEIGHT PREFIX WEIGHT PREFIX ...`."""
    if len(words) == 1:
        return (words[0],), None
    if len(words) % 2:
        raise ValueError(f"--data-path has {len(words)} words; give one prefix, or pairs of a weight and a prefix")
    weights = []
    for word in words[0::2]:
        try:
            weight = float(word)
        except ValueError:
            raise ValueError(
                f"--data-path: {word!r} stands where a weight is expected; give WEIGHT PREFIX pairs"
            ) from None
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"--data-path: weight {word} is not positive; give positive weights")
        weights.append(weight)
    if not math.isfinite(sum(weights)):
        raise ValueError(f"--data-path: the weights {' '.join(words[0::2])} have no finite sum; give smaller ones")
    return tuple(words[1::2]), tuple(weights)


def parse_split(split: str) -> tuple[float, float, float]:
    """Returns the three fractions of a split such as `969,30,1`; missing ones are 0."""
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    is_sound = 1 <= len(weights) <= 3 and min(weights) >= 0 and weights[0] > 0 and math.isfinite(sum(weights))
    if not is_sound:
        raise ValueError(
            f"--split {split!r} is not understood; give up to three weights such as 969,30,1, train above 0"
        )
    total = sum(weights)
    train, valid, test = (weight / total for weight in [*weights, 0.0, 0.0][:3])
    return train, valid, test

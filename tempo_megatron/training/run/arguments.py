"""Parses the command line of the trainer, one for each family of models, with Megatron-LM's argument names.

Completes it to a RunConfig by the DeepSpeed JSON, the checkpoint, the processes and defaults.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tempo_megatron import __version__
from tempo_megatron.models.arguments import add_model_arguments, read_given_model
from tempo_megatron.models.huggingface.config import is_config, read_config
from tempo_megatron.models.shape import NAMES, ModelShape, make_shape
from tempo_megatron.models.shape_file import read_shape_file
from tempo_megatron.settings.arguments import add_tempo_arguments, describe_tempo_arguments, read_tempo_of_run
from tempo_megatron.settings.layer_values import FrozenDict
from tempo_megatron.training.run.deepspeed_config import complete_deepspeed_config, is_given, read_precision
from tempo_megatron.training.run.option import add_options, list_options, name_argument
from tempo_megatron.training.run.resume import (
    PRETRAINED_MAY_CHANGE,
    check_given_model,
    join_tempo,
    read_pretrained,
    take_from_checkpoint,
)
from tempo_megatron.training.run.run_config import (
    MASKINGS,
    OPTIONS,
    WSD_DECAY_STYLES,
    Blend,
    Masking,
    RunConfig,
    SpanMasking,
)
from tempo_megatron.words.argument_types import parse_not_negative, parse_positive

_EXPERT_PARALLEL = "--expert-model-parallel-size"


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


def parse_arguments(argv: Sequence[str] | None = None, family: str = "gpt") -> argparse.Namespace:
    """Parses a command line, that of the process if `argv` is None, for a program of `family`: gpt, bert or t5.

    An argument that is left out is None if a checkpoint may decide it.

    Raises ValueError for an unknown or malformed argument.
    """
    args = build_parser(family).parse_args(sys.argv[1:] if argv is None else list(argv))
    for name, value in vars(args).items():
        for word in value if isinstance(value, list) else [value]:
            if word == "":
                raise ValueError(f"{name_argument(name)} is empty; give a value, or leave it out")
            if isinstance(word, str) and "\0" in word:
                raise ValueError(f"{name_argument(name)} {word!r} has a character of number 0; remove it")
    args.family = family
    return args


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
    if family == "t5":
        parser.add_argument(
            "--decoder-seq-length", type=parse_positive, help="tokens of the decoder (default --seq-length)"
        )
    add_options(parser, RunConfig, family)
    if family in MASKINGS:
        add_options(parser, MASKINGS[family], family)
    launchers = parser.add_argument_group("what launchers add")
    launchers.add_argument("--deepspeed", action="store_true", help="accepted as DeepSpeed scripts do; it is always on")
    launchers.add_argument(
        "--local_rank", "--local-rank", type=int, default=-1, help="set by launchers; LOCAL_RANK decides"
    )
    add_tempo_arguments(parser)
    return parser


def parse_blend(words: Sequence[str]) -> Blend:
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


_NEEDED = {
    "train_iters": "the steps of the whole run",
    "lr": "the highest learning rate",
    "data_path": "the prefix of a .bin/.idx pair",
}


def complete_run(
    args: argparse.Namespace,
    deepspeed: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
    *,
    world_size: int,
    on_gpu: bool,
) -> RunConfig:
    """Completes the run that `args` describe; changes neither `args` nor `deepspeed`.

    `deepspeed` is of read_deepspeed_config, and `saved` of read_saved_run: None for a new run.

    Raises ValueError if something without a default is missing, or if two sources contradict each other.
    """
    with_tempo = deepspeed
    if saved:
        args = argparse.Namespace(**{**vars(args), **take_from_checkpoint(args, deepspeed, saved)})
        with_tempo = join_tempo(args, deepspeed, saved["settings"])
    pretrained = read_pretrained(args.pretrained_checkpoint, args.family) if saved is None else None
    given = {**vars(args), "model": _complete_model(args, saved, pretrained)}
    if given["bias_gelu_fusion"] is None:
        gelu_form = (pretrained or {}).get("gelu_form")
        if pretrained is None and args.model and is_config(args.model):
            gelu_form = read_config(args.model).gelu_form
        given["bias_gelu_fusion"] = on_gpu if gelu_form is None else gelu_form == "tanh"
    given |= _decide_recomputation(args)
    values = {name: _complete(name, given.get(name), args, deepspeed) for name in OPTIONS}
    others = {"num_workers": 2 if on_gpu else 0, "lr_decay_iters": values["train_iters"]}
    if values["lr_decay_style"] == "WSD":
        others["lr_wsd_decay_style"] = WSD_DECAY_STYLES[0]
    values |= {name: value for name, value in others.items() if values[name] is None}
    for name, what in _NEEDED.items():
        if values[name] is None:
            raise ValueError(f"{name_argument(name)} is missing; give {what}")
    tp = args.tensor_model_parallel_size
    data_parallel_size = divide_processes(world_size, tp, args.pipeline_model_parallel_size)
    completed = complete_deepspeed_config(deepspeed, {**given, **values}, data_parallel_size)
    tempo, budget = read_tempo_of_run(args, with_tempo)
    first = saved or pretrained
    values |= {
        "masking": _read_masking(args.family, given),
        "precision": read_precision(completed),
        "sample_parts": tuple(saved["sample_parts"]) if saved else (),
        # The padding takes part in every softmax, so another layout keeps its size. An import has not padded for any.
        "vocab_padding_tp": first.get("vocab_padding_tp", first["tensor_model_parallel_size"]) if first else tp,
        "blend": parse_blend(values["data_path"]),
        "split_weights": parse_split(values["split"]),
        "world_size": world_size,
        "data_parallel_size": data_parallel_size,
        "on_gpu": on_gpu,
        "deepspeed": json.loads(json.dumps(completed), object_hook=FrozenDict),
        "tempo": tempo,
        "memory_budget": budget and budget.device_bytes,
        "host_memory": budget.host_bytes if budget else 0,
        "tempo_arguments": describe_tempo_arguments(args),
    }
    values |= {name: completed[each.in_json] for name, each in OPTIONS.items() if each.in_json}
    return RunConfig(**values)


def divide_processes(world_size: int, tensor_model_parallel_size: int, pipeline_model_parallel_size: int = 1) -> int:
    """Returns the data parallel size. Raises ValueError if the processes do not divide."""
    size = tensor_model_parallel_size * pipeline_model_parallel_size
    if world_size % size:
        options = f"--tensor-model-parallel-size {tensor_model_parallel_size}"
        if pipeline_model_parallel_size > 1:
            options += f" times --pipeline-model-parallel-size {pipeline_model_parallel_size}"
        raise ValueError(
            f"{options} does not divide the {world_size} processes; "
            f"start a multiple of {size} processes (deepspeed --num_gpus {size}, torchrun --nproc_per_node {size})"
        )
    return world_size // size


def _complete(name: str, value: Any, args: argparse.Namespace, deepspeed: Mapping[str, Any]) -> Any:
    """The value of a field: as given, else in the folder of --save, else the default if the JSON has none."""
    option = OPTIONS[name]
    if not value and option.in_save and args.save:
        return str(Path(args.save) / option.in_save)
    if value is None and not (option.in_json and is_given(deepspeed, option.in_json)):
        return option.default
    return tuple(value) if isinstance(value, list) else value


def _complete_model(
    args: argparse.Namespace, saved: Mapping[str, Any] | None, pretrained: Mapping[str, Any] | None
) -> ModelShape:
    """Makes the model of what was given and, for the rest, of what the checkpoint has."""
    stored = saved["settings"]["model"] if saved else {}
    if pretrained:
        stored = {name: pretrained[name] for name in NAMES if name in pretrained}
    if args.family == "bert":
        args = argparse.Namespace(**{**vars(args), **_take_segments(args, stored)})
    given = read_given_model(args, args.family, stored=stored)
    if saved:
        check_given_model(given, saved, f"--load {args.load}")
    if pretrained:
        folder = f"--pretrained-checkpoint {args.pretrained_checkpoint}"
        check_given_model(given, pretrained, folder, PRETRAINED_MAY_CHANGE)
    return make_shape(**{**stored, **given})


def _decide_recomputation(args: argparse.Namespace) -> dict[str, Any]:
    granularity, num_layers = args.recompute_granularity, args.recompute_num_layers
    if args.recompute_activations and granularity in ("full", "none"):
        raise ValueError(
            f"--recompute-activations is selective but --recompute-granularity is {granularity}; give one of them"
        )
    granularity = "selective" if args.recompute_activations else None if granularity == "none" else granularity
    if granularity == "full" and num_layers is None:
        num_layers = 1
    return {"recompute_granularity": granularity, "recompute_num_layers": num_layers}


def _read_masking(family: str, values: Mapping[str, Any]) -> Masking | SpanMasking | None:
    """Returns what `values` say of it, by the names of the arguments, else the defaults; None for GPT."""
    if (kind := MASKINGS.get(family)) is None:
        return None
    options = list_options(kind).items()
    return kind(**{name: each.default if values[name] is None else values[name] for name, each in options})


def _take_segments(args: argparse.Namespace, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the two fields of ModelShape that say whether there are segments.

    They come from the command line, else from --model, else from `stored`, the checkpoint's fields of ModelShape, else
    they are BERT's.
    """
    below = {**stored, **(read_shape_file(args.model) if args.model else {})}
    has_head = not args.bert_no_binary_head and below.get("add_binary_head", True)
    kinds = 0 if args.bert_no_binary_head else below.get("num_tokentypes", 2 if has_head else 0)
    return {"add_binary_head": has_head, "num_tokentypes": kinds}

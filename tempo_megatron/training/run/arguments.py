"""Parses the command line of the trainer, one for each family of models, with Megatron-LM's argument names."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Sequence
from typing import NoReturn

from tempo_megatron import __version__
from tempo_megatron.models.arguments import add_model_arguments
from tempo_megatron.settings.arguments import add_tempo_arguments
from tempo_megatron.training.run.masking import MASKINGS
from tempo_megatron.training.run.option import add_options, name_argument
from tempo_megatron.training.run.run_config import Blend, RunConfig
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

"""Prints what a run would work with and where each value comes from, for `tempo-megatron config --show`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tempo_megatron.models.shape_file import read_shape_file
from tempo_megatron.training.run.arguments import build_parser, complete_run, parse_arguments
from tempo_megatron.training.run.checks import check_run
from tempo_megatron.training.run.deepspeed_config import is_given, read_deepspeed_config
from tempo_megatron.training.run.option import flatten, name_argument
from tempo_megatron.training.run.resume import TAKEN, read_saved_run
from tempo_megatron.training.run.run_config import OPTIONS
from tempo_megatron.words.argument_types import parse_positive

# Names in the DeepSpeed JSON -> the argument that may also give the value.
_ARGUMENTS = {option.in_json: name for name, option in OPTIONS.items() if option.in_json}
_ARGUMENTS |= {"bf16.enabled": "bf16", "fp16.enabled": "fp16"}
_COMPUTED = {"train_batch_size", "gradient_accumulation_steps"}


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Prints the settings, one per line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Print the settings of a training run, one per line, and where each value comes from.",
        epilog="Every other argument is one of tempo-pretrain-gpt or, with --family bert or t5, of that one's trainer.",
        allow_abbrev=False,
    )
    parser.add_argument("--show", action="store_true", required=True, help="print the effective values")
    parser.add_argument("--family", choices=("gpt", "bert", "t5"), default="gpt", help="default %(default)s")
    parser.add_argument("--world-size", type=parse_positive, help="processes of the run (default: as few as it needs)")
    own, training = parser.parse_known_args(argv)
    lines = list(describe_settings(training, own.family, own.world_size))
    width = [max(len(line[column]) for line in lines) for column in (0, 1)]
    for name, value, source in lines:
        print(f"{name:<{width[0]}}  {value:<{min(width[1], 40)}}  {source}")
    return 0


def describe_settings(argv: Sequence[str], family: str, world_size: int | None) -> Iterator[tuple[str, str, str]]:
    """Yields (name, value, source) of every setting of a run. Raises ValueError if the run would be refused."""
    args = parse_arguments(argv, family)
    config = read_deepspeed_config(args.deepspeed_config)
    saved = read_saved_run(args)
    world_size = world_size or args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    run = complete_run(args, config, saved, world_size=world_size, on_gpu=torch.cuda.is_available())
    check_run(run)
    parser = build_parser(family)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    typed = vars(parser.parse_args(list(argv)))
    shape = read_shape_file(typed["model"]) if "model" in typed else {}
    in_json = flatten({"deepspeed": {**config, "tempo": config.get("tempo", {})}})
    for full, value in flatten({"run": dataclasses.asdict(run)}).items():
        name = full.removeprefix("run ")
        yield name, _write(value), _get_source(name, typed, shape, in_json, config, saved)


def _get_source(
    name: str,
    typed: Mapping[str, Any],
    shape: Mapping[str, Any],
    in_json: Mapping[str, Any],
    config: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
) -> str:
    group, _, rest = name.partition(".")
    key = rest.partition(".")[0]
    argument = rest if group == "model" else f"tempo_{key}" if group == "tempo" else name
    if group == "deepspeed":
        if in_json.get(f"deepspeed {rest}", "auto") != "auto":
            return "JSON"
        argument = _ARGUMENTS.get(rest, "")
    if argument in typed:
        return f"argument {name_argument(argument)}"
    if group == "model" and rest in shape:
        return f"--model {typed['model']}"
    if group == "model" and saved is None and "pretrained_checkpoint" in typed:
        return f"checkpoint {typed['pretrained_checkpoint']}"
    stored = {} if saved is None else saved["settings"]
    if group == "tempo":
        block = config.get("tempo", {})
        if saved is not None and block.get(key) == stored["deepspeed"].get("tempo", {}).get(key):
            return f"checkpoint {saved['checkpoint']}"
        return "JSON" if key in block else "default"
    option = OPTIONS[group]
    if option.in_json and is_given(config, option.in_json):
        return f'JSON "{option.in_json}"'
    if group in TAKEN and group in stored:
        assert saved is not None
        return f"checkpoint {saved['checkpoint']}"
    if name == "precision" and not ({"bf16", "fp16"} & set(typed)) and ({"bf16", "fp16"} & set(config)):
        return "JSON"
    return "computed" if rest in _COMPUTED or not (option.group or rest) else "default"


def _write(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

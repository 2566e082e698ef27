"""Prints what a run would work with and where each value comes from, for `tempo-megatron config --show`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tempo_megatron.models.shape_file import read_shape_file
from tempo_megatron.training.differences import flatten
from tempo_megatron.training.facts import list_settings
from tempo_megatron.training.run.arguments import build_parser, parse_arguments
from tempo_megatron.training.run.checks import check_run
from tempo_megatron.training.run.deepspeed_config import read_deepspeed_config
from tempo_megatron.training.run.resume import MAY_CHANGE, STAYS, read_saved_run, read_settings
from tempo_megatron.training.run.run_config import complete_run
from tempo_megatron.words.argument_types import parse_positive

# Settings that both the command line and the DeepSpeed JSON may give, with their names in the JSON.
_IN_JSON = {
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "global_batch_size": "train_batch_size",
    "num_micro_batches": "gradient_accumulation_steps",
    "clip_grad": "gradient_clipping",
}
_COMPUTED = (
    *("blend", "data_parallel_size", "num_micro_batches", "on_gpu", "sample_parts", "split_weights", "tempo_arguments"),
    *("vocab_padding_tp", "world_size", "deepspeed.train_batch_size", "deepspeed.gradient_accumulation_steps"),
)


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
    typed = find_typed(argv, family)
    shape = read_shape_file(typed["model"]) if "model" in typed else {}
    in_json = flatten({"deepspeed": {**config, "tempo": config.get("tempo", {})}})
    for full, value in flatten({"run": list_settings(run)}).items():
        name = full.removeprefix("run ")
        yield name, _write(value), _find_source(name, typed, shape, in_json, config, saved)


def find_typed(argv: Sequence[str], family: str) -> dict[str, Any]:
    """Returns the arguments that a command line gives, without defaults."""
    parser = build_parser(family)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return vars(parser.parse_args(list(argv)))


def _find_source(
    name: str,
    typed: Mapping[str, Any],
    shape: Mapping[str, Any],
    in_json: Mapping[str, Any],
    config: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
) -> str:
    group, _, rest = name.partition(".")
    argument = rest if group == "model" else f"tempo_{rest.partition('.')[0]}" if group == "tempo" else name
    if group == "deepspeed":
        of_argument = {key: option for option, key in _IN_JSON.items()} | {
            "bf16.enabled": "bf16",
            "fp16.enabled": "fp16",
        }
        if in_json.get(f"deepspeed {rest}", "auto") != "auto":
            return "JSON"
        argument = of_argument.get(rest, "")
    if argument in typed:
        return f"argument --{argument.replace('_', '-')}"
    if group == "model" and rest in shape:
        return f"--model {typed['model']}"
    if group == "model" and saved is None and "pretrained_checkpoint" in typed:
        return f"checkpoint {typed['pretrained_checkpoint']}"
    stored = read_settings(saved) if saved is not None else {}
    if group == "tempo":
        key, block = rest.partition(".")[0], config.get("tempo", {})
        block_then = stored.get("deepspeed", {}).get("tempo", {})
        if saved is not None and "tempo" in stored and block.get(key) == block_then.get(key):
            return f"checkpoint {saved['checkpoint']}"
        return "JSON" if key in block else "default"
    if config.get(_IN_JSON.get(name, ""), "auto") not in (None, "auto"):
        return f'JSON "{_IN_JSON[name]}"'
    if saved is not None and group in (*STAYS, *MAY_CHANGE) and group in stored:
        return f"checkpoint {saved['checkpoint']}"
    if name == "precision" and not ({"bf16", "fp16"} & set(typed)) and ({"bf16", "fp16"} & set(config)):
        return "JSON"
    return "computed" if name in _COMPUTED else "default"


def _write(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

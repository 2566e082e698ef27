"""`--use-tempo` and its companions, and how they are joined with the `"tempo"` block of a DeepSpeed JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from tempo_megatron.config import TempoConfig, check_block
from tempo_megatron.layer_values import freeze_layers
from tempo_megatron.operations import CHOICES, OPERATIONS, RENAMED


class _RefuseRenamed(argparse.Action):
    """An option that has another name now."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        old = self.option_strings[0]
        new = f"--tempo-{RENAMED[old.removeprefix('--tempo-')]}"
        raise argparse.ArgumentError(None, f"{old} is now {new}; write {new} instead of {old}")


def add_tempo_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--use-tempo`, `--no-use-tempo` and one `--tempo-<operation>` per operation to `parser`."""
    group = parser.add_argument_group("tempo", "activation memory; each argument wins over the DeepSpeed JSON's block")
    group.add_argument(
        "--use-tempo",
        action=argparse.BooleanOptionalAction,
        default=None,
        help='switch Tempo on or off; without it "enabled" of the "tempo" block decides, and without a block it is off',
    )
    for operation in OPERATIONS.values():
        group.add_argument(operation.argument, choices=operation.choices, default=None, help=operation.help)
    group.add_argument(
        "--tempo-layers",
        type=_read_layers,
        metavar="JSON",
        help='values of single layers, counted from 0, in place of the block\'s: \'{"0-11": {"attention": "off"}}\'',
    )
    for name in RENAMED:
        group.add_argument(
            f"--tempo-{name}", action=_RefuseRenamed, nargs="?", dest=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    return parser


def describe_tempo_arguments(args: argparse.Namespace) -> str:
    """What was typed: `--use-tempo --tempo-norm off`; "none" where nothing was."""
    words = {None: [], True: ["--use-tempo"], False: ["--no-use-tempo"]}[args.use_tempo]
    given = {name: getattr(args, f"tempo_{name}") for name in CHOICES}
    words = words + [f"{OPERATIONS[name].argument} {value}" for name, value in given.items() if value]
    if args.tempo_layers is not None:
        words.append(f"--tempo-layers '{json.dumps(args.tempo_layers)}'")
    return " ".join(words) or "none"


def _read_layers(text: str) -> Mapping[str, Any]:
    try:
        return freeze_layers(json.loads(text))
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text} is not valid JSON ({error}); expected ranges of layers") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def tempo_config_from(args: argparse.Namespace, deepspeed_config: Mapping[str, Any] | None = None) -> TempoConfig:
    """The TempoConfig of a run: the `"tempo"` block of `deepspeed_config`, with each given argument on top.

    Returns `TempoConfig.off()` where Tempo is not switched on.
    Raises ValueError where an argument asks for an operation but Tempo is off, so that nothing typed is ignored.
    """
    block = check_block(deepspeed_config["tempo"]) if deepspeed_config and "tempo" in deepspeed_config else None
    given = {name: value for name in (*CHOICES, "layers") if (value := getattr(args, f"tempo_{name}")) is not None}
    enabled = args.use_tempo
    if enabled is None:
        enabled = block is not None and block.get("enabled", True)
    if not enabled:
        if given:
            name = next(iter(given))
            argument = OPERATIONS[name].argument if name in OPERATIONS else f"--tempo-{name}"
            raise ValueError(f"{argument} is given but Tempo is off; add --use-tempo or leave {argument} out")
        return TempoConfig.off()
    fields = {name: value for name, value in (block or {}).items() if name != "enabled"}
    return TempoConfig(**{**fields, **given})

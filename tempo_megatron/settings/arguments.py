"""Adds `--use-tempo` and `--tempo-...` to a parser, and joins them with the `"tempo"` block of a DeepSpeed JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tempo_megatron.settings.config import BUDGET, CHECKS, HOST_MEMORY, SETTINGS, TempoConfig, check_block
from tempo_megatron.settings.layer_values import freeze_layers
from tempo_megatron.settings.operations import OFFLOAD_ROWS, OPERATIONS, check_offload
from tempo_megatron.words.argument_types import parse_memory
from tempo_megatron.words.json_text import parse_json


@dataclasses.dataclass(frozen=True)
class Budget:
    """The memory for which a starting run plans."""

    device_bytes: int
    """Of one rank."""
    host_bytes: int = 0
    """Of one host, for all its ranks; 0 sends nothing there."""


LEDGER: dict[str, Any] = {
    "nargs": "?",
    "const": "tempo_ledger",
    "metavar": "PREFIX",
    "help": "print what each operation keeps in the first step, and the second step's memory moment by moment, and "
    "write PREFIX.stageN.json and .png (default PREFIX %(const)s)",
}
"""What add_argument needs for `--tempo-ledger`."""


def add_ledger_argument(group: Any) -> None:
    """`--tempo-ledger` of a run, to a parser or a group."""
    group.add_argument("--tempo-ledger", **LEDGER)


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
        "--tempo-offload",
        type=_read_offload,
        metavar="ROWS",
        help="which of the tensors that each layer keeps go to the host after the forward and come back before the "
        f"backward: off, all, or some of {', '.join(OFFLOAD_ROWS)}, joined by + (docs/offload.md)",
    )
    group.add_argument(
        "--tempo-check",
        choices=CHECKS,
        default=None,
        help="auto compares the first layer of each kind with Megatron's own in a training run's first step, on 64 "
        "tokens without dropout, and stops the run where they differ; off does not (default auto)",
    )
    group.add_argument(
        "--tempo-layers",
        type=_read_layers,
        metavar="JSON",
        help='values of single layers, counted from 0, in place of the block\'s: \'{"0-11": {"attention": "off"}}\'',
    )
    group.add_argument(
        "--tempo-memory-budget",
        type=parse_memory,
        metavar="SIZE",
        help="what a rank may hold, such as 72GiB: what is auto is planned so that a step is shortest within it "
        "(training runs only; docs/plan.md)",
    )
    group.add_argument(
        "--tempo-host-memory",
        type=parse_memory,
        metavar="SIZE",
        help="with --tempo-memory-budget: what the ranks of a host may use of its memory together, such as 1TiB; the "
        "plan then also chooses what goes there",
    )
    return parser


def describe_tempo_arguments(args: argparse.Namespace) -> str:
    """The typed arguments: `--use-tempo --tempo-norm off`; "none" without any."""
    words = {None: [], True: ["--use-tempo"], False: ["--no-use-tempo"]}[args.use_tempo]
    for name, value in _list_given(args):
        words.append(f"{_name_argument(name)} " + (f"'{json.dumps(value)}'" if name == "layers" else str(value)))
    return " ".join(words) or "none"


def _list_given(args: argparse.Namespace) -> list[tuple[str, Any]]:
    return [(name, value) for name in SETTINGS if (value := getattr(args, f"tempo_{name}")) is not None]


def _name_argument(name: str) -> str:
    return f"--tempo-{name.replace('_', '-')}"


def _read_offload(text: str) -> str:
    try:
        check_offload("--tempo-", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _read_layers(text: str) -> Mapping[str, Any]:
    try:
        layers = parse_json(text)
    except ValueError as error:
        said = text if len(text) < 100 else f"{text[:100]}..."
        raise argparse.ArgumentTypeError(f"{said} is not valid JSON ({error}); expected ranges of layers") from error
    try:
        return freeze_layers(layers)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def tempo_config_from(args: argparse.Namespace, deepspeed_config: Mapping[str, Any] | None = None) -> TempoConfig:
    """The TempoConfig of `args`: the `"tempo"` block of `deepspeed_config`, with each given argument on top.

    Returns `TempoConfig.off()` if Tempo is not switched on.
    Raises ValueError where an argument sets an operation although Tempo is off, so that nothing typed is ignored, and
    for a memory budget, which only a run can use (`read_tempo_of_run`).
    """
    config, budget = read_tempo_of_run(args, deepspeed_config)
    if budget is not None:
        raise ValueError(
            "tempo.memory_budget or --tempo-memory-budget is given, and only a run that starts plans by it; leave it "
            "out, or ask tempo-megatron plan"
        )
    return config


def read_tempo_of_run(
    args: argparse.Namespace, deepspeed_config: Mapping[str, Any] | None = None
) -> tuple[TempoConfig, Budget | None]:
    """(As `tempo_config_from`, the memory that a plan at the run's start may use or None where no budget is given)."""
    block = check_block(deepspeed_config["tempo"]) if deepspeed_config and "tempo" in deepspeed_config else None
    given = dict(_list_given(args))
    enabled = args.use_tempo
    if enabled is None:
        enabled = block is not None and block.get("enabled", True)
    if not enabled:
        if given:
            argument = _name_argument(next(iter(given)))
            raise ValueError(f"{argument} is given but Tempo is off; add --use-tempo or leave {argument} out")
        return TempoConfig.off(), None
    fields = {name: value for name, value in (block or {}).items() if name != "enabled"} | given
    budget, host_bytes = fields.pop(BUDGET, None), fields.pop(HOST_MEMORY, None)
    config = TempoConfig(**fields)
    if budget is None and host_bytes is not None:
        raise ValueError(
            "tempo.host_memory is given without tempo.memory_budget, whose plan says what goes to the host; give that "
            "too, or tempo.offload in place of both"
        )
    if budget is not None and config.offloads:
        raise ValueError(
            "tempo.offload and tempo.memory_budget are both given, and the plan of a budget says itself what layers "
            "move; leave tempo.offload out, and give tempo.host_memory for what may go to the host"
        )
    if budget is not None and config.layers:
        raise ValueError(
            "tempo.layers and tempo.memory_budget are both given, and a budget gives the layers their values; leave "
            "one of them out"
        )
    return config, None if budget is None else Budget(budget, host_bytes or 0)

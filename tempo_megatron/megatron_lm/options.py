"""Reads the Tempo group of Megatron-LM's command line before Megatron is imported, so that mistakes show at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from tempo_megatron.megatron_lm.versions import LaunchError
from tempo_megatron.memory.megatron.options import RaisingParser
from tempo_megatron.settings.arguments import Budget, add_ledger_argument, add_tempo_arguments, read_tempo_of_run
from tempo_megatron.settings.config import SETTINGS, TempoConfig, check_block
from tempo_megatron.words.argument_types import parse_output
from tempo_megatron.words.deepspeed_json import load_deepspeed_json
from tempo_megatron.words.json_text import read_json


def add_tempo_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the Tempo group to a parser that has the launchers' arguments, or will have them."""
    add_tempo_arguments(parser)
    group = parser.add_argument_group("tempo files")
    group.add_argument("--tempo-config", metavar="FILE", help='a "tempo" block as JSON, alone or in a DeepSpeed JSON')
    group.add_argument(
        "--tempo-report", metavar="FILE", help="write what Tempo replaced, and what is kept, to FILE as JSON"
    )
    add_ledger_argument(group)
    return parser


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the Tempo group to Megatron's parser, and the arguments of the deepspeed launcher's users."""
    add_tempo_options(parser)
    options: dict[str, dict[str, Any]] = {
        "--deepspeed_config": {"metavar": "FILE", "help": 'a DeepSpeed JSON, of which only the "tempo" block is read'},
        # The deepspeed launcher adds it; Megatron reads LOCAL_RANK, and spells its own argument with a dash.
        "--local_rank": {"type": int, "help": argparse.SUPPRESS},
    }
    for name, settings in options.items():
        if name not in parser._option_string_actions:
            parser.add_argument(name, default=None, **settings)
    return parser


def read_options(argv: Sequence[str]) -> tuple[TempoConfig, Budget | None, str | None, str | None]:
    """The run's TempoConfig, off where Tempo is not switched on, its memory budget, the file for the report, and the
    prefix that --tempo-ledger gives, with Tempo on or off.

    Raises LaunchError for unknown values, files that cannot be read, and arguments that would be ignored.
    """
    try:
        args, _ = add_options(RaisingParser(allow_abbrev=False, add_help=False)).parse_known_args(list(argv))
        config, budget = read_tempo_of_run(args, _read_blocks(args))
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if args.tempo_report and config.is_off:
        raise LaunchError("--tempo-report is given but Tempo is off; add --use-tempo or leave --tempo-report out")
    return config, budget, args.tempo_report, args.tempo_ledger


TEMPO_OPTIONS = frozenset(add_tempo_options(argparse.ArgumentParser(add_help=False))._option_string_actions)
"""`--use-tempo` and the others."""


def take_options(words: list[str]) -> list[str]:
    """Takes Tempo's arguments with their values from the front of a command line, and returns them.

    A value that may be left out, such as the prefix of --tempo-ledger, is taken after "=" only.
    """
    actions = add_options(RaisingParser(add_help=False))._option_string_actions
    taken: list[str] = []
    while words and (name := words[0].partition("=")[0]) in actions:
        action, word = actions[name], words.pop(0)
        taken.append(f"{word}={action.const}" if action.nargs == "?" and word == name else word)
        if action.nargs is None and word == name:
            taken += words[:1]
            del words[:1]
    return taken


def check_outputs(report: str | None, ledger: str | None) -> None:
    """Make the folders of what --tempo-report and --tempo-ledger write. Raises LaunchError where one cannot be
    written."""
    files = {"--tempo-report": report, "--tempo-ledger": None if ledger is None else f"{ledger}.stage0.json"}
    for option, file in files.items():
        try:
            if file is not None:
                parse_output(file)
        except argparse.ArgumentTypeError as error:
            raise LaunchError(f"{option}: {error}") from error


def _read_blocks(args: argparse.Namespace) -> dict[str, Any]:
    """The one "tempo" block of the named files, in the form of a DeepSpeed JSON."""
    blocks = {}
    for option, file in {"--tempo-config": args.tempo_config, "--deepspeed_config": args.deepspeed_config}.items():
        if file is None:
            continue
        try:
            block = _read_block(file, may_be_bare=option == "--tempo-config")
        except OSError as error:
            raise ValueError(f"{option} {file} cannot be read ({error.strerror}); correct the path") from error
        if block is not None:
            blocks[option] = block
    if len(blocks) > 1:
        raise ValueError('--tempo-config and --deepspeed_config both hold a "tempo" block; expected one; take one out')
    return dict.fromkeys(("tempo",), *blocks.values()) if blocks else {}


def _read_block(file: str, *, may_be_bare: bool) -> dict[str, Any] | None:
    content = read_json(file) if may_be_bare else load_deepspeed_json(file)
    if isinstance(content, dict) and "tempo" in content:
        return check_block(content["tempo"])
    if not may_be_bare:
        return None
    if isinstance(content, dict) and not set(content) & {"enabled", *SETTINGS}:
        raise ValueError(f'{file} has no "tempo" block; add one, for example "tempo": {{"norm": "inplace"}}')
    return check_block(content)

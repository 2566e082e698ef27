"""The `tempo-megatron` command; `python -m tempo_megatron` is the same."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; a user's mistake is one sentence on stderr and exit status 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="tempo-megatron", description="Megatron and DeepSpeed training that keeps fewer bytes for backward."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    ledger = commands.add_parser(
        "ledger",
        help="measure every tensor that a GPT keeps for backward, stock beside Tempo",
        description="Run one layer of the real model forward, stock and with Tempo, and list what autograd keeps.",
    )
    commands.add_parser(
        "prepare-data",
        help="tokenize text into Megatron's .bin/.idx",
        add_help=False,
    )
    commands.add_parser("doctor", help="say what is installed here and what a run would use")
    # These two have parsers of their own, which only they should have to import.
    if argv[:1] == ["prepare-data"]:
        from tempo_megatron.data.prepare_data import main as prepare_data

        return prepare_data(argv[1:], prog="tempo-megatron prepare-data")
    _quiet_imports()
    if argv[:1] == ["ledger"]:
        from tempo_megatron.memory.report import add_ledger_arguments, run_ledger

        add_ledger_arguments(ledger)
        args = parser.parse_args(argv)
        try:
            return run_ledger(args)
        except (OSError, ValueError) as error:
            print(f"tempo-megatron ledger: {error}", file=sys.stderr)
            return 2
    parser.parse_args(argv)
    from tempo_megatron.doctor import report

    print(report())
    return 0


def _quiet_imports() -> None:
    """What Megatron and DeepSpeed say on import about packages that are optional does not belong in a table."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())

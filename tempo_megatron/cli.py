"""The `tempo-megatron` command, which `python -m tempo_megatron` is too, and `tempo-pretrain-gpt`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from tempo_megatron import __version__
from tempo_megatron.extras import MissingExtraError, check_installed

# What a shell reports of a program that wrote to a pipe whose reader is gone.
_DIED_OF_SIGPIPE = 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status. A user's mistake is one sentence on stderr and status 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # `tempo-megatron doctor | head -1`: the reader has what it asked for. Python would flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _DIED_OF_SIGPIPE
    except (OSError, ValueError, MissingExtraError) as error:
        print(f"tempo-megatron {argv[0]}: {error}", file=sys.stderr)
        return 2


def pretrain_gpt() -> int:
    """`tempo-pretrain-gpt`: the trainer, or one sentence where it misses a package."""
    return _train("gpt")


def pretrain_bert() -> int:
    """`tempo-pretrain-bert`, likewise."""
    return _train("bert")


def _train(family: str) -> int:
    try:
        from tempo_megatron.training.main import train
    except MissingExtraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return train(None, family)


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tempo-megatron", description="Megatron and DeepSpeed training that keeps fewer bytes for backward."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    ledger = commands.add_parser(
        "ledger",
        help="measure every tensor that a GPT keeps for backward, stock beside Tempo",
        description="Run one layer of the real model forward, stock and with Tempo, and list what autograd keeps.",
    )
    estimate = commands.add_parser(
        "estimate",
        help="estimate the memory of a training run on every kind of rank, without hardware",
        description="Follow one training step of the real model on tensors without memory, for any number of devices.",
    )
    plan = commands.add_parser(
        "plan",
        help="choose what each layer keeps, so that a step is shortest within a GPU's memory",
        description="Choose for each layer among stock, Tempo's forms and Megatron's recomputation, so that every "
        'pipeline stage fits and a step is shortest; print it as a table, a "tempo" block and arguments.',
    )
    commands.add_parser("prepare-data", help="tokenize text into Megatron's .bin/.idx", add_help=False)
    commands.add_parser("run", help="run a training script of a Megatron-LM checkout with --use-tempo", add_help=False)
    export = commands.add_parser(
        "export",
        help="write a checkpoint's weights as one safetensors file",
        description="Join the tensor-parallel and ZeRO parts of a checkpoint into one safetensors file.",
    )
    commands.add_parser("doctor", help="say what is installed here and what a run would use")
    # A command imports what it needs, and its arguments are known only then.
    command = argv[0] if argv else None
    if command == "prepare-data":
        from tempo_megatron.data.prepare_data import main as prepare_data

        return prepare_data(argv[1:], prog="tempo-megatron prepare-data")
    if command == "run":
        from tempo_megatron.megatron_lm.run import main as run_script

        return run_script(argv[1:], prog="tempo-megatron run")
    _quiet_imports()
    if command == "ledger":
        check_installed("it", "megatron", "megatron.core")
        from tempo_megatron.memory.ledger_command import add_ledger_arguments, run_ledger

        add_ledger_arguments(ledger)
        return run_ledger(parser.parse_args(argv))
    if command == "estimate":
        check_installed("it", "megatron", "megatron.core")
        from tempo_megatron.memory.estimate_command import add_estimate_arguments, run_estimate

        add_estimate_arguments(estimate)
        return run_estimate(parser.parse_args(argv))
    if command == "plan":
        check_installed("it", "megatron", "megatron.core")
        from tempo_megatron.memory.plan_command import add_plan_arguments, run_plan

        add_plan_arguments(plan)
        return run_plan(parser.parse_args(argv))
    if command == "export":
        from tempo_megatron.training.export import add_export_arguments, run_export

        add_export_arguments(export)
        return run_export(parser.parse_args(argv))
    parser.parse_args(argv)
    from tempo_megatron.doctor import describe_installation

    print(describe_installation())
    return 0


def _quiet_imports() -> None:
    """What Megatron and DeepSpeed say on import about packages that are optional does not belong in a table."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())

"""The console commands: `tempo-megatron`, also `python -m tempo_megatron`, and `tempo-pretrain-gpt`, `-bert`, `-t5`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

from tempo_megatron import __version__
from tempo_megatron.extras import MissingExtraError, check_installed

# What a shell reports of a program that wrote to a pipe whose reader is gone.
_DIED_OF_SIGINT, _DIED_OF_SIGPIPE = 128 + 2, 128 + 13


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand. Its module is imported when it runs: a command needs what it imports, and the others do not."""

    module: str
    help: str
    description: str = ""
    """Of a command whose module has `add_NAME_arguments(parser)` and `run_NAME(args)`; the others have a `main` of
    their own, which reads the command line itself."""

    needs: str | None = None
    """The extra with which megatron.core comes."""

    arguments: str = ""
    """The module of `add_NAME_arguments`, where the command's own takes seconds to import."""


def _of_memory(module: str, help: str, description: str) -> Command:
    """A command on the memory of a model, whose modules Megatron-core makes."""
    arguments = "tempo_megatron.memory.commands.arguments"
    return Command(module=module, help=help, description=description, needs="megatron", arguments=arguments)


COMMANDS = {
    "ledger": _of_memory(
        "tempo_megatron.memory.commands.ledger",
        "measure every tensor that a GPT keeps for backward, stock beside Tempo",
        "Run one layer of the real model forward, stock and with Tempo, and list what autograd keeps.",
    ),
    "estimate": _of_memory(
        "tempo_megatron.memory.commands.estimate",
        "estimate the memory of a training run on every kind of rank, without hardware",
        "Follow one training step of the real model on tensors without memory, for any number of devices.",
    ),
    "plan": _of_memory(
        "tempo_megatron.memory.commands.plan",
        "choose what each layer keeps, so that a step is shortest within a GPU's memory",
        "Choose for each layer among stock, Tempo's forms and Megatron's recomputation, so that every "
        'pipeline stage fits and a step is shortest; print it as a table, a "tempo" block and arguments.',
    ),
    "order": _of_memory(
        "tempo_megatron.roam.command",
        "order a training step's operations so that its peak memory is least",
        "Trace one step of the real model without memory, and find the order of its operations and the "
        "addresses of its tensors with which it needs least, without recomputing anything.",
    ),
    "flops": _of_memory(
        "tempo_megatron.memory.commands.flops",
        "count the FLOPs of a step, and with its time the utilisation of the GPUs (MFU, HFU)",
        "Count the matrix products of one training step by equations 7 and 8 of arXiv 2205.05198, for any "
        "model of configs/model.",
    ),
    "bench": Command(
        module="tempo_megatron.memory.commands.bench",
        help="measure the rates of this machine's GPU that the planner reckons with",
        description="Time matrix products and copies on the device, and write a file for `tempo-megatron plan --gpu`.",
    ),
    "prepare-data": Command(module="tempo_megatron.data.prepare_data", help="tokenize text into Megatron's .bin/.idx"),
    "run": Command(
        module="tempo_megatron.megatron_lm.run",
        help="run a training script of a Megatron-LM checkout with --use-tempo",
    ),
    "config": Command(
        module="tempo_megatron.training.config_command",
        help="print what a training run would work with, and where each value comes from",
    ),
    "import": Command(
        module="tempo_megatron.training.checkpoint_files.import_command",
        help="make a checkpoint of a Hugging Face model, for the trainer to begin with",
        description="Make a checkpoint of a model of transformers, with which a run of any layout begins.",
    ),
    "export": Command(
        module="tempo_megatron.training.checkpoint_files.export",
        help="write a checkpoint's weights as one safetensors file",
        description="Join the tensor-parallel and ZeRO parts of a checkpoint into one safetensors file.",
    ),
    "doctor": Command(
        module="tempo_megatron.cluster.doctor_command",
        help="say what is installed here, what a run would use, and whether the hosts of a job fit together",
        description="Say what is installed here and what a run would use, and with --hostfile whether the hosts of a "
        "job meet and fit together. Each finding says what to do; status 1 where one stops a job.",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status. A user's mistake is one sentence on stderr and status 2."""
    if argv is None and sys.argv[1:2] in (["estimate"], ["plan"]):
        # Nothing is compiled on tensors without memory, and nothing is logged. Megatron-core's imports for both take
        # seconds.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[1:2] == ["run"] and argv[0].startswith("--local_rank="):
        # `deepspeed --module tempo_megatron run ...` puts it first.
        argv[:2] = reversed(argv[:2])
    if argv[:1] == ["run"]:
        # What a script raises is the script's, whatever its type, and ends in the script's traceback.
        return _run(argv)
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # `tempo-megatron doctor | head -1`: the reader has what it asked for. Python would flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _DIED_OF_SIGPIPE
    except KeyboardInterrupt:
        print(f"tempo-megatron {argv[0]}: stopped before it was done", file=sys.stderr)
        return _DIED_OF_SIGINT
    except (OSError, ValueError, MissingExtraError) as error:
        print(f"tempo-megatron {argv[0]}: {_describe(error)}", file=sys.stderr)
        return 2


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read or written ({error.strerror}); correct the path"
    return str(error)


def _train(family: str) -> int:
    """The trainer of a family of models, or one sentence where a package is missing."""
    try:
        from tempo_megatron.training.main import train
    except MissingExtraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return train(None, family)


# `tempo-pretrain-gpt` and launch/pretrain_gpt.py, and so on.
pretrain_gpt, pretrain_bert, pretrain_t5 = (functools.partial(_train, family) for family in ("gpt", "bert", "t5"))


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tempo-megatron", description="Megatron and DeepSpeed training that keeps fewer bytes for backward."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        of_command = parsers.add_parser(
            name, help=command.help, description=command.description, add_help=bool(command.description)
        )
        if argv[:1] != [name]:
            continue
        if not command.description:
            return int(importlib.import_module(command.module).main(argv[1:], prog=f"tempo-megatron {name}"))
        _quiet_imports()
        getattr(_import(command.arguments or command.module), f"add_{name}_arguments")(of_command)
    words: list[str] = []
    if argv[:1] in (["estimate"], ["plan"]) and "--" in argv:
        # Behind it stands a command of Megatron-LM.
        place = argv.index("--")
        argv, words = argv[:place], argv[place + 1 :]
    args = parser.parse_args(argv)
    args.words = words
    command = COMMANDS[args.command]
    if command.needs:
        check_installed("it", command.needs, "megatron.core")
    if command.arguments:
        _import(command.arguments).check_files(args)
    return int(getattr(_import(command.module), f"run_{args.command}")(args))


def _import(module: str) -> ModuleType:
    """The module. What imports make stays: to look for garbage among it takes a fifth of their time."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if is_enabled:
            gc.enable()


def _quiet_imports() -> None:
    """Silence import warnings about optional packages, which would spoil a table."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())

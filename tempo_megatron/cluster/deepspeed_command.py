"""Reads a command line of the `deepspeed` launcher without importing deepspeed: its hosts, and what runs there."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tempo_megatron.cluster.hostfile import Host, choose_hosts, read_hostfile

# DeepSpeed reads this file if no hostfile is given and the file exists.
DEFAULT_HOSTFILE = "/job/hostfile"
# The launcher's options in DeepSpeed 0.16 to 0.19. The script's name is the first word that is neither an option nor
# the value of one, so options with a value are listed apart from flags. A bar joins the names of one option.
_WITH_VALUE = """
    -H|--hostfile -i|--include -e|--exclude --num_nodes --min_elastic_nodes --max_elastic_nodes
    --num_gpus|--num_accelerators --master_port --master_addr --node_rank --launcher --launcher_args
    --enable_each_rank_log --autotuning --bind_core_list --ssh_port --venv_script --log_level
""".split()
_FLAGS = """
    --module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid --elastic_training
    --bind_cores_to_rank -q|--quiet
""".split()
_NUMBERS = ("num_nodes", "num_gpus", "master_port", "node_rank", "ssh_port")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSpeedCommand:
    """What a command line of `deepspeed` says about hosts, and the command line itself."""

    argv: tuple[str, ...]
    """Without the word deepspeed."""

    hosts: tuple[Host, ...]
    """In the order of their ranks; none where the job runs on this host only."""

    launcher: str
    master_addr: str
    master_port: int
    ssh_port: int | None
    venv_script: str | None
    script: str
    is_file: bool
    """Whether `script` is a path, not the name of a module."""

    def with_address(self, address: str) -> list[str]:
        """Returns the command line with rank 0's address, or DeepSpeed takes it from the first host's `hostname -I`."""
        given = ["--master_addr", address] if self.hosts and not self.master_addr else []
        return ["deepspeed", *given, *self.argv]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"deepspeed's command line: {message}; `deepspeed --help` lists what it takes")


def make_parser() -> argparse.ArgumentParser:
    """Makes a parser of the launcher's options, with their names and defaults."""
    parser = _Parser(prog="deepspeed", add_help=False)
    for names in _WITH_VALUE:
        parser.add_argument(*names.split("|"))
    for names in _FLAGS:
        parser.add_argument(*names.split("|"), action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    parser.set_defaults(launcher="pdsh", master_port="29500", include="", exclude="", master_addr="")
    return parser


def read_command(argv: Sequence[str]) -> DeepSpeedCommand:
    """Reads the words after `deepspeed`. Raises ValueError for what the launcher or the hostfile does not accept."""
    args = make_parser().parse_args(list(argv))
    numbers = {name: _read_number(name, getattr(args, name)) for name in _NUMBERS}
    hosts: list[Host] = []
    if args.hostfile is not None or Path(DEFAULT_HOSTFILE).is_file():
        hosts = read_hostfile(args.hostfile or DEFAULT_HOSTFILE)
        hosts = choose_hosts(
            hosts,
            include=args.include,
            exclude=args.exclude,
            num_nodes=-1 if numbers["num_nodes"] is None else numbers["num_nodes"],
            num_gpus=-1 if numbers["num_gpus"] is None else numbers["num_gpus"],
        )
    is_file = not args.module and not args.no_python
    if is_file and not Path(args.user_script).is_file():
        raise ValueError(
            f"{args.user_script} is not a file; expected the script to start, or --module and a module's name"
        )
    # DeepSpeed trains a hostfile's only host here, whatever its name, unless --force_multi is given.
    one_host = args.no_ssh or (len(hosts) == 1 and not args.force_multi)
    return DeepSpeedCommand(
        argv=tuple(argv),
        hosts=() if one_host else tuple(hosts),
        launcher=args.launcher.lower(),
        master_addr=args.master_addr,
        master_port=numbers["master_port"] or 29500,
        ssh_port=numbers["ssh_port"],
        venv_script=args.venv_script,
        script=args.user_script,
        is_file=is_file,
    )


def _read_number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"--{name} is {text!r}, expected a whole number; correct it") from None
    if name.endswith("port") and not 0 < number < 65536:
        raise ValueError(f"--{name} is {number}, expected a port from 1 to 65535 (above 1023 unless you are root)")
    return number

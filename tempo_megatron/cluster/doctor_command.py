"""`tempo-megatron doctor`: says what is installed, what a run would use, and whether the hosts of a job fit together.

The exit status is 1 if something stops a job; each finding says what to do.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from tempo_megatron.cluster.versions import PACKAGES, find_broken_imports, find_misfits, find_version
from tempo_megatron.extras import MissingExtraError

# DeepSpeed's options that choose hosts and the way there.
_OPTIONS = ("hostfile", "include", "exclude", "master_addr", "master_port", "ssh_port")


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose hosts, named as deepspeed's, and those that choose the output."""
    group = parser.add_argument_group("hosts of a job: one rank per slot is started by deepspeed")
    group.add_argument("-H", "--hostfile", metavar="FILE", help="DeepSpeed's: lines of HOST slots=N")
    group.add_argument("-i", "--include", metavar="FILTER", help='as deepspeed has it: "node1@node2:0,2"')
    group.add_argument("-e", "--exclude", metavar="FILTER", help="as deepspeed has it")
    group.add_argument("--master_port", "--master-port", type=int, metavar="N", help="default: deepspeed's, 29500")
    group.add_argument("--master_addr", "--master-addr", metavar="A", help="rank 0's address (default: deepspeed's)")
    group.add_argument("--ssh_port", "--ssh-port", type=int, metavar="N", help="default: ssh's")
    group.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for all (default 120)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(args: argparse.Namespace) -> int:
    """Prints what is installed, how the hosts of a job fit together and what to fix; returns 1 if something has to be.

    Raises ValueError for a hostfile that is none, which deepspeed would ignore, and for options without a hostfile.
    """
    given = next((name for name in _OPTIONS if getattr(args, name) is not None), "hostfile")
    if given != "hostfile":
        raise ValueError(f"--{given} is given without --hostfile, which says which hosts there are; give that too")
    if args.hostfile is not None and not Path(args.hostfile).is_file():
        raise ValueError(f'--hostfile {args.hostfile} is not a file; expected one of lines such as "node1 slots=8"')
    # Imported here, because they import torch, which takes seconds.
    from tempo_megatron.cluster.installation import describe_installation, list_implementations
    from tempo_megatron.cluster.meeting import describe, find_faults

    findings: list[dict[str, Any]] = []

    def say(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    def note(level: str, host: str | None, text: str) -> None:
        findings.append({"level": level, "host": host, "text": text})
        say(f"{level}: {host + ': ' if host else ''}{text}")

    for line in describe_installation():
        say(line)
    try:
        here = [*find_misfits(), *find_broken_imports()]
    except MissingExtraError as error:
        here = [str(error)]
    for text in here:
        note("error", None, text)
    met = None
    if args.hostfile is not None:
        say("")
        met, fault = _start_meeting(args)
        if fault is not None:
            note("error", None, fault)
        if met is not None:
            say(describe(met))
            for level, host, text in find_faults(met["hosts"]):
                note(level, host, text)
    failed = any(finding["level"] == "error" for finding in findings)
    if args.json:
        versions = {"python": platform.python_version(), **{name: find_version(name) for name in PACKAGES}}
        record = {"ok": not failed, "findings": findings, "versions": versions, "operations": list_implementations()}
        print(json.dumps({**record, "hosts": met and met["hosts"], "all_reduce": met and met["all_reduce"]}, indent=2))
    say("\nsomething has to be fixed, see above" if failed else "\nnothing stops a job")
    return int(failed)


def _start_meeting(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Runs meeting.py on the hosts by the deepspeed launcher; returns its result, and what went wrong."""
    from tempo_megatron.cluster.meeting import RESULT

    given = [(name, getattr(args, name)) for name in _OPTIONS if getattr(args, name) is not None]
    options = [word for name, value in given for word in (f"--{name}", str(value))]
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", *options]
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run([*runner, "--module", "tempo_megatron.cluster.meeting"], timeout=args.timeout, **how)
        content, ending = done.stdout, f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:  # the ranks end by themselves, by the meeting's own timeout
        content, ending = error.stdout or b"", f"no end after {args.timeout:g} s"
    lines = content.decode(errors="replace").splitlines()
    results = [line.partition(RESULT)[2] for line in lines if RESULT in line]
    if results and ending == "exit status 0":
        return json.loads(results[0]), None
    causes = [line for line in lines if "rror" in line and "exits with return code" not in line]
    cause = causes[-1].strip() if causes else ending
    return None, f"the ranks of {args.hostfile} do not meet ({cause}); correct it, or give --master_addr or --ssh_port"

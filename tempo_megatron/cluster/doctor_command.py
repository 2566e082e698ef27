"""`tempo-megatron doctor`: says what is installed, what a run would use, and whether the hosts of a job fit together.

The exit status is 1 if something stops a job; each finding says what to do.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from typing import Any

from tempo_megatron.cluster.findings import Finding, judge
from tempo_megatron.cluster.hostfile import choose_hosts, read_hostfile
from tempo_megatron.cluster.remote_host import Ssh
from tempo_megatron.cluster.survey import DEFAULT_SECONDS, Survey, SurveyedHost, survey_hosts
from tempo_megatron.cluster.versions import PACKAGES, find_broken_imports, find_misfits, find_version
from tempo_megatron.extras import MissingExtraError

_COLLECTIVES_SECONDS = 300


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose hosts, named as deepspeed's, and those that choose the output."""
    group = parser.add_argument_group("hosts of a job, over ssh, all at once")
    group.add_argument("-H", "--hostfile", metavar="FILE", help="DeepSpeed's: lines of HOST slots=N")
    group.add_argument("-i", "--include", default="", metavar="FILTER", help='as deepspeed has it: "node1@node2:0,2"')
    group.add_argument("-e", "--exclude", default="", metavar="FILTER", help="as deepspeed has it")
    group.add_argument("--master_port", "--master-port", type=int, default=29500, metavar="N", help="default 29500")
    group.add_argument(
        "--master_addr", "--master-addr", default="", metavar="A", help="rank 0's address (default: found)"
    )
    group.add_argument("--ssh_port", "--ssh-port", type=int, metavar="N", help="default: ssh's")
    group.add_argument(
        "--timeout", type=float, default=DEFAULT_SECONDS, metavar="S", help="seconds for all (default 10)"
    )
    parser.add_argument(
        "--collectives", action="store_true", help="also start ranks by deepspeed and time all-reduces between them"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(args: argparse.Namespace) -> int:
    """Prints what is installed, what the hosts answer and what to fix; returns 1 if something has to be fixed."""
    if not args.hostfile:
        for name in ("include", "exclude", "master_addr", "ssh_port"):
            if getattr(args, name):
                raise ValueError(
                    f"--{name} is given without --hostfile, which says which hosts there are; give that too"
                )
    diagnosis = _Diagnosis(quiet=args.json)
    if args.hostfile:
        # Survey the hosts first, so that the user waits at most ten seconds for a host that is down.
        diagnosis.look_at_hosts(args)
    diagnosis.look_here(starts_others=bool(args.hostfile))
    if args.collectives and not diagnosis.failed:
        diagnosis.measure_collectives(args)
    if args.json:
        print(json.dumps(diagnosis.make_record(), indent=2))
    else:
        print("\nsomething has to be fixed, see above" if diagnosis.failed else "\nnothing stops a job")
    return int(diagnosis.failed)


class _Diagnosis:
    """Collects findings and, unless `quiet`, prints each as soon as it is known."""

    def __init__(self, quiet: bool) -> None:
        self.findings: list[Finding] = []
        self.survey: Survey | None = None
        self.measured: dict[str, Any] | None = None
        self._quiet = quiet

    @property
    def failed(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)

    def look_at_hosts(self, args: argparse.Namespace) -> None:
        try:
            hosts = choose_hosts(read_hostfile(args.hostfile), include=args.include, exclude=args.exclude)
            ssh = Ssh(port=args.ssh_port)
            port, address = args.master_port, args.master_addr
            self.survey = survey_hosts(hosts, ssh, port=port, master_addr=address, seconds=args.timeout)
        except ValueError as error:
            self._add(Finding("error", None, str(error)))
            return
        self._say(describe_hosts(self.survey))
        self._add(*judge(self.survey))

    def look_here(self, starts_others: bool) -> None:
        # Imported here, because it imports torch, which takes seconds.
        from tempo_megatron.cluster.installation import describe_installation

        if self.survey:
            self._say("")
        for line in describe_installation():
            self._say(line)
        self._add(*(Finding("error", None, text) for text in _find_faults_here(starts_others)))

    def measure_collectives(self, args: argparse.Namespace) -> None:
        from tempo_megatron.cluster.collectives import describe

        self.measured, fault = _measure_collectives(args)
        if self.measured:
            self._say(f"\n{describe(self.measured)}")
        if fault:
            self._add(Finding("error", None, fault))

    def make_record(self) -> dict[str, Any]:
        from tempo_megatron.cluster.installation import list_implementations

        return {
            "ok": not self.failed,
            "findings": [{"level": f.level, "host": f.host, "text": f.text} for f in self.findings],
            "versions": {"python": platform.python_version(), **{name: find_version(name) for name in PACKAGES}},
            "operations": list_implementations(),
            "hosts": [_make_host_record(surveyed) for surveyed in self.survey.hosts] if self.survey else None,
            "master_addr": self.survey.address if self.survey else None,
            "collectives": self.measured,
        }

    def _add(self, *findings: Finding) -> None:
        self.findings += findings
        for finding in findings:
            self._say(str(finding))

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)


def describe_hosts(survey: Survey) -> str:
    """Formats a table with a line for each host, and rank 0's address."""
    head = ("host", "slots", "devices", "interface", "code", "python", "torch", "clock", "/dev/shm", "disk")
    rows: list[tuple[str, ...]] = [head]
    for surveyed in survey.hosts:
        name, slots = surveyed.host.name, str(len(surveyed.host.slots))
        if surveyed.error is not None:
            rows.append((name, slots, "does not answer", *[""] * 7))
            continue
        facts = surveyed.facts
        rows.append(
            (
                name,
                slots,
                f"{facts['gpus']} GPUs" if facts["gpus"] else f"{facts['cores']} cores",
                surveyed.interface or "?",
                str(facts["sources"]["tempo_megatron"]),
                facts["versions"]["python"],
                facts["versions"]["torch"] or "missing",
                f"{surveyed.clock_ahead:+.1f} s",
                f"{facts['shm_bytes'] / 2**30:.1f} GiB",
                f"{facts['disk_bytes'] / 2**30:.0f} GiB",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"rank 0 listens on {survey.address or 'no address that all reach'}, port {survey.port}"])


def _find_faults_here(starts_others: bool) -> list[str]:
    try:
        found = find_misfits()
    except MissingExtraError as error:
        found = [str(error)]
    found += find_broken_imports()
    if starts_others and shutil.which("pdsh") is None:
        found.append(
            "pdsh is not in PATH, by which deepspeed starts other hosts; install it (apt-get install pdsh), or give "
            "deepspeed --launcher openmpi, or --no_ssh on each host"
        )
    return found


def _measure_collectives(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Runs collectives.py under the deepspeed launcher; returns its result, or what went wrong."""
    import torch

    from tempo_megatron.cluster import collectives

    given = [("--hostfile", args.hostfile), ("--include", args.include), ("--exclude", args.exclude)]
    given += [("--master_addr", args.master_addr), ("--ssh_port", args.ssh_port)]
    options = [word for option, value in given if value for word in (option, str(value))]
    if not args.hostfile:
        options = ["--num_gpus", str(torch.cuda.device_count() or 2)]
    options += ["--master_port", str(args.master_port)]
    command = [sys.executable, "-m", "tempo_megatron", "launch", "--timeout", str(args.timeout), "deepspeed", *options]
    command += ["--module", collectives.__name__]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=_COLLECTIVES_SECONDS)
    except subprocess.TimeoutExpired:
        for _ in range(2):  # the second one ends the ranks at once
            process.terminate()
            time.sleep(1)
        process.communicate()
        return None, (
            f"the ranks of --collectives did not end within {_COLLECTIVES_SECONDS} s; open the ports above 1023 "
            "between the hosts"
        )
    results = [line.partition(collectives.RESULT)[2] for line in said.splitlines() if collectives.RESULT in line]
    if process.returncode == 0 and results:
        return json.loads(results[0]), None
    errors = [line for line in said.splitlines() if "error" in line.lower()]
    cause = errors[0].strip() if errors else f"exit code {process.returncode}"
    return None, f"the ranks of --collectives failed: {cause}"


def _make_host_record(surveyed: SurveyedHost) -> dict[str, Any]:
    return {
        "host": surveyed.host.name,
        "slots": list(surveyed.host.slots),
        "error": surveyed.error,
        "interface": surveyed.interface,
        "clock_ahead": surveyed.clock_ahead,
        **surveyed.facts,
    }

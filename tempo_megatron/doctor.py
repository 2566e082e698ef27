"""`tempo-megatron doctor`: what is installed, what a run would use, and whether the hosts of a job fit together.

Exit status 1 where something stops a job; each finding says what to do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from typing import Any

import torch

from tempo_kernels.attention import describe as attention_backend
from tempo_kernels.compiled import find_compiler, find_obstacle
from tempo_megatron.cluster import collectives
from tempo_megatron.cluster.findings import Finding, judge
from tempo_megatron.cluster.hostfile import choose_hosts, read_hostfile
from tempo_megatron.cluster.remote_host import Ssh
from tempo_megatron.cluster.survey import Survey, survey_hosts
from tempo_megatron.cluster.versions import PACKAGES, find_broken_imports, find_misfits, find_version
from tempo_megatron.extras import MissingExtraError
from tempo_megatron.operations import OPERATIONS

_COLLECTIVES_SECONDS = 300


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Which hosts to look at, as deepspeed's options of these names say it, and how to answer."""
    group = parser.add_argument_group("hosts of a job, over ssh, all at once, within 10 s")
    group.add_argument("-H", "--hostfile", metavar="FILE", help="DeepSpeed's: lines of HOST slots=N")
    group.add_argument("-i", "--include", default="", metavar="FILTER", help='as deepspeed has it: "node1@node2:0,2"')
    group.add_argument("-e", "--exclude", default="", metavar="FILTER", help="as deepspeed has it")
    group.add_argument("--master_port", "--master-port", type=int, default=29500, metavar="N", help="default 29500")
    group.add_argument(
        "--master_addr", "--master-addr", default="", metavar="A", help="rank 0's address (default: found)"
    )
    group.add_argument("--ssh_port", "--ssh-port", type=int, metavar="N", help="default: ssh's")
    parser.add_argument(
        "--collectives", action="store_true", help="also start ranks by deepspeed and time all-reduces between them"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(args: argparse.Namespace) -> int:
    """Print what is installed, what the hosts say, and what to fix; 1 where something has to be fixed."""
    if not args.hostfile:
        for name in ("include", "exclude", "master_addr", "ssh_port"):
            if getattr(args, name):
                raise ValueError(
                    f"--{name} is given without --hostfile, which says which hosts there are; give that too"
                )
    findings = [Finding("error", None, text) for text in _find_faults_here(bool(args.hostfile))]
    survey, measured = None, None
    if args.hostfile:
        try:
            hosts = choose_hosts(read_hostfile(args.hostfile), include=args.include, exclude=args.exclude)
            ssh = Ssh(port=args.ssh_port)
            survey = survey_hosts(hosts, ssh, port=args.master_port, master_addr=args.master_addr)
            findings += judge(survey)
        except ValueError as error:
            findings.append(Finding("error", None, str(error)))
    if args.collectives and not any(finding.level == "error" for finding in findings):
        measured, fault = _measure_collectives(args)
        if fault:
            findings.append(Finding("error", None, fault))
    failed = any(finding.level == "error" for finding in findings)
    if args.json:
        print(json.dumps(_make_record(findings, survey, measured), indent=2))
        return int(failed)
    print(describe_installation())
    if survey is not None:
        print(f"\n{describe_hosts(survey)}")
    if measured is not None:
        print(f"\n{collectives.describe(measured)}")
    print("", *findings, sep="\n") if findings else print("\nnothing to fix")
    return int(failed)


def describe_installation() -> str:
    """Versions, devices, and which implementation each operation takes here, one line each."""
    lines = [f"python               {platform.python_version()} on {platform.system()} {platform.machine()}"]
    for name in PACKAGES:
        lines.append(f"{name:<21}{find_version(name) or 'not installed'}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            lines.append(f"GPU {index:<17}{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        lines.append("GPU                  none; training runs on the CPU with gloo")
    lines.append(f"CPU                  {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    obstacle = find_obstacle()
    compiler = f"does not work: {obstacle}. Training runs without; on a CPU what it would compile is slower"
    lines.append(f"C++ compiler         {compiler if obstacle else find_compiler()}")
    lines += [f"tempo {name:<15}{text}" for name, text in _list_implementations().items()]
    return "\n".join(lines)


def _list_implementations() -> dict[str, str]:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        operation.title or operation.name: describe_implementation(operation.name, device_type)
        for operation in OPERATIONS.values()
        if not operation.is_for_the_asking  # Megatron's own modules, once more
    }


def describe_implementation(operation: str, device_type: str, attention: str = "flash") -> str:
    """What an operation of Tempo runs on, in the words of `doctor` and of a run's banner.

    Args:
        operation: its name in OPERATIONS.
        device_type: "cuda" or "cpu".
        attention: the TempoConfig's choice.
    """
    if device_type == "cuda":
        return attention_backend(device_type, attention) if operation == "attention" else "triton"
    if operation == "loss" or find_obstacle():
        return "plain torch"
    return "plain torch, compiled where that pays"


def describe_hosts(survey: Survey) -> str:
    """A table, a line for each host, and where rank 0 will be."""
    head = ("host", "slots", "devices", "interface", "code", "python", "torch", "clock", "/dev/shm", "disk")
    rows: list[tuple[str, ...]] = [head]
    for report in survey.reports:
        name, slots = report.host.name, str(len(report.host.slots))
        if report.error is not None:
            rows.append((name, slots, "does not answer", *[""] * 7))
            continue
        facts = report.facts
        rows.append(
            (
                name,
                slots,
                f"{facts['gpus']} GPUs" if facts["gpus"] else f"{facts['cores']} cores",
                report.interface or "?",
                str(facts["sources"]["tempo_megatron"]),
                facts["versions"]["python"],
                facts["versions"]["torch"] or "missing",
                f"{report.clock_ahead:+.1f} s",
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
    """The result of collectives.py by the deepspeed launcher, or what is wrong."""
    given = [("--hostfile", args.hostfile), ("--include", args.include), ("--exclude", args.exclude)]
    given += [("--master_addr", args.master_addr), ("--ssh_port", args.ssh_port)]
    options = [word for option, value in given if value for word in (option, str(value))]
    if not args.hostfile:
        options = ["--num_gpus", str(torch.cuda.device_count() or 2)]
    options += ["--master_port", str(args.master_port)]
    command = [sys.executable, "-m", "tempo_megatron", "launch", "deepspeed", *options]
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


def _make_record(findings: list[Finding], survey: Survey | None, measured: dict[str, Any] | None) -> dict[str, Any]:
    hosts = None
    if survey is not None:
        hosts = [
            {
                "host": report.host.name,
                "slots": list(report.host.slots),
                "error": report.error,
                "interface": report.interface,
                "clock_ahead": report.clock_ahead,
                **report.facts,
            }
            for report in survey.reports
        ]
    return {
        "ok": not any(finding.level == "error" for finding in findings),
        "findings": [{"level": f.level, "host": f.host, "text": f.text} for f in findings],
        "versions": {"python": platform.python_version(), **{name: find_version(name) for name in PACKAGES}},
        "operations": _list_implementations(),
        "hosts": hosts,
        "master_addr": survey.address if survey else None,
        "collectives": measured,
    }

"""Writes results of benchmarks, with the versions, commit and machine on which each of them depends."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import resource
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DESCRIBED = ("commit", "device", "versions")


def describe_software() -> dict[str, Any]:
    """Lists the version of every package that may change a result; None if it is not installed."""
    return {
        "torch": torch.__version__,
        "triton": find_version("triton"),
        "megatron": find_version("megatron-core"),
        "deepspeed": find_version("deepspeed"),
        "apex": find_version("apex"),
        "transformer_engine": find_version("transformer-engine"),
    }


def describe_cpu_run() -> dict[str, Any]:
    """Lists the fields at the end of every record of a measurement on a CPU."""
    device = f"cpu ({platform.machine()}), {torch.get_num_threads()} threads"
    return {"commit": find_commit(ROOT), "device": device, "versions": describe_software()}


def find_commit(root: Path) -> str | None:
    """Returns the commit, marked if the kernels differ from it; None without a repository."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)

    try:
        head = git("rev-parse", "HEAD")
        is_changed = bool(git("status", "--porcelain", "--", "kernels").stdout.strip())
    except FileNotFoundError:
        return None
    return head.stdout.strip() + ("-changed" if is_changed else "") if head.returncode == 0 else None


def find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def add_output_argument(parser: argparse.ArgumentParser, default: Path) -> None:
    parser.add_argument("--output", type=Path, default=default, help="JSON-lines file to append to")


def add_model_arguments(parser: argparse.ArgumentParser, *, micro_batch_size: int) -> None:
    """Adds the sizes of one step, by default those of GPT-2 124M at s 512."""
    parser.add_argument("--model", default=str(ROOT / "configs" / "model" / "gpt2_124m.json"), metavar="JSON")
    parser.add_argument("--seq-length", type=int, default=512, help="default %(default)s")
    parser.add_argument("--micro-batch-size", type=int, default=micro_batch_size, help="default %(default)s")
    parser.add_argument("--vocab-size", type=int, default=50304, help="default %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default %(default)s")


def record_measurement(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    output: Path,
    *,
    rounds: int,
) -> None:
    """Parses the command line, measures that many rounds, and prints the record and appends it to the output file."""
    parser.add_argument("--rounds", type=int, default=rounds, help="default %(default)s")
    add_output_argument(parser, output)
    args = parser.parse_args()
    record = measure(args)
    print(json.dumps(record, indent=2))
    append_records(args.output, [record])


def read_records(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a JSON-lines file, or none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Appends each record to the JSON-lines file as soon as the iterable yields it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        for record in records:
            stream.write(json.dumps(record) + "\n")
            stream.flush()


def _count_cpu_s() -> float:
    """Of this process and of those that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure_missing(
    path: Path, cases: Iterable[str], measure: Callable[[str], Mapping[str, Any]], *, again: bool = False
) -> None:
    """Appends a record for each case that the file does not have yet, so that a run which ended early goes on.

    Args:
        path: the JSON-lines file; every record has its case.
        cases: names.
        measure: returns the figures of a case; `cpu_s` is added unless it says its own, as one that goes on itself.
        again: begin with an empty file.
    """
    if again:
        path.unlink(missing_ok=True)
    there = {record["case"] for record in read_records(path)}
    for case in cases:
        if case not in there:
            start = _count_cpu_s()
            found = measure(case)
            record = {"case": case, "cpu_s": round(_count_cpu_s() - start, 1), **found, **describe_cpu_run()}
            append_records(path, [record])
            print(json.dumps({name: value for name, value in record.items() if name not in DESCRIBED}), flush=True)

"""Runs the benchmarks of a suite one after another; each writes JSON lines into benchmarks/results/DEVICE/.

python benchmarks/run.py                                # the suites cpu and estimate
python benchmarks/run.py --suite gpu
python benchmarks/run.py --suite cpu --only layer step
python benchmarks/report.py                             # then: docs/benchmarks.md and the cards

The suite cpu measures on this machine, with one thread; estimate follows real modules on tensors without memory, so its
figures are those of no machine; gpu is `benchmarks/gpu_suite.py first`. A benchmark that ended early goes on where it
was and one whose results are of this commit is left out; --again runs it anyway. One that fails is reported, and stops
no other. At the end the seconds of each stand beside its budget.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from measurements import RESULTS, ROOT, append_records, describe_cpu_run, find_commit, read_records


class Benchmark(NamedTuple):
    """A script of this folder, and what it writes."""

    suite: str
    command: str
    """The script, and arguments for a machine of two cores."""

    output: Path | None = None
    """The JSON lines; None where that depends on the device."""

    budget_s: int | None = None
    """Of a CPU, on a machine of two cores; those of the suite cpu are half an hour together."""

    goes_on: bool = False
    """Whether the script itself leaves out what it has, and takes --again."""


TIMES = RESULTS / "cpu" / "times.jsonl"
"""What each benchmark took; one that goes on has its seconds in its own records."""

SUITES = ("cpu", "estimate", "gpu")
BENCHMARKS = {
    "layer": Benchmark("cpu", "layer_rivals.py", RESULTS / "cpu" / "layer.jsonl", 300, goes_on=True),
    "operations": Benchmark(
        "cpu", "cpu_operations.py --threads 1 --rounds 7 --clock thread", RESULTS / "cpu" / "operations.jsonl", 640
    ),
    "step": Benchmark(
        "cpu",
        "cpu_step.py --num-layers 2 --micro-batch-size 1 --stock-attention sdpa",
        RESULTS / "cpu" / "step.jsonl",
        120,
    ),
    "context_parallel": Benchmark("cpu", "cpu_context_parallel.py", RESULTS / "cpu" / "context_parallel.jsonl", 100),
    "loss": Benchmark("cpu", "training_proof.py", RESULTS / "cpu" / "training_proof.jsonl", 640, goes_on=True),
    "model": Benchmark(
        "estimate", "estimated_models.py model", RESULTS / "estimate" / "model.jsonl", 180, goes_on=True
    ),
    "scale": Benchmark(
        "estimate", "estimated_models.py scale", RESULTS / "estimate" / "scale.jsonl", 180, goes_on=True
    ),
    "kept": Benchmark("estimate", "kept_bytes.py", RESULTS / "estimate" / "kept_bytes.jsonl", 60),
    "step_memory": Benchmark("estimate", "step_memory.py", RESULTS / "estimate" / "step_memory.jsonl", 60),
    "kernels": Benchmark("gpu", "gpu_suite.py first"),
}


def is_done(benchmark: Benchmark, commit: str | None) -> bool:
    """Whether its newest results are of this commit; a script that goes on by itself knows better."""
    if benchmark.goes_on or benchmark.output is None or commit is None:
        return False
    records = read_records(benchmark.output)
    return bool(records) and records[-1].get("commit") == commit


def run(name: str, benchmark: Benchmark, *, again: bool) -> bool:
    """Runs one benchmark and prints what it took; returns whether it ended well."""
    words = [sys.executable, "-W", "ignore", *_find_script(benchmark.command)]
    words += ["--again"] if again and benchmark.goes_on else []
    print(f"== {name}: {' '.join(words[3:])}", flush=True)
    before = _count_cpu_s()
    status = subprocess.run(words, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode
    taken = {"benchmark": name, "cpu_s": round(_count_cpu_s() - before, 1), "is_done": status == 0}
    if not benchmark.goes_on:
        append_records(TIMES, [{**taken, **describe_cpu_run()}])
    print(f"-- {name}: {taken['cpu_s']:.0f} s of a CPU{'' if status == 0 else ', failed'}", flush=True)
    return status == 0


def count_cpu_s(name: str) -> float | None:
    """The seconds of a CPU that a benchmark's results took; None where that was not measured."""
    benchmark = BENCHMARKS[name]
    if benchmark.goes_on and benchmark.output is not None:
        taken = [record.get("cpu_s") for record in read_records(benchmark.output)]
        return None if None in taken else sum(taken)
    times = [record["cpu_s"] for record in read_records(TIMES) if record["benchmark"] == name and record["is_done"]]
    return times[-1] if times else None


def tabulate_times(names: Sequence[str]) -> list[list[str]]:
    """A row for each benchmark: its suite, what its results took, and what it may take."""
    rows = [["benchmark", "suite", "CPU seconds", "may take"]]
    for name in names:
        taken, budget = count_cpu_s(name), BENCHMARKS[name].budget_s
        if budget is not None:
            note = "not measured" if taken is None else f"{taken:.0f}{'' if taken <= budget else ', **missed**'}"
            rows.append([name, BENCHMARKS[name].suite, note, str(budget)])
    return rows


def _find_script(command: str) -> list[str]:
    script, *arguments = command.split()
    return [f"benchmarks/{script}", *arguments]


def _count_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=["cpu", "estimate"], help="default cpu estimate")
    names = {name for name, one in BENCHMARKS.items()}
    parser.add_argument("--only", nargs="+", choices=sorted(names), metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--again", action="store_true", help="also those whose results are of this commit")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    args = parser.parse_args(arguments)
    chosen = {
        name: one for name, one in BENCHMARKS.items() if (name in args.only if args.only else one.suite in args.suite)
    }
    if args.list:
        for name, one in chosen.items():
            print(f"{name:18}{one.suite:10}python {' '.join(_find_script(one.command))}")
        return 0
    failed = []
    commit = find_commit(ROOT)
    for name, one in chosen.items():
        if not args.again and is_done(one, commit):
            print(f"== {name}: {one.output} has results of this commit")
        elif not run(name, one, again=args.again):
            failed.append(name)
    print(*("  ".join(f"{cell:<16}" for cell in row) for row in tabulate_times(list(chosen))), sep="\n")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

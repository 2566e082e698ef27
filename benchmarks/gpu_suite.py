"""Tests and measures the kernels on a GPU in three parts of less than 9 minutes: tests, operations, attention and loss.

python benchmarks/gpu_suite.py tests
python benchmarks/gpu_suite.py operations             # --only gelu layer_norm
python benchmarks/gpu_suite.py attention              # and the loss head and log-probabilities
python benchmarks/gpu_suite.py                        # the three, one after another
python benchmarks/gpu_suite.py --profile gelu         # the kernels of one operation
python benchmarks/gpu_suite.py --tune                 # tiles of attention's passes; again, it goes on where it stopped

Every result is written to the folder --output as soon as it is known: tests.jsonl, operations.jsonl, attention.jsonl,
and tune.jsonl with shapes.json, the kernels' table of tiles with the fastest of those timed. A
failure is reported and stops nothing else. Each operation runs forward and backward at 8192 tokens and h 4096 in
bfloat16. Its milliseconds stand beside those of a copy of the fewest bytes that the pass must move, of torch eager, of
torch.compile and of Liger's kernel. Also measured are the bytes kept for backward, the wall-clock time of small calls,
and, if time is left, torch.compile's max-autotune. Attention is compared with torch's, the loss head with torch,
torch.compile and Liger. --dry-run goes through the same without a GPU: it skips the tests and names the steps without
measuring. The exit code is 0 if every goal is met, 1 if one is missed or a test fails, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu import attention, kernel_tests, loss_head, profiling, records, tuning
from gpu.budget import Budget
from gpu.operation import Operation
from gpu.operations import OPERATIONS
from gpu.suite import LARGE, SMALL, Suite
from gpu.timing import CudaClock
from measurements import RESULTS, ROOT

from tempo_kernels.attention.kernel import find_architecture

PARTS = ("tests", "operations", "attention")
# The parts share what they compile.
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
MAX_THREADS = 8

# The kinds of steps by importance, each with the seconds expected of its first step. A later step is expected to take
# as long as the longest one so far.
FIRST_GUESS_S = {"time": 40.0, "attention": 15.0, "loss head": 25.0, "log prob": 20.0, "host": 20.0, "autotune": 40.0}
OPTIONAL = ("autotune",)
WHOLE = {
    "attention": (attention.measure, attention.SHAPES),
    "loss head": (loss_head.measure, loss_head.SHAPES),
    "log prob": (loss_head.measure_log_prob, loss_head.LOG_PROB_SHAPES),
}


def steps(suite: Suite, operations: Sequence[Operation], whole: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Yields (kind, name, function) of every step; `whole` names those of WHOLE, which are no operations of a layer."""
    for kind in FIRST_GUESS_S:
        if kind in WHOLE and kind in whole:
            measure, shapes = WHOLE[kind]
            for shape in shapes:
                call = functools.partial(measure, suite.results, suite.clock, suite.device, shape)
                yield kind, " ".join(f"{name} {size}" for name, size in shape._asdict().items()), call
        elif kind not in WHOLE:
            for operation in operations:
                yield kind, operation.name, functools.partial(getattr(suite, kind), operation)


def run_all(suite: Suite, operations: Sequence[Operation], budget: Budget, whole: Sequence[str] = ()) -> list[str]:
    """Runs every step that fits into the budget; returns a sentence for each that failed or was required but cut."""
    missing = []
    for kind, name, call in steps(suite, operations, whole):
        if not budget.allows(kind):
            say(budget, f"{kind} of {name}: not measured, {max(0.0, budget.left_s):.0f} s are left")
            if kind not in OPTIONAL:
                missing.append(f"{kind} of {name}: no time was left")
            continue
        say(budget, f"{kind} of {name}")
        with budget.step(kind):
            try:
                call()
            except Exception as error:
                traceback.print_exc()
                missing.append(f"{kind} of {name}: {type(error).__name__}: {error}")
        forget()
    return missing


def forget() -> None:
    """Frees what one operation compiled and allocated, so that it does not affect the next."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def say(budget: Budget, line: str) -> None:
    print(f"[{budget.spent_s:4.0f} s] {line}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parsed(arguments)
    if not (args.dry_run or torch.cuda.is_available()):
        print("gpu_suite: torch sees no CUDA device; run it on a machine with one, or with --dry-run", file=sys.stderr)
        return 2
    folder = args.output or (ROOT / "build" / "gpu_dry_run" if args.dry_run else RESULTS / name_device())
    for variable, name in CACHES.items():
        os.environ.setdefault(variable, str(ROOT / "build" / "gpu_cache" / name))
    torch.set_num_threads(min(MAX_THREADS, torch.get_num_threads()))
    if args.profile:
        [operation] = [operation for operation in OPERATIONS if operation.name == args.profile]
        for name, table in profiling.tables(operation, LARGE._replace(s=args.tokens // LARGE.b), "cuda"):
            print(f"{operation.name}: {name}\n{table}")
        return 0
    if args.tune:
        return tune(folder, args)
    return max(
        run_tests(folder, args) if part == "tests" else measure(part, folder, args) for part in args.part or PARTS
    )


def run_tests(folder: Path, args: argparse.Namespace) -> int:
    """Runs the tests; returns 1 if one fails or has not run."""
    print(f"the kernels' own tests; see {folder}/tests.jsonl and {folder}/tests/*.log", flush=True)
    outcome = kernel_tests.run(ROOT, folder, args.budget_s)
    print(kernel_tests.describe(folder), f"tests: {outcome}", sep="\n", flush=True)
    return int(outcome != "passed" and not args.dry_run)


def measure(part: str, folder: Path, args: argparse.Namespace) -> int:
    """Runs the steps of "operations" or "attention"; returns 1 if one fails or misses a goal, or a test failed."""
    budget, tests = Budget(args.budget_s, FIRST_GUESS_S), kernel_tests.read_outcome(folder)
    large, path = LARGE._replace(s=args.tokens // LARGE.b), folder / f"{part}.jsonl"
    results = records.Results(path, records.environment(ROOT, device_of(args), args.commit, tests))
    suite = Suite(results, device_of(args), None if args.dry_run else CudaClock(), large, SMALL)
    chosen = [one for one in OPERATIONS if part == "operations" and (not args.only or one.name in args.only)]
    whole = [one for one in WHOLE if part != "operations" and (not args.only or one.replace(" ", "_") in args.only)]
    say(budget, f"{part}; the kernels' tests: {tests}")
    if args.dry_run:
        print(*(f"{kind} of {name}" for kind, name, _ in steps(suite, chosen, whole)), sep="\n")
        return 0
    missing = ["interrupted"]
    try:
        missing = run_all(suite, chosen, budget, whole)
    except KeyboardInterrupt:
        say(budget, "interrupted")
    say(budget, "done")
    print(records.table(results.records), *records.notes(results.records), *missing, sep="\n")
    print(f"{len(results.failed)} of {len(results.records)} records miss a goal; all are in {path}")
    return 1 if missing or results.failed or tests == "failed" else 0


def tune(folder: Path, args: argparse.Namespace) -> int:
    """Times the candidates that were not timed yet; returns 1 if some are left."""
    budget, path = Budget(args.budget_s, {"tune": 30.0}), folder / "tune.jsonl"
    environment = records.environment(ROOT, device_of(args), args.commit, kernel_tests.read_outcome(folder))
    results, architecture = records.Results(path, environment), find_architecture(torch.device(device_of(args)))
    candidates = tuning.list_candidates(architecture)
    left = tuning.find_left(candidates, path, environment)
    say(budget, f"{len(left)} of {len(candidates)} candidates for the tiles of attention are left")
    clock = None if args.dry_run else CudaClock()
    while left and budget.allows("tune"):
        one = left.pop(0)
        say(budget, f"{one.walk}, d {one.head_dim}: {one.shape}")
        if not args.dry_run:
            with budget.step("tune"):
                tuning.measure(results, clock, device_of(args), architecture, one)
    if not args.dry_run:
        say(budget, f"{tuning.write_table(architecture, path, environment)} has the fastest; {len(left)} are left")
    return int(bool(left))


def device_of(args: argparse.Namespace) -> str:
    return "cpu" if args.dry_run else "cuda"


def name_device() -> str:
    """Makes a folder's name of the GPU's."""
    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [operation.name for operation in OPERATIONS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all unless one is named")
    chosen = [*names, *(name.replace(" ", "_") for name in WHOLE)]
    parser.add_argument("--only", nargs="+", choices=chosen, metavar="NAME", help=f"of {', '.join(chosen)}")
    parser.add_argument("--profile", choices=names, metavar="NAME", help="print one operation's kernels, nothing else")
    parser.add_argument("--tune", action="store_true", help="time tiles of attention's passes, nothing else")
    parser.add_argument("--budget-s", type=float, default=520.0, help="in which a part ends (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=LARGE.tokens, help="fewer for a small GPU (default %(default)s)")
    parser.add_argument("--commit", help="for the records, where the folder is a copy without its repository")
    parser.add_argument("--output", type=Path, help="folder for results (default: benchmarks/results/DEVICE)")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, measuring nothing")
    args = parser.parse_args(arguments)
    for part in args.part:
        if part not in PARTS:
            parser.error(f"{part} is no part; expected {', '.join(PARTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())

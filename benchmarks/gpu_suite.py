"""First contact with a GPU: the kernels' tests, the operations, and attention and the loss head, under 9 minutes each.

python benchmarks/gpu_suite.py tests
python benchmarks/gpu_suite.py operations             # --only gelu layer_norm
python benchmarks/gpu_suite.py attention              # and the loss head and log-probabilities
python benchmarks/gpu_suite.py                        # the three, one after another
python benchmarks/gpu_suite.py --profile gelu         # the kernels of one operation

Every result is in the folder --output as soon as it is there: tests.jsonl, operations.jsonl, attention.jsonl. What
fails is told and stops nothing else. For each operation: forward and backward at 8192 tokens and h 4096 in bfloat16,
milliseconds beside the device's own copy of the fewest bytes that the pass must move, beside torch eager, torch.compile
and Liger's kernel, the bytes kept for backward, the wall-clock time of small calls, and, in what time is left,
torch.compile's max-autotune. Attention stands beside torch's, the loss head beside torch, torch.compile and Liger.
--dry-run goes through the same without a GPU: the tests are skipped one by one, steps are told and not measured. Exit
code: 0 where every goal is met, 1 where one is not or a test fails, 2 without a GPU.
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
from gpu import attention, kernel_tests, loss_head, profiling, records
from gpu.budget import Budget
from gpu.operation import Operation
from gpu.operations import OPERATIONS
from gpu.suite import LARGE, SMALL, Suite
from gpu.timing import CudaClock
from measurements import RESULTS, ROOT

PARTS = ("tests", "operations", "attention")
# What a part compiled, the next one finds.
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
MAX_THREADS = 8

# The steps in the order of their importance, and seconds for the first of each; a later one is taken for as long as
# the longest so far.
FIRST_GUESS_S = {"time": 40.0, "attention": 15.0, "loss head": 25.0, "log prob": 20.0, "host": 20.0, "autotune": 40.0}
OPTIONAL = ("autotune",)
WHOLE = {
    "attention": (attention.measure, attention.SHAPES),
    "loss head": (loss_head.measure, loss_head.SHAPES),
    "log prob": (loss_head.measure_log_prob, loss_head.LOG_PROB_SHAPES),
}


def steps(suite: Suite, operations: Sequence[Operation], whole: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """(kind, name, what to call) of every step; `whole` names those of WHOLE, which are not operations of a layer."""
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
    """Every step that the budget has time for; returns a sentence for each that failed or, being required, was cut."""
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
    """What one operation compiled and allocated shall not weigh on the next."""
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
    return max(
        run_tests(folder, args) if part == "tests" else measure(part, folder, args) for part in args.part or PARTS
    )


def run_tests(folder: Path, args: argparse.Namespace) -> int:
    """1 if one fails or has not run."""
    print(f"the kernels' own tests; see {folder}/tests.jsonl and {folder}/tests/*.log", flush=True)
    outcome = kernel_tests.run(ROOT, folder, args.budget_s)
    print(kernel_tests.describe(folder), f"tests: {outcome}", sep="\n", flush=True)
    return int(outcome != "passed" and not args.dry_run)


def measure(part: str, folder: Path, args: argparse.Namespace) -> int:
    """The steps of "operations" or of "attention"; 1 if one of them fails or misses a goal, or a test failed before."""
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


def device_of(args: argparse.Namespace) -> str:
    return "cpu" if args.dry_run else "cuda"


def name_device() -> str:
    """The GPU's name as a folder's."""
    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [operation.name for operation in OPERATIONS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all unless one is named")
    chosen = [*names, *(name.replace(" ", "_") for name in WHOLE)]
    parser.add_argument("--only", nargs="+", choices=chosen, metavar="NAME", help=f"of {', '.join(chosen)}")
    parser.add_argument("--profile", choices=names, metavar="NAME", help="print one operation's kernels, nothing else")
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

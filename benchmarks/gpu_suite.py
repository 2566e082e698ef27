"""The operations on one GPU: right, then close to its copy bandwidth, then ahead of everyone else.

python benchmarks/gpu_suite.py                        # under 9 minutes; appends to benchmarks/results/gpu_suite.jsonl
python benchmarks/gpu_suite.py --only gelu layer_norm
python benchmarks/gpu_suite.py --profile gelu         # the kernels of one operation

First the kernels' own tests. Then, for each operation, forward and backward at 8192 tokens and h 4096 in bfloat16:
milliseconds beside the device's own copy of the fewest bytes that the pass must move, beside torch eager, torch.compile
and Liger's kernel, and the bytes kept for backward. Then attention beside torch's, the loss head, the log-probabilities
of labels, the wall-clock time of small calls, and, in what time is left, torch.compile's max-autotune. Exit code: 0
where every goal is met, 1 where one is not or a test fails, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from gpu import attention, kernel_tests, loss_head, profiling, records
from gpu.budget import Budget
from gpu.operation import Operation
from gpu.operations import OPERATIONS
from gpu.suite import LARGE, SMALL, Suite
from gpu.timing import CudaClock
from measurements import RESULTS, ROOT, add_output_argument

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
    if not torch.cuda.is_available():
        print("gpu_suite: torch sees no CUDA device; run it on a machine with one", file=sys.stderr)
        return 2
    large = LARGE._replace(s=args.tokens // LARGE.b)
    chosen = [operation for operation in OPERATIONS if not args.only or operation.name in args.only]
    if args.profile:
        [operation] = [operation for operation in OPERATIONS if operation.name == args.profile]
        for name, table in profiling.tables(operation, large, "cuda"):
            print(f"{operation.name}: {name}\n{table}")
        return 0
    budget = Budget(args.budget_s, FIRST_GUESS_S)
    tests = "skipped"
    if args.tests != "skip":
        say(budget, "the kernels' own tests")
        tests = "passed" if kernel_tests.passed(ROOT, budget.left_s) else "failed"
        if tests == "failed" and args.tests == "stop":
            print("gpu_suite: the kernels' tests fail, so no speed is measured; --tests go-on measures all the same")
            return 1
    results = records.Results(args.output, records.environment(ROOT, "cuda", args.commit, tests))
    missing = ["interrupted"]
    try:
        whole = [name for name in WHOLE if not args.only or name.replace(" ", "_") in args.only]
        missing = run_all(Suite(results, "cuda", CudaClock(), large, SMALL), chosen, budget, whole)
    except KeyboardInterrupt:
        say(budget, "interrupted")
    say(budget, "done")
    print(records.table(results.records), *records.notes(results.records), *missing, sep="\n")
    print(f"{len(results.failed)} of {len(results.records)} records miss a goal; all are in {args.output}")
    return 1 if missing or results.failed or tests == "failed" else 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [operation.name for operation in OPERATIONS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    chosen = [*names, *(name.replace(" ", "_") for name in WHOLE)]
    parser.add_argument("--only", nargs="+", choices=chosen, metavar="NAME", help=f"of {', '.join(chosen)}")
    parser.add_argument("--profile", choices=names, metavar="NAME", help="print one operation's kernels, nothing else")
    parser.add_argument("--budget-s", type=float, default=520.0, help="in which all ends (default %(default)s)")
    parser.add_argument(
        "--tests", choices=("stop", "go-on", "skip"), default="stop", help="if they fail (default stop)"
    )
    parser.add_argument("--tokens", type=int, default=LARGE.tokens, help="fewer for a small GPU (default %(default)s)")
    parser.add_argument("--commit", help="for the records, where the folder is a copy without its repository")
    add_output_argument(parser, RESULTS / "gpu_suite.jsonl")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

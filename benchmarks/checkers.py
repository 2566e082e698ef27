"""Runs other people's checkers, none of which needs a GPU, over every launch of every kernel.

python benchmarks/checkers.py ttsem                                # accesses out of bounds, races, undefined results
python benchmarks/checkers.py triton-viz --cases "gelu*bf16"       # accesses out of bounds, in Triton's interpreter
python benchmarks/checkers.py sentryward --kernels "*backward*"    # races and lost synchronisation, in PTX of sm_100
python benchmarks/checkers.py cuxray --capability 80               # spills in loops, bank conflicts, in machine code

The cases are those of benchmarks/gpu/right.py, through the public functions. A line for each kernel says `passed`,
`finding` (the kernel's line and the input) or `not supported` (why), and of how many launches. ttsem and triton-viz
execute the kernels, so that results are held against float64, too; the others only compile them. Known to be the
checkers': Triton's interpreter multiplies bf16 as integers, and triton-viz shifts the bounds of views that begin behind
their storage's first element. The race that sentryward sees inside of one `tl.sum` is of Triton's own code.

Each checker wants an environment of its own, with Python 3.12:
    pip install torch ttsem triton==3.8.0
    pip install torch triton-viz==3.0 triton==3.6.0 "numpy<2.4"    # and TRITON_INTERPRET=1
    pip install torch sentryward
    pip install torch cuxray
"""

from __future__ import annotations

import argparse
import builtins
import collections
import contextlib
import fnmatch
import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu import right  # which finds tests/support, too
from gpu.steps import Wrong
from replaced_kernels import replace_kernels

ahead_of_time = importlib.import_module("ahead_of_time")
Verdict = tuple[str, str]  # one of passed, finding and not supported; and what there is to say
Check = Callable[[Any], tuple[Verdict, bool]]
"""Executes a launch. Returns the verdict, and whether there are results to go on with."""
Found = dict[tuple[str, Verdict], list[str]]
"""The cases by kernel and verdict."""


def execute(open_checker: Callable[[int], Any], case: right.Case, args: argparse.Namespace, found: Found) -> None:
    """Runs a case with its launches executed by a checker, and compares the results."""
    checks: list[Check] = []

    def take(launch: Any) -> None:
        verdict, has_results = checks[-1](launch)
        if fnmatch.fnmatch(launch.name, args.kernels):
            found[launch.name, verdict].append(case.name)
        if not has_results:
            raise RuntimeError(f"{launch.name}: {verdict[0]}")

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with replace_kernels(take, with_assembler=False), open_checker(args.capability) as check:
            checks.append(check)
            yield

    try:
        told = right.check(case, "cpu", around)["answer"]
    except Wrong as wrong:
        told = f"wrong: {wrong}"
        found["results", ("finding", str(wrong))].append(case.name)
    except Exception as error:
        told = f"ended by {type(error).__name__}: {error}".partition("\n")[0]
    print(f"  {case.name}: {told}", flush=True)


@contextlib.contextmanager
def open_ttsem(capability: int) -> Iterator[Check]:
    from ttsem import sanitize

    def describe(fault: Any, kernel: Any) -> Verdict:  # inside of a device function it knows no line
        line = fault.source_line or kernel.fn.__code__.co_firstlineno
        return "finding", f"line {line}, {fault.kind} of {fault.buffer}"

    with sanitize.session(capability, races="record", inductor_lookback=False) as session:

        def check(launch: Any) -> tuple[Verdict, bool]:
            races, unchecked = len(session.races), session.races_unchecked
            try:
                launch.kernel[launch.grid](**launch.arguments, **launch.options)
            except sanitize.KernelFault as stop:
                return describe(stop.fault, launch.kernel), False
            except sanitize.Unjudged as stop:
                return ("not supported", (", ".join(stop.unsupported) or str(stop)).partition("\n")[0][:200]), False
            if len(session.races) > races:
                return describe(session.races[-1], launch.kernel), True
            return ("passed", "too large for its check of races" if session.races_unchecked > unchecked else ""), True

        yield check


@contextlib.contextmanager
def open_triton_viz(capability: int) -> Iterator[Check]:
    import triton_viz
    from triton_viz.clients import Sanitizer
    from triton_viz.core import patch

    vars(builtins)["_triton_viz_loop_patcher"] = patch._loop_patcher  # which it gives to the kernel's module alone

    def check(launch: Any) -> tuple[Verdict, bool]:
        launch.kernel[launch.grid](**launch.arguments, **launch.options)  # the sanitizer itself computes no results
        sanitizer = Sanitizer(abort_on_error=False)
        try:
            triton_viz.trace(client=sanitizer)(launch.kernel)[launch.grid](**launch.arguments, **launch.options)
        except Exception as error:
            return ("not supported", f"{type(error).__name__}: {error}".partition("\n")[0][:200]), True
        for one in sanitizer.records:
            at = one.user_code_tracebacks[-1]
            return ("finding", f"line {at.lineno} of {Path(at.filename).name}, outside of {one.tensor_name}"), True
        return ("passed", ""), True

    yield check


def compile_only(checker: Callable[..., Verdict], case: right.Case, args: argparse.Namespace, found: Found) -> None:
    """Runs a case without its launches; each is compiled and checked."""
    capability = 100 if checker is check_by_sentryward else args.capability

    def take(launch: Any) -> None:
        if fnmatch.fnmatch(launch.name, args.kernels):
            found[launch.name, checker(launch, ahead_of_time.compiled(launch, capability))].append(case.name)

    with replace_kernels(take):
        right.run(case.function, right.make_inputs(case))
    print(f"  {case.name}", flush=True)


def check_by_sentryward(launch: Any, kernel: Any) -> Verdict:
    from sentryward import verify

    fields: dict[str, list[Any]] = {"declarations": [], "arguments": []}
    kinds = re.findall(r"^\s*\.param \.(\w+)", kernel.asm["ptx"], re.MULTILINE)
    for place, value in enumerate(ahead_of_time.list_parameters(launch)):
        if isinstance(value, torch.Tensor):  # tensors of one storage are one object to it
            named = {"type": "pointer", "space": "global", "object": f"at {value.untyped_storage().data_ptr()}"}
            fields["declarations"].append({"parameter": place, **named})
        else:
            number = value if kinds[place].startswith("f") else int(value) % 2 ** int(kinds[place][1:])
            fields["arguments"].append({"parameter": place, "type": kinds[place], "value": number})
    sizes = {"grid_dim": [*launch.grid, 1, 1][:3], "block_dim": [32 * kernel.metadata.num_warps, 1, 1]}
    with tempfile.TemporaryDirectory() as folder:
        ptx, config = Path(folder, "kernel.ptx"), Path(folder, "input.json")
        ptx.write_text(kernel.asm["ptx"], encoding="utf-8")
        given = {
            "schema": "spverify.kernel-input/v1",
            "launch": sizes | {"dynamic_shared_bytes": kernel.metadata.shared},
        }
        config.write_text(json.dumps(given | fields), encoding="utf-8")
        found = verify(ptx, input=config, timeout_seconds=60, memory_limit_mib=6144)
    if found["result"] == "race_free":
        return "passed", ""
    told = ", ".join(dict.fromkeys(one["code"] for one in found["diagnostics"]))
    status = found["result"]
    is_finding = status in ("not_wellsynced", "potential_race", "invalid_lifecycle")
    return "finding" if is_finding else "not supported", f"{status}: {told}"[:200]


def check_by_cuxray(launch: Any, kernel: Any) -> Verdict:
    import cuxray

    # Triton's tools, so that nothing is downloaded. They show it no loops, which ours find.
    os.environ |= {"CUXRAY_TOOLCHAIN": str(ahead_of_time.TOOLS), "CUXRAY_NO_FETCH": "1"}
    threads, shared = str(32 * kernel.metadata.num_warps), kernel.metadata.shared
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        made = cuxray.build_report(file.name, cuxray.resolve(), threads, smem_dynamic=shared, fast=True)
    ways = (made["units"][0]["kernels"][0]["access"] or {}).get("worst_bank_conflict_ways") or 1
    told = ["spills in a loop"] * bool(ahead_of_time.list_spills_in_loops(kernel.asm["cubin"]))
    told += [f"bank conflicts of {ways} ways"] * (ways > 1)
    return ("finding", ", ".join(told)) if told else ("passed", "")


CHECKERS: dict[str, Any] = {
    "ttsem": (execute, open_ttsem),
    "triton-viz": (execute, open_triton_viz),
    "sentryward": (compile_only, check_by_sentryward),
    "cuxray": (compile_only, check_by_cuxray),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checker", choices=CHECKERS)
    parser.add_argument("--kernels", default="*", metavar="GLOB", help="of kernels, as 'norm.*_backward_kernel'")
    parser.add_argument("--cases", default="*", metavar="GLOB", help="of cases, as 'layer_norm*bf16'")
    parser.add_argument("--capability", type=int, default=90, choices=(80, 90, 100), help="default 90")
    args = parser.parse_args(argv)
    run, checker = CHECKERS[args.checker]
    found: Found = collections.defaultdict(list)
    with contextlib.suppress(KeyboardInterrupt):
        for case in right.list_cases():
            if fnmatch.fnmatch(case.name, args.cases):
                run(checker, case, args, found)
    for (kernel, (status, text)), cases in sorted(found.items()):
        print(f"{kernel}: {status}, {len(cases)} launches{f': {text} (first in: {cases[0]})' if text else ''}")
    return int(any(status == "finding" for _, (status, _) in found))


if __name__ == "__main__":
    sys.exit(main())

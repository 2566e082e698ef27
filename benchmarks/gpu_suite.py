"""Answers three questions on a GPU within eight minutes: is it right, is the memory what we say, is it fast?

python benchmarks/gpu_suite.py first --output FOLDER      # the same with --resume FOLDER goes on
python benchmarks/gpu_suite.py first --dry-run            # the plan, then all of it at a tiny size on a CPU
python benchmarks/gpu_suite.py first --dry-run --interpret # the same; Triton's interpreter runs the kernels
python benchmarks/gpu_suite.py first --compile-only       # fills build/gpu_cache, which can be carried to the GPU
python benchmarks/gpu_suite.py report FOLDER              # tables, and what has to be changed
python benchmarks/gpu_suite.py predict                    # benchmarks/gpu/predicted.json, on any machine

Each answer is a line of FOLDER/first.jsonl as soon as it is known; FOLDER/first.log has what the steps printed. A step
that fails, hangs, or runs out of memory is one line and stops nothing. The exit status is 0 if every step that ran is
right, 1 if one is not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from gpu import models, plan, report, right
from gpu.steps import FAILED, NOT_ENDED, run_plan
from measurements import RESULTS, ROOT, describe_software, find_commit, read_records

SECONDS = 480.0


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    plan.use_cache()
    if args.command == "first":
        return run_first(args)
    if args.command == "report":
        return report.write(args.folder)
    if args.command == "predict":
        models.PREDICTED.write_text(json.dumps(models.predict(), indent=1) + "\n", encoding="utf-8")
    elif args.command == "compile":
        plan.compile_share(args.arch, args.share)
    else:
        right.run_sanitized()
    return 0


def run_first(args: argparse.Namespace) -> int:
    is_gpu = torch.cuda.is_available()
    if args.interpret and not args.dry_run:
        print("gpu_suite: --interpret runs kernels on a CPU; give it with --dry-run", file=sys.stderr)
        return 2
    if args.compile_only:
        print(plan.compile_ahead(plan.Options("cuda", Path(), args.arch))["answer"])
        packed = Path(shutil.make_archive(str(plan.CACHE), "gztar", plan.CACHE))
        print(f"{packed} has {packed.stat().st_size / 2**20:.0f} MiB")
        return 0
    if not (args.dry_run or is_gpu):
        print("gpu_suite: torch sees no CUDA device; run it on a machine with one, or with --dry-run", file=sys.stderr)
        return 2
    name = "dry_run" if args.dry_run else name_device()
    folder = args.resume or args.output or (ROOT / "build" / name if args.dry_run else RESULTS / name)
    if args.resume is None:
        (folder / "first.jsonl").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    options = plan.Options("cpu" if args.dry_run else "cuda", folder, args.arch, args.wheels, args.interpret)
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # for the process that runs the steps
    on_gpu, steps = plan.list_steps(options._replace(device="cuda")), plan.list_steps(options)
    print(*plan.describe(on_gpu, args.seconds), sep="\n", flush=True)
    about = {"device": torch.cuda.get_device_name() if is_gpu else "cpu", "cuda": torch.version.cuda}
    about |= {"commit": args.commit or find_commit(ROOT), **describe_software()}
    # A dry run asks whether everything runs, not how fast.
    seconds, patience = (7200.0, 10.0) if args.dry_run else (args.seconds, 1.0)
    run_plan(steps, functools.partial(plan.list_steps, options), folder, seconds, about, patience)
    print(*report.summarise(folder), sep="\n")
    return int(any(one["outcome"] in (FAILED, NOT_ENDED) for one in read_records(folder / "first.jsonl")))


def name_device() -> str:
    """Makes a folder's name of the GPU's."""
    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    first = commands.add_parser("first", help="right, memory, fast")
    first.add_argument("--output", type=Path, help="folder for the results (default: benchmarks/results/DEVICE)")
    first.add_argument("--resume", type=Path, metavar="FOLDER", help="run what this folder has no answer for yet")
    first.add_argument("--seconds", type=float, default=SECONDS, help="in which it ends (default %(default)s)")
    first.add_argument(
        "--wheels", type=Path, metavar="DIR", help="liger-kernel, megatron-core, deepspeed and what they need"
    )
    first.add_argument("--commit", help="for the records, where the folder is a copy without its repository")
    first.add_argument("--dry-run", action="store_true", help="without a GPU, at a tiny size")
    first.add_argument("--interpret", action="store_true", help="with --dry-run: kernels in Triton's interpreter")
    first.add_argument("--compile-only", action="store_true", help="compile the kernels and end; needs no GPU")
    told = commands.add_parser("report", help="tables of a folder's results, and what has to be changed")
    told.add_argument("folder", type=Path)
    commands.add_parser("predict", help="write what the memory is expected to be")
    share = commands.add_parser("compile", help="a share of the cases, for `first`")
    share.add_argument("--share", default="0/1", metavar="I/N")
    for each in (first, share):
        each.add_argument("--arch", type=int, default=90, help="compute capability times 10 (default %(default)s)")
    commands.add_parser("sanitized", help="what compute-sanitizer watches, for `first`")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

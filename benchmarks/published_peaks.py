"""Holds the estimate against peaks that others measured and published.

    python benchmarks/published_peaks.py benchmarks/published/megatron.json                 # a table of all rows
    python benchmarks/published_peaks.py FILE --only gpt3_7b --json rows.json
    python benchmarks/published_peaks.py FILE --write-docs                                  # docs/published_peaks.md

A row has the arguments of a run of pretrain_gpt.py, pretrain_bert.py or pretrain_t5.py, and what its last rank counted
as allocated: between two steps, and at most. What is not published is what brings the bytes at rest nearest: of a
cluster without a size the data-parallel size, a power of two; on GB200, without deterministic mode, one of the two
sizes of torch's workspaces, which torch 2.12 enlarged. A row with `releases_outer_weights` was recorded before
378d81fbd3 of Megatron-LM, since which Megatron-FSDP keeps those between steps. A row with `of_another_run` has figures
that are not those of its arguments from a fresh start, and says how that is known: it counts, and the others are
counted without it, too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_DOCS = ROOT / "docs" / "published_peaks.md"
_PLOT = ROOT / "docs" / "images" / "published_peaks.png"
_BEGIN, _END = "<!-- published: begin -->", "<!-- published: end -->"
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Result:
    """A row, and what the estimate says of it."""

    id: str
    measured_rest: int
    measured_peak: int
    rest: int | None = None
    peak: int | None = None
    world_size: int | None = None
    seconds: float = 0.0
    """Of a CPU."""

    refusal: str | None = None
    of_another_run: str | None = None
    """How it is known that what was measured is not of these arguments."""

    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def rest_error(self) -> float:
        """In percent."""
        assert self.rest is not None
        return 100 * (self.rest / self.measured_rest - 1)

    @property
    def peak_error(self) -> float:
        """In percent."""
        assert self.peak is not None
        return 100 * (self.peak / self.measured_peak - 1)


def estimate_row(row: Mapping[str, Any]) -> Result:
    """What the estimate says of one row's last rank."""
    measured = (row["id"], row["allocated_at_rest_bytes"], row["peak_allocated_bytes"])
    begin = time.process_time()
    try:
        world_size = row["world_size"] or _find_world_size(row)
        last = min(
            (_estimate(row, world_size, workspace) for workspace in _list_workspaces(row)),
            key=lambda rank: abs(rank.at_rest_bytes - measured[1]),
        )
    except ValueError as error:
        return Result(*measured, seconds=time.process_time() - begin, refusal=str(error))
    found = (last.at_rest_bytes, last.peak_bytes, world_size, time.process_time() - begin)
    return Result(*measured, *found, of_another_run=row.get("of_another_run"), parts=last.parts)


def _list_workspaces(row: Mapping[str, Any]) -> list[str]:
    """What CUBLAS_WORKSPACE_CONFIG may be by the version of torch; an empty one says nothing."""
    depends = row["id"].endswith("_gb200") and "--deterministic-mode" not in row["args"]
    return [":4096:2:16:8", ":4096:8"] if depends else [""]


def _estimate(row: Mapping[str, Any], world_size: int, workspace: str = "") -> Any:
    """The estimate of the last rank."""
    from tempo_megatron.memory.megatron.command import spell_arguments, split_command
    from tempo_megatron.memory.megatron.read_command import read_command
    from tempo_megatron.memory.rank.estimate import estimate_ranks

    arguments = row["args"]
    family = next((family for family in ("bert", "t5") if row["id"].startswith(f"{family}/")), "gpt")
    family = "hybrid" if "--hybrid-layer-pattern" in arguments else family
    environment = row.get("env", {}) | ({"CUBLAS_WORKSPACE_CONFIG": workspace} if workspace else {})
    launcher = [f"{name}={value}" for name, value in environment.items()]
    command = split_command([*launcher, f"pretrain_{family}.py", *spell_arguments(arguments)])
    # CASE:dev_dgx_h100
    gpu = row["id"].rpartition("_")[2]
    run, _ = read_command(command, world_size=world_size, gpu=gpu)
    if row.get("releases_outer_weights"):
        fsdp = dataclasses.replace(run.optimizer.fsdp, keeps_outer_weights=False)
        run = dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, fsdp=fsdp))
    return estimate_ranks(run, only=run.layout.pp - 1)[0]


def _find_world_size(row: Mapping[str, Any]) -> int:
    """The GPUs with which the estimate at rest is nearest to what was measured."""
    arguments = row["args"]

    def read(*names: str) -> int:
        return math.prod(int(arguments.get(f"--{name}-parallel-size", 1)) for name in names)

    tensor = int(arguments.get("--expert-tensor-parallel-size", read("tensor-model")))
    of_experts = read("expert-model") * tensor if "--num-experts" in arguments else 1
    smallest = math.lcm(read("tensor-model", "context"), of_experts) * read("pipeline-model")
    if "--use-distributed-optimizer" not in arguments:
        return smallest
    errors: dict[int, int] = {}
    for size in (smallest * 2**n for n in range(11)):
        try:
            errors[size] = abs(_estimate(row, size).at_rest_bytes - row["allocated_at_rest_bytes"])
        except ValueError:
            # The batch does not divide so; with one size, that is what is said of the row.
            if not errors and size == smallest:
                raise
    return min(errors, key=lambda size: errors[size])


def format_result(result: Result) -> str:
    """A line for a terminal."""
    line = f"{result.id:<110} {result.measured_rest / _MIB:>10.1f}"
    peak = f"{result.measured_peak / _MIB:>10.1f}"
    if result.rest is None or result.peak is None:
        return f"{line} {'':>19} {peak}  {result.refusal}"
    return (
        f"{line} {result.rest / _MIB:>10.1f} {result.rest_error:>+7.2f}% {peak} {result.peak / _MIB:>10.1f} "
        f"{result.peak_error:>+7.2f}% {result.seconds:>5.1f} s"
    )


def summarize(results: Sequence[Result]) -> str:
    """How many rows are expressed, and how near the estimate is."""
    found = [each for each in results if each.rest is not None]
    if not found:
        return f"0 of {len(results)} rows are expressed"
    slowest = max(each.seconds for each in found)
    own = [each for each in found if each.of_another_run is None]
    without = f" (without the {len(found) - len(own)} marked, of another run: {_count_near(own)})"
    near = _count_near(found) + (without if len(own) < len(found) else "")
    return f"{len(found)} of {len(results)} rows are expressed: {near}; the slowest took {slowest:.1f} s of a CPU"


def _count_near(found: Sequence[Result]) -> str:
    at_rest = sum(abs(each.rest_error) <= 0.5 for each in found)
    at_peak = sum(abs(each.peak_error) <= 3 for each in found)
    under = sum(each.peak_error < -3 for each in found)
    return f"at rest within 0.5 % on {at_rest}, peak within 3 % on {at_peak}, {under} under by more than 3 %"


def write_docs(results: Sequence[Result]) -> None:
    """The table of docs/published_peaks.md, of the rows that are not near, and the plot of all."""
    near = sum(_is_near(each) for each in results)
    lines = [
        summarize(results) + ".",
        "",
        f"{near} rows are within 0.5 % at rest and within 1 % at the peak. The others:",
        "",
        "| run | at rest, MiB | estimated | | peak, MiB | estimated | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in (each for each in results if not _is_near(each)):
        rest, peak = f"{each.measured_rest / _MIB:,.0f}", f"{each.measured_peak / _MIB:,.0f}"
        if each.rest is None or each.peak is None:
            lines.append(f"| {each.id} | {rest} | | | {peak} | | {each.refusal} |")
            continue
        lines.append(
            f"| {each.id}{_mark(each)} | {rest} | {each.rest / _MIB:,.0f} | {each.rest_error:+.2f} % | {peak} | "
            f"{each.peak / _MIB:,.0f} | {each.peak_error:+.2f} % |"
        )
    lines += [f"\n{_mark(each).strip()} {each.id}: {each.of_another_run}" for each in results if each.of_another_run]
    before, _, rest = _DOCS.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    _DOCS.write_text("\n".join([before + _BEGIN, *lines, _END + after]), encoding="utf-8")
    plot(results, _PLOT)


def _is_near(result: Result) -> bool:
    is_expressed = result.rest is not None and result.peak is not None
    return is_expressed and abs(result.rest_error) <= 0.5 and abs(result.peak_error) <= 1


def _mark(result: Result) -> str:
    return "" if result.of_another_run is None else r" \*"


def plot(results: Sequence[Result], png: Path) -> None:
    """Estimated over measured, between two steps and at the peak; the band is 3 %."""
    from tempo_megatron.plots import COLOURS, GRID, INK, import_pyplot, save, tidy

    pyplot = import_pyplot("--write-docs")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    found = [each for each in results if each.rest is not None]
    axes.axhspan(-3, 3, color=GRID, alpha=0.5)
    axes.axhline(0, color=INK, linewidth=1)
    errors = {
        "between two steps": [(each.measured_rest, each.rest_error) for each in found],
        "peak": [(each.measured_peak, each.peak_error) for each in found],
    }
    for colour, (name, points) in zip(COLOURS, errors.items(), strict=False):
        measured, error = zip(*points, strict=True)
        axes.plot([size / 2**30 for size in measured], error, "o", color=colour, label=name, markersize=5, alpha=0.7)
    ticks = [0.25, 0.5, 1, 2, 4, 8, 16, 32, 64]
    axes.set(xscale="log", xlabel="measured, GiB", ylabel="estimated over measured, %")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    tidy(axes)
    axes.legend(frameon=False)
    save(figure, png)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each row, then how many are near."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a JSON with megatron_goldens")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose id holds TEXT")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results to OUT too")
    parser.add_argument("--write-docs", action="store_true", help="write docs/published_peaks.md and its plot")
    args = parser.parse_args(argv)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # So that no row's seconds have it.
    importlib.import_module("tempo_megatron.memory.rank.estimate")
    results = []
    for row in json.loads(args.file.read_text(encoding="utf-8"))["megatron_goldens"]:
        if args.only not in row["id"]:
            continue
        with contextlib.redirect_stderr(io.StringIO()):
            results.append(estimate_row(row))
        print(format_result(results[-1]), flush=True)
    print(summarize(results))
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(each) for each in results], indent=1) + "\n")
    if args.write_docs:
        write_docs(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes the tables of docs/order.md from results/*/roam.jsonl and roam_runs.jsonl; a case's last line counts.

python benchmarks/roam_tables.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from roam_models import CASES, RESULTS, ROOT, RUNS

DOCS = ROOT / "docs/order.md"
BEGIN, END = "<!-- roam table begins -->", "<!-- roam table ends -->"
_KINDS = ("eager", "ordered", "arena")


def write_tables() -> None:
    """Writes a row for the last line of each case in fp32 into docs/order.md, and of each run."""
    planned, runs = (
        {line["model"]: line for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
        for path in (RESULTS, RUNS)
    )
    lines = [planned[case] for case in CASES if case in planned]
    rows = [
        "| model, batch | eager | with fragmentation | Inductor | LESCEA + LLFB | this plan | lower bound "
        "| less than eager |",
        "|---|" + "---|" * 7,
        *(_format_plan(line) for line in lines if line["model"].endswith("fp32")),
        "",
        "| run on a CPU | planned | measured | eager, counted | eager, measured | arena and rest, measured | eager s "
        "| in order s | in an arena s |",
        "|---|" + "---|" * 8,
        *(_format_run(runs[case]) for case in CASES if case in runs),
    ]
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    DOCS.write_text(before + BEGIN + "\n" + "\n".join(rows) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


# The figures that the arena is compared with, titled as the paper's averages.
_BASES = ("eager_bytes", "eager_reserved_bytes", "lescea_llfb_bytes")


def _find_gain(line: dict[str, Any], base: str) -> float:
    """Returns by how many per cent the planned arena is below a figure of the same line."""
    return 100 - 100 * float(line["plan_arena_bytes"]) / float(line[base])


def _format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _format_mib(line: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [f"{line[name] / 2**20:.1f}" for name in names]


def _format_plan(line: dict[str, Any]) -> str:
    sizes = "eager eager_reserved inductor lescea_llfb plan".split()
    return _format_row(
        [
            line["model"].removesuffix(" fp32"),
            *_format_mib(line, [*(f"{size}_bytes" for size in sizes), "lower_bound"]),
            f"{_find_gain(line, 'eager_bytes'):.1f} %",
        ]
    )


def _format_averages(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Formats the means over the paper's cases (its seven models, fp32, batch 1 and 32), and over all cases."""
    names = "alexnet vgg11 mnasnet0_5 mobilenet_v2 efficientnet_b0 vit_b_16 bert".split()
    paper = {f"{name} {batch} fp32" for name in names for batch in (1, 32)}
    chosen = {
        "the paper's cases": [line for line in lines if line["model"] in paper],
        "of them with one sample": [line for line in lines if line["model"] in paper and " 1 " in line["model"]],
        "all cases": list(lines),
    }
    rows = [
        "| mean of | cases | less than eager | with fragmentation | less than LESCEA + LLFB | arena within 0.1 % of "
        "its bound |",
        "|---|" + "---|" * 5,
        "| the paper's own figures | 14 | 16.0 % | 35.7 % | 13.3 % | 14 |",
    ]
    for title, found in chosen.items():
        gains = (sum(_find_gain(line, base) for line in found) / len(found) for base in _BASES)
        tight = sum(line["plan_arena_bytes"] <= 1.001 * line["arena_lower_bound"] for line in found)
        rows.append(_format_row([title, str(len(found)), *(f"{gain:.1f} %" for gain in gains), str(tight)]))
    return rows


def _format_run(line: dict[str, Any]) -> str:
    names = "planned_bytes measured_bytes eager_bytes measured_eager_bytes measured_arena_bytes".split()
    return _format_row([line["model"], *_format_mib(line, names), *(str(line[f"{kind}_s"]) for kind in _KINDS)])


if __name__ == "__main__":
    write_tables()

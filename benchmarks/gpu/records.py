"""Results as JSON lines, the goals they are held against, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measurements import append_records, describe_software, find_commit

from gpu.implementations import liger_version
from gpu.operation import Operation, Sizes

SHARE_OF_COPY = 0.92
HOST_US = 40.0

# {"share_of_copy": {"at_least": 0.92, "found": 0.95}}
Goals = dict[str, dict[str, float]]


def goals_of_time(ms: float, copy_ms: float, others: Mapping[str, float]) -> Goals:
    """Close to the time of the device's own copy of the same bytes, and less than that of the fastest of the others."""
    return {"share_of_copy": {"at_least": SHARE_OF_COPY, "found": copy_ms / ms}, **_less_than_all("time", ms, others)}


def goals_of_kept(kept_bytes: int, others: Mapping[str, int]) -> Goals:
    return _less_than_all("bytes", kept_bytes, others)


def goals_of_host(us: float) -> Goals:
    return {"host_us": {"at_most": HOST_US, "found": us}}


def _less_than_all(name: str, found: float, others: Mapping[str, float]) -> Goals:
    if not others:
        return {}
    least = min(others.values())
    return {f"{name}_of_the_next": {"less_than": 1.0, "found": found / least if least else 1.0 + found}}


def is_met(goal: Mapping[str, float]) -> bool:
    found = goal["found"]
    if "at_least" in goal:
        return found >= goal["at_least"]
    return found <= goal["at_most"] if "at_most" in goal else found < goal["less_than"]


class Results:
    """Appends each record to the file as soon as it is there, with what it depends on, and keeps it for the table."""

    def __init__(self, path: Path, environment: Mapping[str, Any]) -> None:
        self.path, self.environment = path, environment
        self.records: list[dict[str, Any]] = []

    def add(self, kind: str, goals: Goals, **fields: Any) -> dict[str, Any]:
        """The record; it passed where every goal is met."""
        record = {
            "kind": kind,
            **fields,
            "goals": goals,
            "passed": all(is_met(goal) for goal in goals.values()),
            **self.environment,
        }
        self.records.append(record)
        append_records(self.path, [record])
        return record

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [record for record in self.records if not record["passed"]]


def environment(root: Path, device: torch.device | str, commit: str | None, tests: str) -> dict[str, Any]:
    """What every record says of where it was measured; tests: how the kernels' own tests ended there."""
    is_cuda = torch.device(device).type == "cuda"
    return {
        "tests": tests,
        "commit": commit or find_commit(root),
        "device": torch.cuda.get_device_name(device) if is_cuda else str(device),
        "cuda": torch.version.cuda,
        "liger": liger_version(),
        **describe_software(),
    }


def of_operation(operation: Operation, sizes: Sizes, keeps: str) -> dict[str, Any]:
    """The fields that say what was measured."""
    return {
        "operation": operation.name,
        "keeps": keeps,
        "shape": {"s": sizes.s, "b": sizes.b, operation.width: operation.width_of(sizes)},
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "p": sizes.p if operation.draws else None,
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """All records, a line each, in columns."""
    rows = [("operation", "keeps", "what", "Tempo", "of copy", "others / Tempo", "goals")]
    for record in records:
        found = record["tempo"]
        share = record["goals"].get("share_of_copy")
        rows.append(
            (
                record["operation"],
                record["keeps"],
                record["what"],
                f"{found:.3f} ms" if record["unit"] == "ms" else f"{found:,.0f} {record['unit']}",
                f"{share['found']:.2f}" if share else "",
                ", ".join(_compared(record)),
                "met" if record["passed"] else "MISSED: " + ", ".join(_missed(record["goals"])),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def notes(records: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Who is left out of which comparisons, and why; and whose times hold some of the host's."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for name, reason in record.get("left_out", {}).items():
            reasons.setdefault((name, reason), []).append(record["operation"])
        for name in record.get("waits_for_gpu", []):
            reasons.setdefault((name, "the host waits for the GPU"), []).append(record["operation"])
    for (name, reason), operations in reasons.items():
        yield f"{name} of {', '.join(dict.fromkeys(operations))}: {reason}"


def _compared(record: Mapping[str, Any]) -> Iterable[str]:
    for name, value in record["others"].items():
        yield f"{name} {value / record['tempo']:.2f}" if record["tempo"] else f"{name} {value:,.0f}"


def _missed(goals: Goals) -> Iterable[str]:
    for name, goal in goals.items():
        if not is_met(goal):
            [(bound, expected)] = [item for item in goal.items() if item[0] != "found"]
            yield f"{name} {goal['found']:.3g}, expected {bound.replace('_', ' ')} {expected:g}"

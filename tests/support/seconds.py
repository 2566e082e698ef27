"""Measures what each test file takes: `bash tests/run.sh --seconds tests/seconds.json [FILES...]` writes the table.

`cpu` is seconds, of user and system, of the process that runs a file's tests and of all that it starts; `wall` is the
sum of how long its tests take; `tests` is how many pass. What several files import, or share in a server of processes,
counts for the first of a worker. A run of some files leaves the others' rows as they are, so the table can be written
in parts; files that there are no more leave it. Nothing asks that a figure hold: it is that of one machine on one day.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

TESTS = Path(__file__).parent.parent
PR_SET_CHILD_SUBREAPER = 36


def list_files() -> list[str]:
    return sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py"))


def cpu_seconds() -> float:
    """Of this process, of those that it started and that live, and of those that each has waited for."""
    this, total = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:  # it has just ended, and counts for whoever waits for it
            continue
    return total


class Stopwatch:
    """A plugin of pytest: each worker notes what its tests take, and the process that started them adds it up."""

    def __init__(self, config: pytest.Config, table: Path) -> None:
        self.table, self.notes, self.passed = table, table.with_suffix(".notes"), 0
        self.is_worker = hasattr(config, "workerinput")
        if not self.is_worker:
            self.notes.unlink(missing_ok=True)
        # A process whose parent ended becomes this one's child.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        cpu, started, self.passed = cpu_seconds(), time.monotonic(), 0
        result = yield
        path = item.path.relative_to(TESTS).as_posix()
        note = json.dumps([path, cpu_seconds() - cpu, time.monotonic() - started, self.passed]) + "\n"
        with self.notes.open("ab", buffering=0) as file:
            file.write(note.encode())
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed

    def pytest_sessionfinish(self) -> None:
        if self.is_worker or not self.notes.exists():
            return
        found: dict[str, list[float]] = {}
        for line in self.notes.read_text(encoding="utf-8").splitlines():
            path, *numbers = json.loads(line)
            found[path] = [a + b for a, b in zip(found.get(path, [0, 0, 0]), numbers, strict=True)]
        rows = json.loads(self.table.read_text(encoding="utf-8")) if self.table.exists() else {}
        rows |= {
            path: {"cpu": round(cpu, 1), "wall": round(wall, 1), "tests": tests}
            for path, (cpu, wall, tests) in found.items()
        }
        lines = [f" {json.dumps(path)}: {json.dumps(rows[path])}" for path in list_files() if path in rows]
        self.table.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        self.notes.unlink()

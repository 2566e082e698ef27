"""The kernels' own tests on the GPU: a speed counts only where they pass.

Files run side by side, each in a process of its own, since compiling takes the time; then, alone and one by one, the
tests of tensors with more than 2**31 elements, which need up to 21 GB each. Every outcome is in tests.jsonl as soon as
it is known, and what pytest prints in tests/FILE.log. No failure stops another test.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measurements import append_records, read_records

NOT_NEEDED_HERE = {"megatron", "deepspeed", "tempo_megatron"}
MARKS = ("kernel_test", "mark.gpu")
LARGE = "test_large_tensors.py"
MAX_WORKERS = 8
RESERVED_S = 150.0
"""Of the time, for the large tests."""


def files(root: Path) -> list[Path]:
    """Every test file with tests for a GPU that gets by with tempo_kernels, by name."""
    found = sorted((root / "tests").rglob("test_*.py"))
    return [
        path
        for path in found
        if any(mark in path.read_text(encoding="utf-8") for mark in MARKS) and not imported(path) & NOT_NEEDED_HERE
    ]


def imported(path: Path) -> set[str]:
    """The top-level packages that path imports, itself or by what tests share in tests/support."""
    found: set[str] = set()
    pending, seen = [path], {path}
    while pending:
        for node in ast.walk(ast.parse(pending.pop().read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                found.add(top)
                shared = next(
                    (each for parent in path.parents if (each := parent / "support" / f"{top}.py").exists()), None
                )
                if shared is not None and shared not in seen:
                    seen.add(shared)
                    pending.append(shared)
    return found


def run(root: Path, folder: Path, timeout_s: float) -> str:
    """Runs them all within timeout_s; the outcome, as read_outcome gives it."""
    end = time.monotonic() + timeout_s
    records_of(folder).unlink(missing_ok=True)
    records_of(folder).parent.mkdir(parents=True, exist_ok=True)
    # The longest first, so that none of them is left alone at the end.
    found = sorted(files(root), key=lambda path: -path.stat().st_size)
    large = [path for path in found if path.name == LARGE]
    others = [path for path in found if path.name != LARGE]
    workers = max(1, min(MAX_WORKERS, (os.cpu_count() or 2) // 2))
    with ThreadPoolExecutor(workers) as pool:
        for path in others:
            pool.submit(_run_file, root, folder, path, "gpu and not slow", end - RESERVED_S)
    for path in large:
        _run_file(root, folder, path, "gpu", end)
    return read_outcome(folder)


def read_outcome(folder: Path) -> str:
    """ "passed", "failed" or "not run"."""
    outcomes = {record["outcome"] for record in read_records(records_of(folder))}
    if not outcomes:
        return "not run"
    return "failed" if outcomes - {"passed", "skipped"} else "passed" if "passed" in outcomes else "not run"


def describe(folder: Path) -> str:
    """How many tests passed, failed and so on, then a line of each error: pytest marks what was wrong with an E."""
    found = read_records(records_of(folder))
    counts = Counter(record["outcome"] for record in found)
    lines = [", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) or "no test ran"]
    for record in found:
        if record["outcome"] not in ("passed", "skipped"):
            error = record.get("error", "").strip().splitlines() or [""]
            wrong = next((line[1:].strip() for line in error if line.startswith("E ")), error[-1])
            lines.append(f"{record['outcome']}: {record['test']}: {wrong}")
    return "\n".join(lines)


def records_of(folder: Path) -> Path:
    return folder / "tests.jsonl"


def command(folder: Path, path: Path, marks: str) -> list[str]:
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "gpu.record_tests"]
    return [sys.executable, "-m", "pytest", *options, "--records", str(records_of(folder)), "-m", marks, str(path)]


def _run_file(root: Path, folder: Path, path: Path, marks: str, end: float) -> None:
    """One file in a process of its own; what keeps it from ending is a record too."""
    log = folder / "tests" / f"{path.stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    left_s, what = end - time.monotonic(), None
    if left_s <= 0:
        what = "no time was left"
    else:
        with log.open("w", encoding="utf-8") as stream:
            try:
                done = subprocess.run(
                    command(folder, path, marks),
                    cwd=root,
                    env=_environment(root),
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    timeout=left_s,
                )
            except subprocess.TimeoutExpired:
                what = f"did not end within {left_s:.0f} s"
            else:
                # 0 and 1 are told test by test; 5 is a file without tests for this machine.
                what = None if done.returncode in (0, 1, 5) else f"pytest ended with {done.returncode}; see {log}"
    if what:
        append_records(records_of(folder), [{"test": path.name, "outcome": "not ended", "error": what}])


def _environment(root: Path) -> dict[str, str]:
    paths = [str(root / "kernels"), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # Processes beside each other; the tests' references are computed on the CPU.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        # Other people's plugins may warn, and here every warning is an error.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # The tests run torch's deterministic algorithms, which cuBLAS takes part in only if it is told to.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }

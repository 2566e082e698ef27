"""The kernels' own tests on the GPU: no speed is measured before they pass."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

NOT_NEEDED_HERE = {"megatron", "deepspeed", "tempo_megatron"}
MARKS = ("kernel_test", "mark.gpu")
MAX_WORKERS = 8


def files(root: Path) -> list[Path]:
    """Every test file with tests for a GPU that gets by with tempo_kernels, by name."""
    found = sorted((root / "tests").glob("test_*.py"))
    return [
        path
        for path in found
        if any(mark in path.read_text(encoding="utf-8") for mark in MARKS) and not imported(path) & NOT_NEEDED_HERE
    ]


def imported(path: Path) -> set[str]:
    """The top-level packages that path imports, itself or by the modules beside it."""
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
                beside = path.with_name(f"{top}.py")
                if beside.exists() and beside not in seen:
                    seen.add(beside)
                    pending.append(beside)
    return found


def command(root: Path) -> list[str]:
    """On several processes where pytest-xdist is installed: compiling takes the time."""
    workers = min(MAX_WORKERS, (os.cpu_count() or 2) // 2)
    parallel = ["-p", "xdist", "-n", str(workers)] if importlib.util.find_spec("xdist") and workers > 1 else []
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-m", "gpu and not slow"]
    return [sys.executable, "-m", "pytest", *options, *parallel, *map(str, files(root))]


def passed(root: Path, timeout_s: float) -> bool:
    """Runs them; their output goes where this process's does. Not ended within timeout_s is not passed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root / "kernels"), os.environ.get("PYTHONPATH")])),
        # Other people's plugins may warn, and here every warning is an error.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # The tests run torch's deterministic algorithms, which cuBLAS takes part in only if it is told to.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    try:
        return subprocess.run(command(root), cwd=root, env=environment, timeout=timeout_s).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"the kernels' tests did not end within {timeout_s:.0f} s", flush=True)
        return False

"""Every Triton kernel against its specification: under Triton's interpreter anywhere, on a GPU where there is one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

FILES = sorted(Path(__file__).parent.rglob("test_*_kernels.py"))


def list_tests(path: Path) -> list[str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [f"{path}::{name}" for name in names]


def interpret(*arguments: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-m", "not gpu"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "failed" not in result.stdout


@pytest.mark.slow
def test_every_kernel_does_under_the_interpreter_what_its_specification_says(pytestconfig):
    interpret(*(["--exhaustive"] if pytestconfig.getoption("--exhaustive") else []), *map(str, FILES))


@pytest.mark.quick
def test_one_case_of_some_tests_of_every_kernel_holds_under_the_interpreter():
    # The first tests of a file hold kernels against their specification.
    interpret("--quick", *(test for path in FILES for test in list_tests(path)[:3]))

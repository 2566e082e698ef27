"""Every Triton kernel against its specification: under Triton's interpreter anywhere, on a GPU where there is one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from covering import parametrize_covering
from every_operation import OPERATIONS, make_inputs

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

from interpreted import INTERPRETED

from tempo_kernels import backend

FILES = [Path(__file__), *sorted(Path(__file__).parent.rglob("test_*_kernels.py"))]
# Each in a process of its own, for other cores to help; each takes seconds to import torch.
FAMILIES = ["attention", "norm", "others"]


def find_family(path: Path) -> str:
    return path.parent.name if path.parent.name in FAMILIES else "others"


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


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_does_under_the_interpreter_what_its_specification_says(family: str, pytestconfig):
    files = [str(path) for path in FILES if find_family(path) == family]
    interpret(*(["--exhaustive"] if pytestconfig.getoption("--exhaustive") else []), *files)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@pytest.mark.quick
def test_one_case_of_some_tests_of_every_kernel_holds_under_the_interpreter():
    # The first tests of a file hold kernels against their specification; this file's start processes.
    interpret("--quick", *(test for path in FILES[1:] for test in list_tests(path)[:3]))


# Of each kernel one; attention takes its kernels for CUDA tensors only.
WITH_KERNELS = ["gelu", "swiglu", "squared_relu", "layer_norm", "layer_norm of its input", "bias_dropout_add"]
WITH_KERNELS += ["linear_log_prob with entropy"]


@pytest.mark.skipif(not INTERPRETED, reason="the host's part of kernels, which is the same under the interpreter")
@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")
@parametrize_covering(each={"name": WITH_KERNELS, "default": [torch.bfloat16, torch.float64]})
def test_a_default_dtype_changes_no_bit_of_what_kernels_give(name, default, monkeypatch):
    for module in [module for where, module in sys.modules.items() if where.startswith("tempo_kernels.")]:
        if hasattr(module, "choose_backend") and module is not backend:
            monkeypatch.setattr(module, "choose_backend", lambda x, cpu: backend._import_kernel(cpu.__package__))

    def results():
        leaves = [t.requires_grad_() for t in make_inputs()]
        out = OPERATIONS[name](*leaves, 0xFEDCBA9876543210, 3)
        out.square().sum().backward()
        return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    wanted = results()
    torch.set_default_dtype(default)
    try:
        found = results()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(
        ours.dtype == theirs.dtype and torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)
    )

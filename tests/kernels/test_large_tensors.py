"""Every kernel where its tensors have more than 2**31 elements, without a GPU.

Tensors without memory are enough for the ranges of all numbers that a launch computes with (ttir_ranges.py). On a GPU
benchmarks/gpu_suite.py runs such tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

from ahead_of_time import Launch, record_launches, source_of
from attention_kernel_cases import settings
from torch import Tensor
from ttir_ranges import find_overflows

import tempo_kernels
from tempo_kernels.activation import ACTIVATIONS
from tempo_kernels.activation import kernel as activation
from tempo_kernels.attention import kernel as attention
from tempo_kernels.attention.settings import Inputs
from tempo_kernels.attention.settings import Kept as KeptByAttention
from tempo_kernels.dropout_add import Draw
from tempo_kernels.dropout_add import kernel as dropout_add
from tempo_kernels.linear_cross_entropy import kernel as loss
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares
from tempo_kernels.norm import kernel as norm
from tempo_kernels.norm.settings import Norm


def make_rows(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[rows, width] of a little more than 2**31 elements."""
    return torch.empty((1 << 31) // width + 16, width, dtype=dtype)


def run_activations() -> None:
    x, half = make_rows(8192), make_rows(4096)
    gates = torch.empty(half.size(0), 8192, dtype=x.dtype)
    for name, row in ACTIVATIONS.items():
        activation.forward(gates, x[0], name, "gated")
        activation.backward(half, gates, x[0], None, name, "gated", True)
        activation.forward(x, None, name, "recompute")
        activation.backward(x, x, x[0], None, name, "recompute", True)
        if row.slope_of_output is not None:
            y, bits = activation.forward(x, x[0], name, "inplace")
            activation.backward(x, y, None, bits, name, "inplace", True)


def run_dropouts() -> None:
    x, draw = make_rows(8192)[:, None], Draw(0.1, 2**64 - 1, 5, 0)
    dropout_add.forward(x, x[0, 0], x, draw)
    dropout_add.forward(x, None, None, draw)
    for has_grad_bias in (False, True):
        dropout_add.backward(x, draw, has_grad_bias)


def run_norms() -> None:
    for x in (make_rows(4096), make_rows(32768)):
        parameters = Norm(x[0], x[0], 1e-5, True, False)
        y, kept = norm.forward(x, parameters)
        norm.backward(x, y, kept, True, x.dtype, x.dtype, checks=False)
        y, statistics = norm.forward_from_input(x, parameters)
        norm.refill(y, x, parameters, statistics)
        norm.backward_from_input(x, x, parameters, statistics)


def run_attention() -> None:
    for s, b, a, has_more in ((1280, 128, 256, False), (4096, 1, 256, True)):
        q, scores = torch.empty(s, b, a, 64, dtype=torch.bfloat16), (1, a, s, s)
        inputs = Inputs(q, q, q)
        if has_more:
            mask, bias = (torch.empty(scores, dtype=dtype) for dtype in (torch.bool, q.dtype))
            inputs = inputs._replace(mask=mask, bias=bias)
        chosen = settings(causal=False, window_size=(63, 0))
        attention.backward(q, inputs, KeptByAttention(*attention.forward(inputs, chosen)), chosen, has_more)


def run_losses() -> None:
    logits = make_rows(32768)
    columns, vectors = torch.empty(logits.size(0), dtype=torch.int64), torch.empty(4, logits.size(0))
    for shares in (Shares(1.0, 0.1, 32768, False, 30.0, 0.7, True), Shares(1.0, 0.0, 32768)):
        loss.compute_statistics(logits, columns, shares)
        loss.write_gradient_(logits, Rows(columns, *vectors[: 3 + shares.has_entropy]), shares)


RUNS = (run_activations, run_dropouts, run_norms, run_attention, run_losses)


def list_kernels() -> Iterator[tuple[str, ModuleType]]:
    """All kernels by their full names, and the modules that have them."""
    root = Path(tempo_kernels.__file__).parents[1]
    for file in sorted((root / "tempo_kernels").rglob("kernel*.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        module = importlib.import_module(name)
        kernels = [value.fn for key, value in vars(module).items() if key.endswith("_kernel")]
        yield from ((f"{name}.{kernel.__name__}", module) for kernel in kernels if kernel.__module__ == name)


def test_no_number_of_32_bits_runs_over_on_its_way_to_an_address(fresh_plans):
    kernels, launches = dict(list_kernels()), dict[str, Launch]()
    with torch.device("meta"):
        for run in RUNS:
            launches |= {source_of(launch).hash(): launch for launch in record_launches(run, set(kernels.values()))}
    found: dict[str, list[str]] = {name: [] for name in kernels}
    for launch in launches.values():
        found[f"{launch.kernel.fn.__module__}.{launch.kernel.fn.__name__}"] += find_overflows(launch)
    assert not any(found.values()), found
    assert {f"tempo_kernels.{launch.name}" for launch in launches.values()} == kernels.keys()

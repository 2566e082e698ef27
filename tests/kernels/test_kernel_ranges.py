"""No kernel counts its elements in 32 bits where tensors have more than 2**31: see ttir_ranges.py. No GPU is needed.

Nobody touches these tensors, so that they take no memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

from ahead_of_time import Launch, record_launches, source_of
from attention_kernel_cases import settings
from interpreted import INTERPRETED
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

LIMIT = 1 << 31
WIDTH, DTYPE = 8192, torch.bfloat16
Run = Callable[[], Any]


def empty(width: int = WIDTH) -> Tensor:
    """More than LIMIT elements, in rows of `width`."""
    return torch.empty(LIMIT // width + 16, width, dtype=DTYPE)


def list_activations() -> Iterator[Run]:
    x, half = empty(), empty(WIDTH // 2)
    gated, bits = torch.empty(len(half), WIDTH, dtype=DTYPE), torch.empty(x.numel() // 8, dtype=torch.uint8)
    for name, row in ACTIVATIONS.items():
        yield lambda name=name: activation.forward(x, None, name)
        yield lambda name=name: activation.forward(gated, x[0], name, True)
        yield lambda name=name: activation.backward(x, x, x[0], name, False, True)
        yield lambda name=name: activation.backward(half, gated, x[0], name, True, True)
        if row.slope_of_output is not None:
            yield lambda name=name: activation.forward_inplace(x, x[0], name)
            kept = None if row.x_min is None else bits
            yield lambda name=name, kept=kept: activation.backward_inplace(x, x, kept, name, True)


def list_dropouts() -> Iterator[Run]:
    x, draw = empty()[:, None], Draw(0.1, 2**64 - 1, 5, 7)
    tokens = torch.empty(2, len(x), 1, dtype=torch.int64)
    for one in (draw, Draw(0.1, *tokens[:, 0, 0], 7), Draw(0.1, 7, 0, 0, 0, *tokens)):
        yield lambda one=one: dropout_add.forward(x, x[0, 0], x, one)
        yield lambda one=one: dropout_add.backward(x, one, True)
    yield lambda: dropout_add.forward(x, None, None, draw)
    yield lambda: dropout_add.backward(x, draw, False)


def list_norms(width: int) -> Iterator[Run]:
    x, form = empty(width), Norm(torch.empty(width, dtype=DTYPE), torch.empty(width, dtype=DTYPE), 1e-5, True, False)

    def run_inplace() -> None:
        y, kept = norm.forward(x, form)
        norm.backward(x, y, kept, True, DTYPE, DTYPE, checks=False)

    def run_from_input() -> None:
        y, statistics = norm.forward_from_input(x, form)
        norm.refill(y, x, form, statistics)
        norm.backward_from_input(x, x, form, statistics)

    yield run_inplace
    yield run_from_input


def list_attention() -> Iterator[Run]:
    """Of tensors [s, b, a, d], and of a bias and a mask [a, s, s]."""
    chosen = settings(causal=False, window_size=(63, 0), first_sample=0, first_head=0)
    for s, b, has_bias in ((1280, 128, False), (4096, 1, True)):
        q = torch.empty(s, b, 256, 64, dtype=DTYPE)
        bias, mask = (torch.empty(1, 256, s, s, dtype=kind) if has_bias else None for kind in (DTYPE, torch.bool))

        def run(q: Tensor = q, inputs: Inputs = Inputs(q, q, q, bias=bias, mask=mask)) -> None:  # noqa: B008
            kept = KeptByAttention(*attention.forward(inputs, chosen))
            attention.backward(q, inputs, kept, chosen, None, inputs.bias is not None)

        yield run


def list_losses() -> Iterator[Run]:
    logits, shares = empty(32768), Shares(1.0, 0.1, 32768, False, 30.0, 0.7, True)
    columns, vectors = torch.empty(len(logits), dtype=torch.int64), torch.empty(4, len(logits))
    yield lambda: loss.compute_statistics(logits, columns, shares)
    yield lambda: loss.write_gradient_(logits, Rows(columns, *vectors), shares)


def list_kernels() -> dict[str, ModuleType]:
    """All kernels, and the modules that have them, by the names of both."""
    found = {}
    for file in sorted(Path(tempo_kernels.__file__).parent.rglob("kernel*.py")):
        name = ".".join(file.relative_to(Path(tempo_kernels.__file__).parents[1]).with_suffix("").parts)
        module = importlib.import_module(name)
        kernels = [value.fn for key, value in vars(module).items() if key.endswith("_kernel")]
        found |= {f"{name}.{kernel.__name__}": module for kernel in kernels if kernel.__module__ == name}
    return found


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_no_number_of_32_bits_runs_over_on_its_way_to_an_address(fresh_plans):
    modules, launches = set(list_kernels().values()), dict[str, Launch]()
    for runs in (
        list_activations(),
        list_dropouts(),
        list_norms(4096),
        list_norms(32768),
        list_attention(),
        list_losses(),
    ):
        for run in runs:
            for launch in record_launches(run, modules):
                launches.setdefault(source_of(launch).hash(), launch)
    found: dict[str, list[str]] = {}
    for launch in launches.values():
        name = f"{launch.kernel.fn.__module__}.{launch.kernel.fn.__name__}"
        found.setdefault(name, []).extend(find_overflows(launch))
    assert found.keys() == list_kernels().keys()
    assert not any(found.values()), found

"""Kernels compiled ahead of time, with their launchers' arguments; no GPU is needed.

Those of attention have a file of their own, but for the ranges of whole numbers (ttir_ranges.py), which for all kernels
are taken of tensors with more than 2**31 elements and without memory. On a GPU benchmarks/gpu_suite.py runs such ones.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

from ahead_of_time import Launch, compiled, list_spills_in_loops, narrow_accesses, record_launches, resources, source_of
from attention_kernel_cases import settings
from covering import exhaustive, parametrize_covering
from torch import Tensor
from ttir_ranges import find_overflows

import tempo_kernels
from tempo_kernels import kernel_sums
from tempo_kernels.activation import ACTIVATIONS
from tempo_kernels.activation import kernel as activations
from tempo_kernels.attention import kernel as attention
from tempo_kernels.attention.settings import Inputs, Kept
from tempo_kernels.dropout_add import Draw
from tempo_kernels.dropout_add import kernel as dropout_add
from tempo_kernels.linear_cross_entropy import kernel as loss
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares
from tempo_kernels.norm import kernel as norm
from tempo_kernels.norm import kernel_backward as norm_backward
from tempo_kernels.norm import kernel_forward as norm_forward
from tempo_kernels.norm.settings import Norm

MODULES = [activations, dropout_add, loss, norm_forward, norm_backward, kernel_sums]
SUMS = "kernel_sums._sums_kernel"
BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


def record(run: Callable[[], Any]) -> list[Launch]:
    """The launches of a room's own kernels."""
    return [launch for launch in record_launches(run, MODULES) if launch.name != SUMS]


def check(launch: Launch, capability: int, name: str, most_registers: int, most_narrow: int, stack: int = 0) -> None:
    """Registers do not spill, and few accesses of a thread are narrower than 16 bytes."""
    binary = compiled(launch, capability)
    usage, narrow = resources(binary.asm["cubin"]), narrow_accesses(binary.asm["ptx"])
    assert usage["STACK"] <= stack and usage["LOCAL"] == 0, f"{name} spills: {usage}"
    assert usage["REG"] <= most_registers, f"{name}: {usage}"
    if launch.arguments.get("channels_ptr") is not None or launch.name == SUMS:
        # A norm's lost channels are read and written one by one, and of partial sums a thread has one column.
        narrow = [access for access in narrow if not access.endswith((".b16", ".b32", " 0x4 bytes"))]
    if "rows_ptr" in launch.arguments:
        # A row and a sample for each of a thread's rows.
        narrow = [access for access in narrow if not access.endswith(".b64")]
    assert len(narrow) <= most_narrow, f"{name}: {narrow}"
    sums_rows = any(launch.arguments.get(sums) is not None for sums in ("partial_ptr", "sums_ptr"))
    if launch.kernel.fn.__module__.startswith(("tempo_kernels.norm", "tempo_kernels.dropout")):
        assert sums_rows or not any(access.endswith(".b16") for access in narrow), f"{name}: {narrow}"


def run_activation(activation: str, x: Tensor, half: Tensor, *biases: Tensor | None) -> None:
    """Every form of x and, half as wide, of gated units' outputs."""
    for bias in biases:
        for form in ("gated", "recompute", "inplace")[: 2 + (ACTIVATIONS[activation].slope_of_output is not None)]:
            _, bits = activations.forward(x, bias, activation, form)
            kept = (x, None, bits) if form == "inplace" else (x, bias, None)
            activations.backward(half if form == "gated" else x, *kept, activation, form, bias is not None)


@pytest.mark.slow
@parametrize_covering(
    each={"activation": ACTIVATIONS.keys()}, dtype={"16": BRAIN, "32": FLOAT}, capability=[90, 80, 100]
)
def test_activations_spill_nothing_and_read_16_bytes_at_a_time(activation, dtype, capability):
    x = torch.empty(2048, 4096, dtype=dtype)
    for launch in record_launches(lambda: run_activation(activation, x, x[:, :2048], x[0]), MODULES):
        # Of bits a thread has a byte per eight elements, and of a bias and of sums a column or two.
        check(launch, capability, launch.name, 128, 4)


def with_capabilities(cases: list[Any], every: list[Any]) -> pytest.MarkDecorator:
    """(capability, shapes) of the cases, and with --exhaustive every shape on each."""
    more = exhaustive(*((capability, every) for capability in (90, 80, 100)))
    return pytest.mark.parametrize(("capability", "shapes"), [*cases, *more])


def run_dropouts(x: Tensor) -> None:
    tokens = torch.empty(2, *x.shape[:2], dtype=torch.int64)
    draws = Draw(0.1, 2**64 - 1, 5, 7), Draw(0.1, *tokens[:, 0, 0], 7), Draw(0.1, 7, 0, 0, 0, *tokens)
    for draw in draws:
        dropout_add.forward(x, x[0, 0], x, draw)
        dropout_add.backward(x, draw, has_grad_bias=True)
    dropout_add.forward(x, None, None, draws[0])
    dropout_add.forward(x, x[0, 0], x, Draw(0.0, 0, 0, 0))
    dropout_add.backward(x, draws[0], has_grad_bias=False)


DROPOUTS = [(BRAIN, 4096), (HALF, 1000), (FLOAT, 4096)]


@with_capabilities(
    [pytest.param(90, DROPOUTS[:1], marks=pytest.mark.quick), (80, DROPOUTS[1:2]), (100, DROPOUTS[2:])], DROPOUTS
)
def test_dropouts_keep_to_few_registers_and_access_16_bytes_at_a_time(capability, shapes):
    for dtype, hidden_size in shapes:
        x = torch.empty(512, 4, hidden_size, dtype=dtype)
        for launch in record(lambda x=x: run_dropouts(x)):
            assert len(launch.kernel.arg_names) <= 20
            check(launch, capability, f"{launch.name}, {dtype}", 128, 8)


def list_shares(num_columns: int, softcap: float = 30.0, temperature: float = 0.7) -> dict[str, Shares]:
    """What is compiled for itself: the losses', and what linear_log_prob asks for alone and all at once."""
    return {
        "plain": Shares(1.0, 0.0, num_columns),
        "smoothed": Shares(1.0, 0.1, num_columns),
        "with entropy": Shares(1.0, 0.0, num_columns, has_entropy=True),
        "divided": Shares(1.0, 0.0, num_columns, temperature=temperature),
        "capped, divided and cut, with entropy": Shares(1.0, 0.0, num_columns - 47, True, softcap, temperature, True),
    }


def run_losses(logits: Tensor, first: int = 0, **numbers: float) -> None:
    """Every form of both kernels on tokens [first, first + num_rows) of more."""
    num_rows, num_columns = logits.shape
    columns = torch.zeros(first + num_rows, dtype=torch.int64)[first:]
    vectors = torch.ones(4, first + num_rows)[:, first:]
    for shares in list_shares(num_columns, **numbers).values():
        loss.compute_statistics(logits, columns, shares)
        loss.write_gradient_(logits, Rows(columns, *vectors[: 3 + shares.has_entropy]), shares)


# GPT-2's padded vocabulary, Llama 3's, one that is a multiple of eight only, and a shard of one.
LOSSES = [(BRAIN, columns) for columns in (50304, 128256, 6288)] + [(HALF, 50264), (FLOAT, 50304)]


@with_capabilities([pytest.param(90, LOSSES[4:], marks=pytest.mark.slow), (80, LOSSES[:1])], LOSSES)
def test_losses_keep_to_few_registers_and_read_16_bytes_at_a_time(capability, shapes):
    for dtype, num_columns in shapes:
        names = [form for form in list_shares(num_columns) for _ in range(2)]
        logits = torch.empty(64, num_columns, dtype=dtype)
        launches = record_launches(lambda logits=logits: run_losses(logits), MODULES)
        for form, launch in zip(names, launches, strict=True):
            # At 80 three programs of 8 warps share a multiprocessor; tanh and a division take some. What is read
            # narrowly is a row's target, maximum, scale, gradient and slope, and written up to four results.
            check(launch, capability, f"{launch.name}, {form}, {dtype}", 128 if "capped" in form else 80, 7)


def run_norms(x: Tensor, y: Tensor, has_bias: bool) -> None:
    """Both forms of x, and of an output and parameters of y's dtype, of LayerNorm or of RMSNorm."""
    parameters = Norm(y[0], y[0] if has_bias else None, 1e-5, has_bias, zero_centered=False)
    _, kept = norm.forward(x, parameters)
    norm.backward(y, y, kept, has_bias, x.dtype, y.dtype, checks=False)
    parameters = parameters._replace(zero_centered=True)
    _, statistics = norm.forward_from_input(x, parameters)
    norm.refill(y, x, parameters, statistics)
    norm.backward_from_input(y, x, parameters, statistics)


# 16-bit rows that are multiples of eight, short, medium and long, and float32.
NORMS = [(FLOAT, FLOAT, 4096, True), (BRAIN, BRAIN, 8192, False), (FLOAT, BRAIN, 12288, True)]
MORE_NORMS = [
    (FLOAT, FLOAT, 4096, False), (FLOAT, BRAIN, 12288, False), (BRAIN, BRAIN, 8192, True),
    *((BRAIN, BRAIN, size, has_bias) for size in (1000, 4096, 12288, 20480) for has_bias in (True, False)),
    *((FLOAT, BRAIN, 8192, has_bias) for has_bias in (True, False)),
]  # fmt: skip
# Each on one GPU: both dtypes, and rows that fill the registers or are read in parts.
COVERING = [(80, NORMS[:1]), (90, NORMS[1:2]), (100, NORMS[2:])]
QUICK = pytest.param(90, NORMS[:1], marks=pytest.mark.quick)


@with_capabilities([QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in COVERING)], NORMS + MORE_NORMS)
def test_norms_keep_to_registers_and_access_16_bytes_at_a_time(capability, shapes):
    for *dtypes, hidden_size, has_bias in shapes:
        tensors = [torch.empty(2048, hidden_size, dtype=dtype) for dtype in dtypes]
        for launch in record_launches(functools.partial(run_norms, *tensors, has_bias), MODULES):
            name = f"{launch.name}, {dtypes}, h {hidden_size}"
            # One number per row, or a vector [h] of which a thread has fewer than eight elements; a tile that is read
            # or written narrowly takes at least eight accesses. Of sums over rows a thread has one column, and norms
            # load two numbers for each row of a tile ahead.
            most = 4 + 3 * any(launch.arguments.get(sums) is not None for sums in ("partial_ptr", "sums_ptr"))
            most += 2 * launch.arguments.get("BLOCK_ROWS", 0) if "rstd_ptr" in launch.arguments else 0
            # At most a pair of registers waits in memory, of which a loop reads one.
            check(launch, capability, name, 168, most, stack=8)
            assert len(list_spills_in_loops(compiled(launch, capability).asm["cubin"])) <= 1, f"{name} spills in a loop"


def test_what_is_not_aligned_is_read_narrowly_and_found_to_be():
    x = torch.empty(4097, dtype=BRAIN)[1:].view(2, 2, 1024)
    (launch,) = record_launches(lambda: dropout_add.forward(x, None, None, Draw(0.1, 1, 0, 0)), MODULES)
    assert len(narrow_accesses(compiled(launch, 90).asm["ptx"])) > 8


def run_draws(draws: list[tuple[Any, ...]]) -> None:
    x = torch.ones(8, 2, 64)
    for draw in draws:
        dropout_add.forward(x, None, None, Draw(*draw))
        dropout_add.backward(x, Draw(*draw), has_grad_bias=True)


def run_chunks() -> None:
    for rows, first, softcap, temperature in [
        (64, 0, 30.0, 0.7), (64, 64, 50.0, 0.01), (1, 3, 1.0, 1.5), (17, 5, 2.0, 2.0), (16, 1, 30.0, 0.7),
    ]:  # fmt: skip
        run_losses(torch.empty(rows, 50304, dtype=BRAIN), first, softcap=softcap, temperature=temperature)


NUMBERS = torch.arange(5)  # of which every second one is aligned to 16 bytes
DRAWS = [(0.1, 0, 0, 0), (0.5, 2**64 - 1, 1, 1, 8), (0.3, 2**31, 16, 2**20, 8 << 31), (0.25, 2**63, 2**31 - 1, 16)]
LOADED: list[tuple[float, Tensor, Tensor, int]] = [
    (0.1, *NUMBERS[:2], 0), (0.5, *NUMBERS[1:3], 1), (0.3, NUMBERS[4], NUMBERS[3], 16),
]  # fmt: skip
SAME = {
    "draws": (lambda: run_draws(DRAWS), 2),
    "loaded draws": (lambda: run_draws(LOADED), 2),
    "chunks": (run_chunks, 10),
}


@pytest.mark.parametrize(("run", "num_kernels"), SAME.values(), ids=SAME)
def test_new_keys_probabilities_places_sizes_and_temperatures_compile_nothing(run, num_kernels):
    launches = record(run)
    assert len(launches) > num_kernels and len({source_of(launch).hash() for launch in launches}) == num_kernels


def make_rows(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[rows, width] of a little more than 2**31 elements."""
    return torch.empty((1 << 31) // width + 16, width, dtype=dtype)


def run_attention() -> None:
    for s, b, a, has_more in ((1280, 128, 256, False), (4096, 1, 256, True)):
        q, scores = torch.empty(s, b, a, 64, dtype=torch.bfloat16), (1, a, s, s)
        inputs = Inputs(q, q, q)
        if has_more:
            mask, bias = (torch.empty(scores, dtype=dtype) for dtype in (torch.bool, q.dtype))
            inputs = inputs._replace(mask=mask, bias=bias)
        chosen = settings(causal=False, window_size=(63, 0))
        attention.backward(q, inputs, Kept(*attention.forward(inputs, chosen)), chosen, has_more)


def run_all() -> None:
    x = make_rows(8192)
    run_activation("gelu", x, make_rows(4096)[: x.size(0)], x[0], None)  # others have its addresses
    run_dropouts(x[:, None])
    for width in (4096, 32768):
        run_norms(*[make_rows(width)] * 2, True)
    run_attention()
    run_losses(make_rows(32768))


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
        launches |= {source_of(launch).hash(): launch for launch in record_launches(run_all, set(kernels.values()))}
    found: dict[str, list[str]] = {name: [] for name in kernels}
    for launch in launches.values():
        found[f"{launch.kernel.fn.__module__}.{launch.kernel.fn.__name__}"] += find_overflows(launch)
    assert not any(found.values()), found
    assert {f"tempo_kernels.{launch.name}" for launch in launches.values()} == kernels.keys()

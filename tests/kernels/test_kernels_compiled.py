"""The kernels of all rooms but attention compiled ahead of time, with their launchers' arguments; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

from ahead_of_time import Launch, compiled, list_spills_in_loops, narrow_accesses, record_launches, resources, source_of
from covering import exhaustive, parametrize_covering
from torch import Tensor

from tempo_kernels import kernel_sums
from tempo_kernels.activation import ACTIVATIONS
from tempo_kernels.activation import kernel as activations
from tempo_kernels.dropout_add import Draw
from tempo_kernels.dropout_add import kernel as dropout_add
from tempo_kernels.linear_cross_entropy import kernel as loss
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares
from tempo_kernels.norm import kernel as norm
from tempo_kernels.norm import kernel_backward as norm_backward
from tempo_kernels.norm import kernel_forward as norm_forward
from tempo_kernels.norm.settings import Norm

MODULES = [activations, dropout_add, loss, norm_forward, norm_backward, kernel_sums]
BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


def record(run: Callable[[], Any]) -> list[Launch]:
    """The launches of a room's own kernels."""
    return [launch for launch in record_launches(run, MODULES) if launch.kernel is not kernel_sums._sums_kernel]


def check(launch: Launch, capability: int, name: str, most_registers: int, most_narrow: int, stack: int = 0) -> None:
    """Registers do not spill, and few accesses of a thread are narrower than 16 bytes."""
    binary = compiled(launch, capability)
    usage, narrow = resources(binary.asm["cubin"]), narrow_accesses(binary.asm["ptx"])
    assert usage["STACK"] <= stack and usage["LOCAL"] == 0, f"{name} spills: {usage}"
    assert usage["REG"] <= most_registers, f"{name}: {usage}"
    if launch.arguments.get("channels_ptr") is not None or launch.kernel is kernel_sums._sums_kernel:
        # A norm's lost channels are read and written one by one, and of partial sums a thread has one column.
        narrow = [access for access in narrow if not access.endswith((".b16", ".b32", " 0x4 bytes"))]
    if "rows_ptr" in launch.arguments:
        # A row and a sample for each of a thread's rows.
        narrow = [access for access in narrow if not access.endswith(".b64")]
    assert len(narrow) <= most_narrow, f"{name}: {narrow}"
    sums_rows = any(launch.arguments.get(sums) is not None for sums in ("partial_ptr", "sums_ptr"))
    if launch.kernel.fn.__module__.startswith(("tempo_kernels.norm", "tempo_kernels.dropout")):
        assert sums_rows or not any(access.endswith(".b16") for access in narrow), f"{name}: {narrow}"


@pytest.mark.slow
@parametrize_covering(
    each={"activation": ACTIVATIONS.keys()}, dtype={"16": BRAIN, "32": FLOAT}, capability=[90, 80, 100]
)
def test_activations_spill_nothing_and_read_16_bytes_at_a_time(activation, dtype, capability):
    x = torch.empty(2048, 4096, dtype=dtype)
    half, bits, row = x[:, :2048], x.new_empty(x.numel() // 8, dtype=torch.uint8), ACTIVATIONS[activation]
    kept = {"recompute": (x, x), "gated": (half, x)} | ({"inplace": (x, x)} if row.slope_of_output is not None else {})

    def run() -> None:
        for bias in (x[0], None):
            for form, (grad_y, source) in kept.items():
                activations.forward(x, bias, activation, form)
                has_bits = form == "inplace" and row.x_min is not None
                operands = (bias if form != "inplace" else None, bits if has_bits else None, activation, form)
                activations.backward(grad_y, source, *operands, bias is not None)

    for launch in record_launches(run, MODULES):
        # Of bits a thread has a byte per eight elements, and of a bias and of sums a column or two.
        check(launch, capability, launch.name, 128, 4)


def run_dropouts(dtype: torch.dtype, hidden_size: int) -> None:
    x = torch.empty(512, 4, hidden_size, dtype=dtype)
    tokens = torch.empty(2, 512, 4, dtype=torch.int64)
    draws = Draw(0.1, 2**64 - 1, 5, 7), Draw(0.1, *tokens[:, 0, 0], 7), Draw(0.1, 7, 0, 0, 0, *tokens)
    for draw in draws:
        dropout_add.forward(x, x[0, 0], x, draw)
        dropout_add.backward(x, draw, has_grad_bias=True)
    dropout_add.forward(x, None, None, draws[0])
    dropout_add.forward(x, x[0, 0], x, Draw(0.0, 0, 0, 0))
    dropout_add.backward(x, draws[0], has_grad_bias=False)


DROPOUTS = [(BRAIN, 4096), (HALF, 1000), (FLOAT, 4096)]


@pytest.mark.parametrize(
    ("capability", "shapes"),
    [
        pytest.param(90, DROPOUTS[:1], marks=pytest.mark.quick),
        (80, DROPOUTS[1:2]),
        (100, DROPOUTS[2:]),
        *exhaustive((90, DROPOUTS), (80, DROPOUTS), (100, DROPOUTS)),
    ],
    ids=["90", "80", "100", "90 all", "80 all", "100 all"],
)
def test_dropouts_keep_to_few_registers_and_access_16_bytes_at_a_time(capability, shapes):
    for dtype, hidden_size in shapes:
        for launch in record(lambda dtype=dtype, h=hidden_size: run_dropouts(dtype, h)):
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


def run_losses(num_rows: int, num_columns: int, dtype: torch.dtype, first: int = 0, **numbers: float) -> None:
    """Every form of both kernels on tokens [first, first + num_rows) of more."""
    logits = torch.empty(num_rows, num_columns, dtype=dtype)
    columns = torch.zeros(first + num_rows, dtype=torch.int64)[first:]
    vectors = torch.ones(4, first + num_rows)[:, first:]
    for shares in list_shares(num_columns, **numbers).values():
        loss.compute_statistics(logits, columns, shares)
        loss.write_gradient_(logits, Rows(columns, *vectors[: 3 + shares.has_entropy]), shares)


# GPT-2's padded vocabulary, Llama 3's, one that is a multiple of eight only, and a shard of one.
LOSSES = [(BRAIN, columns) for columns in (50304, 128256, 6288)] + [(HALF, 50264), (FLOAT, 50304)]


@pytest.mark.parametrize(
    ("capability", "shapes"),
    [
        pytest.param(90, [LOSSES[0], LOSSES[4]], marks=pytest.mark.slow),
        (80, LOSSES[:1]),
        *exhaustive((90, LOSSES), (80, LOSSES), (100, LOSSES)),
    ],
    ids=["90", "80", "90 all", "80 all", "100 all"],
)
def test_losses_keep_to_few_registers_and_read_16_bytes_at_a_time(capability, shapes):
    for dtype, num_columns in shapes:
        names = [form for form in list_shares(num_columns) for _ in range(2)]
        launches = record_launches(lambda dtype=dtype, v=num_columns: run_losses(64, v, dtype), MODULES)
        for form, launch in zip(names, launches, strict=True):
            # At 80 three programs of 8 warps share a multiprocessor; tanh and a division take some. What is read
            # narrowly is a row's target, maximum, scale, gradient and slope, and written up to four results.
            check(launch, capability, f"{launch.name}, {form}, {dtype}", 128 if "capped" in form else 80, 7)


def run_norms(dtype: torch.dtype, hidden_size: int) -> None:
    x = torch.empty(2048, hidden_size, dtype=dtype)
    for bias in (x[0], None):
        _, kept = norm.forward(x, Norm(x[0], bias, 1e-5, bias is not None, False))
        norm.backward(x, x, kept, bias is not None, dtype, dtype)
    parameters = Norm(x[0], x[0], 1e-5, True, True)
    _, statistics = norm.forward_from_input(x, parameters)
    norm.refill(x, x, parameters, statistics)
    norm.backward_from_input(x, x, parameters, statistics)


def run_norms_of_float32_residuals(dtype: torch.dtype, hidden_size: int) -> None:
    """A float32 x beside parameters of `dtype`."""
    x, y = (torch.empty(2048, hidden_size, dtype=kind) for kind in (FLOAT, dtype))
    parameters = Norm(y[0], y[0], 1e-5, True, False)
    _, kept = norm.forward(x, parameters)
    norm.backward(y, y, kept, True, x.dtype, dtype)
    _, statistics = norm.forward_from_input(x, parameters._replace(zero_centered=True))
    norm.backward_from_input(y, x, parameters._replace(zero_centered=True), statistics)


# 16-bit rows that are multiples of eight, short, medium and long, and float32.
NORMS: list[tuple[Callable[[torch.dtype, int], None], torch.dtype, int]] = [
    (run_norms, FLOAT, 4096),
    *((run_norms, BRAIN, hidden_size) for hidden_size in (1000, 4096, 8192, 12288, 20480)),
    *((run_norms_of_float32_residuals, BRAIN, hidden_size) for hidden_size in (8192, 12288)),
]
# Each on one GPU: both dtypes, rows that are short, fill the registers, or are read in parts, and every operation.
COVERING = {90: [NORMS[1], NORMS[3]], 80: NORMS[:1], 100: [NORMS[5], NORMS[7]]}


@pytest.mark.parametrize(
    ("capability", "shapes"),
    [
        pytest.param(90, NORMS[:1], marks=pytest.mark.quick),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in COVERING.items()),
        *exhaustive((90, NORMS), (80, NORMS), (100, NORMS)),
    ],
    ids=["90 quick", "90", "80", "100", "90 all", "80 all", "100 all"],
)
def test_norms_keep_to_registers_and_access_16_bytes_at_a_time(capability, shapes):
    for run, dtype, hidden_size in shapes:
        for launch in record_launches(lambda run=run, dtype=dtype, h=hidden_size: run(dtype, h), MODULES):
            name = f"{launch.name}, {dtype}, h {hidden_size}"
            # One number per row, or a vector [h] of which a thread has fewer than eight elements; a tile that is read
            # or written narrowly takes at least eight accesses. Of sums over rows a thread has one column, and norms
            # load two numbers for each row of a tile ahead.
            most = 4 + 3 * any(launch.arguments.get(sums) is not None for sums in ("partial_ptr", "sums_ptr"))
            most += 2 * launch.arguments.get("BLOCK_ROWS", 0) if "rstd_ptr" in launch.arguments else 0
            # At most a pair of registers waits in memory, of which a loop reads one.
            check(launch, capability, name, 168, most, stack=8)
            assert len(list_spills_in_loops(compiled(launch, capability).asm["cubin"])) <= 1, f"{name} spills in a loop"


def list_narrow() -> Iterator[Callable[[], Any]]:
    x = torch.empty(4097, dtype=BRAIN)[1:].view(2, 2, 1024)  # not aligned
    yield lambda: dropout_add.forward(x, None, None, Draw(0.1, 1, 0, 0))
    yield lambda: run_losses(64, 50257, BRAIN)  # no multiple of eight


def test_what_is_not_aligned_is_read_narrowly_and_found_to_be():
    for run in list_narrow():
        assert len(narrow_accesses(compiled(record_launches(run, MODULES)[0], 90).asm["ptx"])) > 8


def run_draws(draws: list[tuple[Any, ...]]) -> None:
    x = torch.ones(8, 2, 64)
    for draw in draws:
        dropout_add.forward(x, None, None, Draw(*draw))
        dropout_add.backward(x, Draw(*draw), has_grad_bias=True)


def run_chunks() -> None:
    for rows, first, softcap, temperature in [
        (64, 0, 30.0, 0.7), (64, 64, 50.0, 0.01), (1, 3, 1.0, 1.5), (17, 5, 2.0, 2.0), (16, 1, 30.0, 0.7),
    ]:  # fmt: skip
        run_losses(rows, 50304, BRAIN, first, softcap=softcap, temperature=temperature)


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

"""The loss head's kernels compiled ahead of time, as test_kernels_compiled.py does with those of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from ahead_of_time import Launch, compiled, narrow_accesses, record_launches, resources, source_of
from covering import exhaustive

from tempo_kernels.linear_cross_entropy import kernel
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares

# At which three programs of 8 warps share a multiprocessor.
MOST_REGISTERS = 80
# At which two do: tanh and a division take some.
MOST_REGISTERS_CAPPED = 128


def launches_of(run: Callable[[], object]) -> list[Launch]:
    return record_launches(run, [kernel])


def run_scaled_chunk(num_rows: int, num_columns: int, dtype: torch.dtype, softcap: float, temperature: float) -> None:
    """Both kernels with everything that linear_log_prob may ask for, and with what each asks for alone."""
    logits, columns = torch.empty(num_rows, num_columns, dtype=dtype), torch.zeros(num_rows, dtype=torch.int64)
    vectors = torch.ones(4, num_rows)
    for shares in (
        Shares(1.0, 0.0, num_columns - 47, True, softcap, temperature, True),
        Shares(1.0, 0.0, num_columns, False, 0.0, 1.0, True),
        Shares(1.0, 0.0, num_columns, False, 0.0, temperature),
    ):
        kernel.find_statistics(logits, columns, shares)
        rows = Rows(columns, *vectors[:3], vectors[3] if shares.has_entropy else None)
        kernel.write_gradient_(logits, rows, shares)


SCALED_NAMES = [
    f"{name}, {what}"
    for what in ("capped, divided and cut, with entropy", "with entropy", "divided")
    for name in ("statistics", "gradient")
]


def run_chunk(num_rows: int, num_columns: int, dtype: torch.dtype, first: int = 0) -> None:
    """Both forms of both kernels on tokens [first, first + num_rows) of more."""
    logits = torch.empty(num_rows, num_columns, dtype=dtype)
    columns = torch.zeros(first + num_rows, dtype=torch.int64)[first:]
    vectors = torch.ones(3, first + num_rows)[:, first:]
    for shares in (Shares(1.0, 0.0, num_columns), Shares(1.0, 0.1, num_columns)):
        kernel.find_statistics(logits, columns, shares)
        kernel.write_gradient_(logits, Rows(columns, *vectors), shares)


# GPT-2's padded vocabulary, Llama 3's, one that is a multiple of eight only, and a shard of one.
SHAPES = [(torch.bfloat16, columns) for columns in (50304, 128256, 6288)]
SHAPES += [(torch.float16, 50264), (torch.float32, 50304)]


def cases(shapes: list[tuple[torch.dtype, int]]) -> Iterator[tuple[str, Launch]]:
    for dtype, num_columns in shapes:
        names = ("statistics", "gradient", "statistics with sum", "smoothed gradient")
        launches = launches_of(lambda dtype=dtype, num_columns=num_columns: run_chunk(64, num_columns, dtype))
        launches += launches_of(
            lambda dtype=dtype, num_columns=num_columns: run_scaled_chunk(64, num_columns, dtype, 30.0, 0.7)
        )
        for name, launch in zip([*names, *SCALED_NAMES], launches, strict=True):
            yield f"{name}, {dtype}, v {num_columns}", launch


@pytest.mark.parametrize(
    ("capability", "shapes"),
    [
        pytest.param(90, [SHAPES[0], SHAPES[2], SHAPES[4]], marks=pytest.mark.slow),
        *((capability, SHAPES[:1]) for capability in (80, 100)),
        *exhaustive((90, SHAPES), (80, SHAPES), (100, SHAPES)),
    ],
    ids=["90", "80", "100", "90 all", "80 all", "100 all"],
)
def test_kernels_keep_to_few_registers_and_read_16_bytes_at_a_time(capability, shapes):
    for name, launch in cases(shapes):
        binary = compiled(launch, capability)
        usage = resources(binary.asm["cubin"])
        assert usage["STACK"] == 0 and usage["LOCAL"] == 0, f"{name} spills: {usage}"
        assert usage["REG"] <= (MOST_REGISTERS_CAPPED if "capped" in name else MOST_REGISTERS), f"{name}: {usage}"
        # What is left is a row's own numbers: its target, maximum, scale, gradient and slope, and up to four results.
        narrow = narrow_accesses(binary.asm["ptx"])
        assert len(narrow) <= 7, f"{name}: {narrow}"


def test_new_temperatures_and_softcaps_compile_nothing_anew():
    numbers = [(30.0, 0.7), (50.0, 0.01), (1.0, 1.5), (2.0, 2.0)]
    launches = launches_of(lambda: [run_scaled_chunk(64, 50304, torch.bfloat16, *pair) for pair in numbers])
    assert len(launches) == 6 * len(numbers) and len({source_of(launch).hash() for launch in launches}) == 6


def test_a_vocabulary_that_is_no_multiple_of_eight_is_read_narrowly_and_found_to_be():
    launch = launches_of(lambda: run_chunk(64, 50257, torch.bfloat16))[0]
    assert len(narrow_accesses(compiled(launch, 90).asm["ptx"])) > 7


def test_the_sizes_and_places_of_chunks_compile_nothing_anew():
    chunks = [(64, 0), (64, 64), (1, 3), (17, 5), (16, 1)]
    launches = launches_of(lambda: [run_chunk(rows, 50304, torch.bfloat16, first) for rows, first in chunks])
    assert len(launches) == 4 * len(chunks) and len({source_of(launch).hash() for launch in launches}) == 4

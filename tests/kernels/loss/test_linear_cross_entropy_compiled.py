"""The loss head's kernels compiled ahead of time, as test_kernels_compiled.py does with those of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from ahead_of_time import Launch, compiled, narrow_accesses, record_launches, resources, source_of
from covering import exhaustive
from ttir_ranges import find_overflows

from tempo_kernels.linear_cross_entropy import kernel
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares

# At which three programs of 8 warps share a multiprocessor.
MOST_REGISTERS = 80
# At which two do: tanh and a division take some.
MOST_REGISTERS_CAPPED = 128


def launches_of(run: Callable[[], object]) -> list[Launch]:
    return record_launches(run, [kernel])


def list_forms(num_columns: int, softcap: float = 30.0, temperature: float = 0.7) -> dict[str, Shares]:
    """What is compiled for itself: the losses', and what linear_log_prob asks for alone and all at once."""
    return {
        "plain": Shares(1.0, 0.0, num_columns),
        "smoothed": Shares(1.0, 0.1, num_columns),
        "with entropy": Shares(1.0, 0.0, num_columns, has_entropy=True),
        "divided": Shares(1.0, 0.0, num_columns, temperature=temperature),
        "capped, divided and cut, with entropy": Shares(1.0, 0.0, num_columns - 47, True, softcap, temperature, True),
    }


def run_chunk(num_rows: int, num_columns: int, dtype: torch.dtype, first: int = 0, **numbers: float) -> None:
    """Every form of both kernels on tokens [first, first + num_rows) of more."""
    logits = torch.empty(num_rows, num_columns, dtype=dtype)
    columns = torch.zeros(first + num_rows, dtype=torch.int64)[first:]
    vectors = torch.ones(4, first + num_rows)[:, first:]
    for shares in list_forms(num_columns, **numbers).values():
        kernel.compute_statistics(logits, columns, shares)
        rows = Rows(columns, *vectors[:3], vectors[3] if shares.has_entropy else None)
        kernel.write_gradient_(logits, rows, shares)


# GPT-2's padded vocabulary, Llama 3's, one that is a multiple of eight only, and a shard of one.
SHAPES = [(torch.bfloat16, columns) for columns in (50304, 128256, 6288)]
SHAPES += [(torch.float16, 50264), (torch.float32, 50304)]


def cases(shapes: list[tuple[torch.dtype, int]]) -> Iterator[tuple[str, Launch]]:
    for dtype, num_columns in shapes:
        names = [f"{kind}, {form}" for form in list_forms(num_columns) for kind in ("statistics", "gradient")]
        launches = launches_of(lambda dtype=dtype, num_columns=num_columns: run_chunk(64, num_columns, dtype))
        for name, launch in zip(names, launches, strict=True):
            yield f"{name}, {dtype}, v {num_columns}", launch


@pytest.mark.parametrize(
    ("capability", "shapes"),
    [
        pytest.param(90, [SHAPES[0], SHAPES[4]], marks=pytest.mark.slow),
        (80, SHAPES[:1]),
        *exhaustive((90, SHAPES), (80, SHAPES), (100, SHAPES)),
    ],
    ids=["90", "80", "90 all", "80 all", "100 all"],
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


def test_no_number_of_32_bits_runs_over_in_a_chunk_of_2_31_logits():
    launches = launches_of(lambda: run_chunk(1 << 16, 50304, torch.bfloat16))
    assert [find_overflows(launch) for launch in launches] == [[]] * len(launches)


def test_a_vocabulary_that_is_no_multiple_of_eight_is_read_narrowly_and_found_to_be():
    launch = launches_of(lambda: run_chunk(64, 50257, torch.bfloat16))[0]
    assert len(narrow_accesses(compiled(launch, 90).asm["ptx"])) > 7


def test_new_sizes_places_temperatures_and_softcaps_compile_nothing():
    chunks = [(64, 0, 30.0, 0.7), (64, 64, 50.0, 0.01), (1, 3, 1.0, 1.5), (17, 5, 2.0, 2.0), (16, 1, 30.0, 0.7)]

    def run() -> None:
        for rows, first, softcap, temperature in chunks:
            run_chunk(rows, 50304, torch.bfloat16, first, softcap=softcap, temperature=temperature)

    launches = launches_of(run)
    assert len(launches) == 10 * len(chunks) and len({source_of(launch).hash() for launch in launches}) == 10

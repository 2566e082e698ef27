"""Sizes of memory, read and written."""

from __future__ import annotations

import argparse

import pytest

from tempo_megatron.settings.config import TempoConfig, check_block
from tempo_megatron.words.argument_types import format_bytes, parse_memory

SIZES = {
    **{"80GiB": 80 * 2**30, "80G": 80 * 2**30, "80 GB": 80 * 10**9, "72e9": 72 * 10**9, "1TiB": 2**40, "100b": 100},
    **{"79.5gib": round(79.5 * 2**30), "512MiB": 2**29, "1.5m": 3 * 2**19, "1.5e3 MB": 15 * 10**8},
    "85899345920": 80 * 2**30,
}


def test_sizes_are_read_as_people_write_them_and_written_in_gib_mib_or_kib() -> None:
    assert {text: parse_memory(text) for text in SIZES} == SIZES
    written = [format_bytes(num_bytes) for num_bytes in (80 * 2**30, 3 * 2**20, 512, -(2**31))]
    assert written == ["80.00 GiB", "3.00 MiB", "0.50 KiB", "-2.00 GiB"]


@pytest.mark.parametrize(
    "text", ["", "GiB", "80 GiBs", "-1GiB", "0", "0GiB", "1..5GB", "inf", "1e999", "eighty", "8G iB", "1ib"]
)
def test_what_is_no_size_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size of memory; give one such as 80GiB, 80GB or 72e9"):
        parse_memory(text)


def test_a_size_whose_unit_was_forgotten_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'80' without a unit is in bytes; write 80GiB or 80MiB"):
        parse_memory("80")
    with pytest.raises(ValueError, match="tempo.memory_budget: '72' without a unit is in bytes; write 72GiB"):
        check_block({"memory_budget": 72})


@pytest.mark.parametrize("value", [True, None, 7.5, ["72GiB"]])
def test_a_budget_is_a_text_or_a_whole_number(value: object) -> None:
    with pytest.raises(ValueError, match='tempo.memory_budget is .*; expected a size such as "72GiB", or a number'):
        TempoConfig.from_dict({"memory_budget": value})

"""docs/settings.md is what the tables say, and each name in it exists."""

from __future__ import annotations

import pkgutil
from pathlib import Path

from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.slots.block_slots import CLASSES
from tempo_megatron.training.settings_page import write_page

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    how = "python -m tempo_megatron.training.settings_page > docs/settings.md"
    assert (ROOT / "docs/settings.md").read_text() == write_page(), how


def test_each_operation_is_a_function_and_each_kernel_a_file() -> None:
    for operation in OPERATIONS.values():
        assert all(callable(pkgutil.resolve_name(function)) for function in operation.functions)
        assert all((ROOT / "kernels/tempo_kernels" / kernel).is_file() for kernel in operation.kernels)
        assert {"off", *operation.keeps} >= set(operation.preference) and hasattr(TempoConfig(), operation.name)


def test_each_value_of_a_switch_has_its_class() -> None:
    values = {(operation.name, value) for operation in OPERATIONS.values() for value in operation.keeps}
    assert CLASSES.keys() == values

"""The Triton kernels of activations compiled ahead of time, with the arguments that their launchers give; no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

from ahead_of_time import Launch, compiled, narrow_accesses, record_launches, resources
from covering import parametrize_covering

from tempo_kernels import kernel_sums
from tempo_kernels.activation import ACTIVATIONS, kernel

MOST_REGISTERS = 128
"""At which four programs share a multiprocessor."""
INPLACE = [name for name, row in ACTIVATIONS.items() if row.slope_of_output is not None]


def list_launches(rows: int, width: int, dtype: torch.dtype, activation: str) -> Iterator[tuple[str, Launch]]:
    """The launches of every form of an activation, with a bias and without."""
    x = torch.empty(rows, width, dtype=dtype)
    half, bits, inverts = x[:, : width // 2], x.new_empty(x.numel() // 8, dtype=torch.uint8), activation in INPLACE
    bits = bits if ACTIVATIONS[activation].x_min is not None else None
    for bias in (x[0], None):
        has_bias = bias is not None
        runs = {
            "recompute": (x, x, bias, None),
            "gated": (half, x, bias, None),
        }
        if inverts:
            runs["inplace"] = (x, x, None, bits)
        for form, kept in runs.items():

            def run(bias: Any = bias, form: str = form, kept: Any = kept, has_bias: bool = has_bias) -> None:
                kernel.forward(x, bias, activation, form)
                kernel.backward(*kept, activation, form, has_bias)

            for launch in record_launches(run, [kernel, kernel_sums]):
                yield f"{form}{'' if has_bias else ' without bias'}, {launch.kernel.__name__}", launch


@pytest.mark.slow
@parametrize_covering(
    each={"activation": ACTIVATIONS.keys()}, dtype={"16": torch.bfloat16, "32": torch.float32}, capability=[90, 80, 100]
)
def test_kernels_spill_nothing_and_read_16_bytes_at_a_time(activation, dtype, capability):
    for name, launch in list_launches(2048, 4096, dtype, activation):
        binary = compiled(launch, capability)
        usage, narrow = resources(binary.asm["cubin"]), narrow_accesses(binary.asm["ptx"])
        assert usage["STACK"] == 0 and usage["LOCAL"] == 0 and usage["REG"] <= MOST_REGISTERS, f"{name}: {usage}"
        # Of bits a thread has a byte per eight elements, and of a bias and of sums a column or two.
        assert len(narrow) <= 4, f"{name}: {narrow}"

"""The kernels of bias_dropout_add compiled ahead of time; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

from ahead_of_time import Launch, compiled, narrow_accesses, record_launches, resources, source_of
from covering import exhaustive

from tempo_kernels import kernel_sums
from tempo_kernels.dropout_add import Draw, kernel

MOST_REGISTERS = 128
"""At which four programs of 4 warps share a multiprocessor."""


def launches_of(run: Callable[[], Any]) -> list[Launch]:
    """Of the room's own kernels."""
    launches = record_launches(run, [kernel, kernel_sums])
    return [launch for launch in launches if launch.kernel in (kernel._forward_kernel, kernel._backward_kernel)]


def run_all_forms(dtype: torch.dtype, hidden_size: int) -> None:
    x = torch.empty(512, 4, hidden_size, dtype=dtype)
    tokens = torch.empty(2, 512, 4, dtype=torch.int64)
    draws = Draw(0.1, 2**64 - 1, 5, 7), Draw(0.1, *tokens[:, 0, 0], 7), Draw(0.1, 7, 0, 0, 0, *tokens)
    for draw in draws:
        kernel.forward(x, x[0, 0], x, draw)
        kernel.backward(x, draw, has_grad_bias=True)
    kernel.forward(x, None, None, draws[0])
    kernel.forward(x, x[0, 0], x, Draw(0.0, 0, 0, 0))
    kernel.backward(x, draws[0], has_grad_bias=False)


SHAPES = [(torch.bfloat16, 4096), (torch.float16, 1000), (torch.float32, 4096)]


@pytest.mark.parametrize(
    ("capability", "shapes"),
    [
        pytest.param(90, SHAPES[:1], marks=pytest.mark.quick),
        (80, SHAPES[1:2]),
        (100, SHAPES[2:]),
        *exhaustive((90, SHAPES), (80, SHAPES), (100, SHAPES)),
    ],
    ids=["90", "80", "100", "90 all", "80 all", "100 all"],
)
def test_kernels_keep_to_few_registers_and_access_16_bytes_at_a_time(capability, shapes):
    for dtype, hidden_size in shapes:
        for launch in launches_of(lambda dtype=dtype, hidden_size=hidden_size: run_all_forms(dtype, hidden_size)):
            assert len(launch.kernel.arg_names) <= 20
            binary = compiled(launch, capability)
            usage = resources(binary.asm["cubin"])
            assert usage["STACK"] == 0 and usage["LOCAL"] == 0 and usage["REG"] <= MOST_REGISTERS, usage
            # What is left: a row and a sample for each of a thread's rows, and of sums a column for each thread.
            narrow = [access for access in narrow_accesses(binary.asm["ptx"]) if not access.endswith(".b64")]
            assert len(narrow) <= 8 and not any(access.endswith(".b16") for access in narrow), narrow


def test_a_tensor_that_is_not_aligned_is_read_narrowly_and_found_to_be():
    x = torch.empty(4097, dtype=torch.bfloat16)[1:].view(2, 2, 1024)
    [launch] = launches_of(lambda: kernel.forward(x, None, None, Draw(0.1, 1, 0, 0)))
    assert len(narrow_accesses(compiled(launch, 90).asm["ptx"])) > 8


def test_new_keys_probabilities_and_positions_compile_nothing():
    x = torch.ones(8, 2, 64)
    draws = [(0.1, 0, 0, 0), (0.5, 2**64 - 1, 1, 1, 8), (0.3, 2**31, 16, 2**20, 8 << 31), (0.25, 2**63, 2**31 - 1, 16)]
    numbers = torch.arange(5)  # of which every second one is aligned to 16 bytes
    loaded = [(0.1, numbers[0], numbers[1], 0), (0.5, numbers[1], numbers[2], 1), (0.3, numbers[4], numbers[3], 16)]

    def run(draw: tuple[Any, ...]) -> None:
        kernel.forward(x, None, None, Draw(*draw))
        kernel.backward(x, Draw(*draw), has_grad_bias=True)

    for forms in (draws, loaded):
        launches = launches_of(lambda forms=forms: [run(draw) for draw in forms])
        assert len({source_of(launch).hash() for launch in launches}) == 2

"""benchmarks/checkers.py: planted faults are found by each checker that is installed, and every kernel is looked at."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

import checkers
import triton
import triton.language as tl
from ahead_of_time import Launch, compiled, source_of

from tempo_kernels.norm import rms_norm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
compiles = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under TRITON_INTERPRET=1")


@triton.jit
def _beyond_kernel(x_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + place, place.to(tl.float32))


@triton.jit
def _race_kernel(x_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(x_ptr + place, (place + tl.program_id(0)).to(tl.float32))


def plant(kernel, size: int) -> Launch:
    """Returns a launch of two programs of 64 elements over a tensor of so many."""
    return Launch(kernel, {"x_ptr": torch.zeros(size), "BLOCK": 64}, {"enable_fp_fusion": True}, (2,))


@pytest.mark.parametrize("checker", checkers.CHECKERS)
def test_the_command_runs_no_case_that_is_not_asked_for(checker):
    assert checkers.main([checker, "--cases", "no such case"]) == 0
    with pytest.raises(SystemExit):
        checkers.main([checker, "--capability", "70"])


def test_a_public_function_gives_its_launches_to_the_checker():
    taken = []
    with checkers.replace_kernels(taken.append):
        rms_norm(torch.ones(4, 2, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16))
    assert taken and all(launch.name.startswith("norm.") for launch in taken)


@compiles
def test_ttsem_finds_a_store_beyond_a_tensor_and_a_race():
    pytest.importorskip("ttsem", reason="ttsem is not installed; benchmarks/checkers.py says where")
    with checkers.open_ttsem(90) as check:
        assert check(plant(_beyond_kernel, 128)) == (("passed", ""), True)
        assert "oob_write of x_ptr" in check(plant(_beyond_kernel, 100))[0][1]
        assert "race of x_ptr" in check(plant(_race_kernel, 64))[0][1]


@pytest.mark.skipif(not INTERPRETED, reason="triton-viz wants TRITON_INTERPRET=1")
def test_triton_viz_finds_a_store_beyond_a_tensor():
    pytest.importorskip("triton_viz", reason="triton-viz is not installed; benchmarks/checkers.py says where")
    with checkers.open_triton_viz(90) as check, contextlib.redirect_stdout(None):
        assert check(plant(_beyond_kernel, 128)) == (("passed", ""), True)
        # Of a larger storage, so that the write that comes first harms nobody.
        launch = plant(_beyond_kernel, 128)
        launch.arguments["x_ptr"] = launch.arguments["x_ptr"][:100]
        assert check(launch)[0][0] == "finding"


@compiles
def test_sentryward_finds_a_race():
    pytest.importorskip("sentryward", reason="sentryward is not installed; benchmarks/checkers.py says where")
    for kernel, status in ((_beyond_kernel, "passed"), (_race_kernel, "finding")):
        launch = plant(kernel, 128)
        assert checkers.check_by_sentryward(launch, compiled(launch, 100))[0] == status


@compiles
def test_cuxray_passes_a_kernel_without_shared_memory():
    pytest.importorskip("cuxray", reason="cuxray is not installed; benchmarks/checkers.py says where")
    launch = plant(_race_kernel, 128)
    assert checkers.check_by_cuxray(launch, compiled(launch, 90)) == ("passed", "")


@compiles
def test_a_launch_with_a_tuple_of_arguments_compiles_as_triton_would_do_it():
    launch = Launch(
        _tuple_kernel, {"pointers": (torch.zeros(64), None), "sizes": (64, 1)}, {"enable_fp_fusion": True}, (1,)
    )
    assert source_of(launch).signature == {"pointers": ("*fp32", "constexpr"), "sizes": ("i32", "constexpr")}
    assert ".entry" in compiled(launch, 90).asm["ptx"]


@triton.jit
def _tuple_kernel(pointers, sizes):
    place = tl.arange(0, 64)
    tl.store(pointers[0] + place, 1.0, mask=place < sizes[0] * sizes[1])

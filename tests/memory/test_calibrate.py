"""`tempo-megatron bench --calibrate`: a file that the planner reads, with rates that a clock confirms."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tempo_megatron.cli import main
from tempo_megatron.memory.plan.gpu import read_gpu

QUICK = ["bench", "--calibrate", "--device", "cpu", "--hidden-size", "64", "--round-ms", "5"]


def test_measured_rates_are_a_gpu_that_the_planner_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    assert main([*QUICK, "--output", str(path)]) == 0
    gpu = read_gpu(str(path))
    assert gpu.calibrated and torch.__version__ in gpu.source
    assert f"tempo-megatron plan --gpu {path}" in capsys.readouterr().out
    # Another clock: one product of another size, and one copy. A busy machine is slower at times, not ten times faster.
    x = torch.randn(512, 512)
    began = time.perf_counter()
    for _ in range(20):
        x @ x
    rate = 20 * 2 * 512**3 / (time.perf_counter() - began)
    assert rate / 30 < gpu.matmul_flops_per_second["fp32"] < 30 * rate
    y = torch.empty(1 << 24)
    began = time.perf_counter()
    y.copy_(torch.ones(1 << 24))
    assert gpu.bytes_per_second > 2 * 4 * (1 << 24) / (time.perf_counter() - began) / 30


@pytest.mark.gpu
def test_a_gpu_is_measured_at_less_than_its_data_sheet(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert main(["bench", "--calibrate", "--output", str(path)]) == 0
    measured, peak = read_gpu(str(path)), read_gpu("h200")
    assert measured.bytes_per_second < peak.bytes_per_second * 1.02
    assert measured.matmul_flops_per_second["bf16"] < peak.matmul_flops_per_second["bf16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "nowhere/mine.json"], "lies in a folder that does not exist"),
        (["--output", "mine.json", "--device", "cuda"], "torch sees no CUDA device"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err

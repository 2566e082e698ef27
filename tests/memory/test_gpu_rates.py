"""Rates of GPUs: those of configs/gpu are a data sheet's, and `bench --calibrate` writes what a clock confirms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.benchmark import Timer

from tempo_megatron.cli import main
from tempo_megatron.memory.plan.gpu import read_gpu

FOLDER = Path(__file__).parents[2] / "configs" / "gpu"
QUICK = ["bench", "--calibrate", "--device", "cpu", "--hidden-size", "64", "--round-ms", "5"]


def test_measured_rates_are_a_gpu_that_the_planner_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    assert main([*QUICK, "--output", str(path)]) == 0
    gpu = read_gpu(str(path))
    assert gpu.calibrated and torch.__version__ in gpu.source
    assert f"tempo-megatron plan --gpu {path}" in capsys.readouterr().out
    # Another clock. A busy machine is slower at times, not thirty times.
    x, y = torch.randn(512, 512), torch.empty(1 << 24)
    for rate, work, run in (
        (gpu.matmul_flops_per_second["fp32"], 2 * 512**3, lambda: x @ x),
        (gpu.bytes_per_second, 2 * y.nbytes, lambda: y.copy_(torch.ones_like(y))),
    ):
        assert work / 30 < rate * Timer("run()", globals={"run": run}).timeit(10).median < 30 * work


@pytest.mark.gpu
def test_a_gpu_is_measured_at_less_than_its_data_sheet(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert main(["bench", "--calibrate", "--output", str(path)]) == 0
    measured, peak = read_gpu(str(path)), read_gpu("h200")
    assert measured.bytes_per_second < peak.bytes_per_second * 1.02
    assert measured.matmul_flops_per_second["bf16"] < peak.matmul_flops_per_second["bf16"]
    assert measured.host_link is not None and peak.host_link is not None
    assert 1e9 < measured.host_link.to_gpu_bytes_per_second < peak.host_link.to_gpu_bytes_per_second


def test_every_file_is_a_gpu_that_says_where_its_rates_are_from() -> None:
    names = sorted(path.stem for path in FOLDER.iterdir())
    assert names == ["a100", "b200", "gb200", "gh200", "h100", "h200", "rtx4090"]
    for name in names:
        gpu = read_gpu(name)
        assert not gpu.calibrated and "NVIDIA" in gpu.source
        assert gpu.matmul_flops_per_second["bf16"] > gpu.matmul_flops_per_second["fp32"] > gpu.bytes_per_second
        assert gpu.host_link is not None and gpu.bytes_per_second > max(gpu.host_link.share())
        assert "NVIDIA" in gpu.host_link.source and "both directions" in gpu.host_link.source
    link = read_gpu("gb200").host_link
    assert link is not None and link.share() == (225e9, 225e9)
    assert read_gpu("H100") == read_gpu(str(FOLDER / "h100.json"))


def test_a_gpu_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="--gpu h10 is unknown; the nearest known one is h100: give a100, b200, gb200, gh200, h100"
    ):
        read_gpu("h10")
    content = json.loads((FOLDER / "h100.json").read_text())
    link = content["host_link"]
    wrong = tmp_path / "wrong.json"
    for change, message in (
        ([1], "does not describe a GPU; expected an object of title, calibrated"),
        ({"bandwidth": 1}, "does not describe a GPU"),
        ({"bytes_per_second": 0}, "bytes_per_second is 0; expected a positive number"),
        ({"bytes_per_second": True}, "bytes_per_second is True; expected a positive number"),
        ({"matmul_flops_per_second": {"bf16": 1}}, "expected an object of bf16, fp16, fp32"),
        ({"host_link": {**link, "to_gpu_bytes_per_second": 0}}, "host_link.to_gpu_.* is 0; expected"),
        ({"host_link": {**link, "gpus_per_uplink": 1.5}}, "is 1.5; expected a whole number"),
        ({"host_link": 64e9}, "host_link is 64000000000.0; expected an object of title, to_host"),
    ):
        wrong.write_text(json.dumps({**content, **change} if isinstance(change, dict) else change))
        with pytest.raises(ValueError, match=message):
            read_gpu(str(wrong))
    wrong.write_text("no json")
    with pytest.raises(ValueError, match="is not valid JSON"):
        read_gpu(str(wrong))

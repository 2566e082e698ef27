"""configs/gpu: every file is a GPU whose rates are a data sheet's until somebody measures them; sizes of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tempo_megatron.memory.plan.gpu import read_gpu

FOLDER = Path(__file__).parents[2] / "configs" / "gpu"


def test_every_file_is_a_gpu_that_says_where_its_rates_are_from() -> None:
    names = sorted(path.stem for path in FOLDER.iterdir())
    assert names == ["a100", "b200", "h100", "h200", "rtx4090"]
    for name in names:
        gpu = read_gpu(name)
        assert not gpu.calibrated and "NVIDIA" in gpu.source
        assert gpu.matmul_flops_per_second["bf16"] > gpu.matmul_flops_per_second["fp32"] > gpu.bytes_per_second
    assert read_gpu("H100") == read_gpu(str(FOLDER / "h100.json"))


def test_a_gpu_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--gpu h10 is unknown; the nearest known one is h100: give a100, b200, h100"):
        read_gpu("h10")
    content = json.loads((FOLDER / "h100.json").read_text())
    wrong = tmp_path / "wrong.json"
    for change, message in (
        ("no json", "is not valid JSON"),
        (json.dumps([1]), "does not describe a GPU; expected an object of title, calibrated"),
        (json.dumps({**content, "bandwidth": 1}), "does not describe a GPU"),
        (json.dumps({**content, "bytes_per_second": 0}), "bytes_per_second is 0; expected a positive number"),
        (json.dumps({**content, "bytes_per_second": True}), "bytes_per_second is True; expected a positive number"),
        (json.dumps({**content, "matmul_flops_per_second": {"bf16": 1}}), "expected rates of bf16, fp16, fp32"),
    ):
        wrong.write_text(change)
        with pytest.raises(ValueError, match=message):
            read_gpu(str(wrong))

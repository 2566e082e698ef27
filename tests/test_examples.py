"""Each example runs as its first line says, and shows what it is there to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_example(name: str) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("DS_ACCELERATOR", None)
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py"], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_operations_keep_fewer_bytes_and_compute_the_same() -> None:
    output = run_example("operations")
    torch_bytes, tempo_bytes = (int(text.replace(",", "")) for text in re.findall(r"([\d,]+) bytes kept", output))
    assert tempo_bytes < 0.6 * torch_bytes
    (difference,) = re.findall(r"differ by at most (\S+) of", output)
    assert float(difference) < 1e-4
    assert "have the same masks" in output


@pytest.mark.slow
def test_the_megatron_model_learns_with_and_without_tempo() -> None:
    losses = re.findall(
        r"^(?:stock|Tempo): loss (\S+) at the first step, (\S+) at the last", run_example("megatron_model"), re.M
    )
    assert len(losses) == 2 and losses[0][0] == losses[1][0]
    assert all(float(last) < 0.5 * float(first) for first, last in losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("bert_trainer", ["transformers", "accelerate"]),
        ("gpt2_deepspeed", ["transformers", "deepspeed"]),
        ("lora", ["transformers", "peft"]),
    ],
)
def test_the_models_of_transformers_learn(name: str, packages: list[str]) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed; pip install tempo-megatron[test]")
    output = run_example(name)
    if name == "bert_trainer":
        first, last = map(float, re.search(r"^loss (\S+) at first, (\S+) at last", output, re.M).groups())
    else:
        first, last = (float(text.rstrip(",")) for text in re.findall(r"loss (\S+)", output)[-2:])
    assert last < 0.9 * first
    if name == "lora":
        kept = [int(text.replace(",", "")) for text in re.findall(r"([\d,]+) bytes kept", output)]
        assert kept[2] < 0.7 * kept[0]
    if name != "lora":
        assert "replaced  dropout     Dropout" in output


@pytest.mark.slow
def test_the_deepspeed_run_learns() -> None:
    first, last = map(float, re.findall(r"loss (\S+)", run_example("deepspeed_run")))
    assert last < 0.8 * first

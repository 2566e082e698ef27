"""Each example runs as its first line says, and shows what it is there to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_outputs import EXAMPLES

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


@pytest.mark.quick
def test_operations_keep_fewer_bytes_and_compute_the_same() -> None:
    """test_readme.py runs it and the other examples of the README, and looks at what they print."""
    EXAMPLES["operations"](run_example("operations"))


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

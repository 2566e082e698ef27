"""Each example runs as its first line says, and shows what it is there to show."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from example_outputs import EXAMPLES
from rank_processes import make_process

ROOT = Path(__file__).parent.parent


def run_as_main(name: str, log: str) -> None:
    """In a fork of a process that has imported torch, Megatron and DeepSpeed."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = [f"examples/{name}.py"]
    sys.path.insert(0, str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def run_example(name: str, folder: Path) -> str:
    process = make_process(run_as_main, name, str(folder / "log"))
    process.start()
    process.join(600)
    output = (folder / "log").read_text(encoding="utf-8")
    assert process.exitcode == 0, output
    return output


@pytest.mark.quick
def test_operations_keep_fewer_bytes_and_compute_the_same(tmp_path: Path) -> None:
    """test_readme.py starts it and the other examples of the README, and looks at what they print."""
    EXAMPLES["operations"](run_example("operations", tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("bert_trainer", ["transformers", "accelerate"]),
        ("gpt2_deepspeed", ["transformers", "deepspeed"]),
        ("lora", ["transformers", "peft"]),
    ],
)
def test_the_models_of_transformers_learn(name: str, packages: list[str], tmp_path: Path) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed; pip install tempo-megatron[test]")
    output = run_example(name, tmp_path)
    if name == "bert_trainer":
        first, last = map(float, re.search(r"^loss (\S+) at first, (\S+) at last", output, re.M).groups())
    else:
        first, last = (float(text.rstrip(",")) for text in re.findall(r"loss (\S+)", output)[-2:])
    assert last < 0.9 * first
    if name == "lora":
        kept = [int(text.replace(",", "")) for text in re.findall(r"([\d,]+) bytes kept", output)]
        assert kept[2] < 0.7 * kept[0]
    else:
        assert "replaced  dropout     Dropout" in output

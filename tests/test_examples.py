"""Each example runs as its first line says, each notebook to its end, and shows what it is there to show."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from example_outputs import EXAMPLES
from rank_processes import make_process

ROOT = Path(__file__).parent.parent


def run_as_main(script: str, log: str, *words: str) -> None:
    """In a fork of a process that has imported torch, Megatron and DeepSpeed."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = [script, *words]
    sys.path.insert(0, str(ROOT / "examples"))
    runpy.run_path(script, run_name="__main__")


def run_example(name: str | Path, folder: Path, *words: str) -> str:
    """What an example prints, or another script, given by its path."""
    script = str(name if isinstance(name, Path) else ROOT / "examples" / f"{name}.py")
    process = make_process(run_as_main, script, str(folder / "log"), *words)
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
    assert "replaced  dropout     Dropout" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "packages"),
    [
        ("sft_lora", [], ["trl", "peft"]),
        ("sft_lora", ["--model", "llama", "--packing", "--lora-dropout", "0"], ["trl", "peft"]),
        ("encoders", ["bert", "dinov2"], ["transformers"]),
        ("encoders", ["timm"], ["timm"]),
        ("encoders", ["conformer"], ["torchaudio"]),
        ("hub_kernels", [], ["transformers", "kernels.layer"]),
        ("torchtitan_cpu", [], ["torchtitan"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_jobs_of_other_projects_keep_less_and_reach_stocks_losses(
    name: str, words: list[str], packages: list[str], tmp_path: Path
) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed; pip install {package}", exc_type=ImportError)
    output = run_example(name, tmp_path, *words)
    tables = re.findall(r"^\| stock \|(.*)\|\n\| Tempo \|(.*)\|\n\| Tempo \+ checkpointing \|(.*)\|$", output, re.M)
    assert tables, output
    for table in tables:
        (_, *of_stock), (kept, *of_tempo), (fewer, *_) = (
            [float(each) for each in (row[1], *row[4].split(","))] for row in (text.split("|") for text in table)
        )
        assert fewer < kept < 0.85
        assert of_tempo == pytest.approx(of_stock, rel=0.0 if "0" in words or name in NO_DROPOUT else 0.4, abs=2e-3)


NO_DROPOUT = ("hub_kernels", "torchtitan_cpu")


@pytest.mark.slow
def test_fine_tuning_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed; pip install trl")
    words = ["--save", str(tmp_path / "run")]
    assert "from the beginning" in run_example("sft_lora", tmp_path, *words)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    assert "step 4, from" in (again := run_example("sft_lora", tmp_path, *words)) and "checkpoint-2" in again


def run_notebook(name: str, folder: Path) -> str:
    """What its code prints, and how many figures it has drawn at last."""
    notebook = json.loads((ROOT / "examples" / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    count = "import matplotlib.pyplot\nprint(len(matplotlib.pyplot.get_fignums()), 'figures')"
    script = folder / f"{name}.py"
    script.write_text("\n".join([*cells, count]), encoding="utf-8")
    return run_example(script, folder)


@pytest.mark.slow
def test_the_notebooks_bert_keeps_less_and_learns(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; pip install tempo-megatron[test]")
    found = run_notebook("finetune_bert", tmp_path)
    stock, tempo = (float(number) for number in re.findall(r": ([\d.]+) MiB kept", found))
    assert tempo < 0.5 * stock
    rows = re.findall(r"loss ([\d.]+) at first, ([\d.]+) at last, (\d+)% right", found)
    assert len(rows) == 2
    for first, last, right in rows:
        assert float(last) < 0.9 * float(first) and int(right) > 40  # a third by chance


@pytest.mark.slow
def test_the_notebooks_command_becomes_a_table_a_figure_and_a_plan(tmp_path: Path) -> None:
    found = run_notebook("will_it_fit", tmp_path)
    (stock, tempo) = re.findall(r"^peak +([\d.]+) +([\d.]+)", found, re.MULTILINE)[0]
    assert float(tempo) < 0.7 * float(stock) and "Tempo fits 40.00 GiB" in found
    assert float(re.search(r"([\d.]+) GiB  ", found)[1]) <= 14 and "--use-tempo" in found
    assert found.endswith("1 figures\n")

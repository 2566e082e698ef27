"""Each example runs as its first line says, each notebook to its end, and shows what it is there to show."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import re
import runpy
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from example_outputs import EXAMPLES
from rank_processes import make_process

from tempo_megatron.extras import is_installed

ROOT = Path(__file__).parent.parent


# What examples import for seconds, by the package that they need.
SLOW = {"transformers": "transformers.trainer", "peft": "peft", "trl": "trl.trainer.sft_trainer"}


def serve(jobs: Any) -> None:
    """Run scripts in forks of this process, which has imported torch, Megatron and DeepSpeed, and imports besides what
    the first script of a package needs."""
    with contextlib.suppress(EOFError):
        while True:
            packages, script, log, words = jobs.recv()
            for package in SLOW.keys() & packages:
                importlib.import_module(SLOW[package])
            if (process := os.fork()) == 0:
                os._exit(run_as_main(script, log, words))
            jobs.send(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def run_as_main(script: str, log: str, words: Sequence[str]) -> int:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = [script, *words]
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    sys.stdout.flush()
    return 0


Runner = Callable[..., str]


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    ours, theirs = multiprocessing.Pipe()
    process = make_process(serve, theirs)
    process.start()
    theirs.close()
    yield ours
    ours.close()
    process.join()


@pytest.fixture
def run_example(server: Any, tmp_path: Path) -> Runner:
    """Gives what an example prints, or another script, given by its path, where the packages are installed."""

    def run(name: str | Path, *words: str, packages: Sequence[str] = ()) -> str:
        for package in packages:
            if not is_installed(package):
                pytest.skip(f"{package} is not installed; pip install {package}")
        script = str(name if isinstance(name, Path) else ROOT / "examples" / f"{name}.py")
        server.send(({*packages}, script, str(tmp_path / "log"), words))
        assert server.poll(600)
        status, output = server.recv(), (tmp_path / "log").read_text(encoding="utf-8")
        assert status == 0, output
        return output

    return run


@pytest.mark.quick
def test_operations_keep_fewer_bytes_and_compute_the_same(run_example: Runner) -> None:
    """test_readme.py starts it and the other examples of the README, and looks at what they print."""
    EXAMPLES["operations"](run_example("operations"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("bert_trainer", ["transformers", "accelerate"]),
        ("gpt2_deepspeed", ["transformers", "deepspeed"]),
    ],
)
def test_the_models_of_transformers_learn(name: str, packages: list[str], run_example: Runner) -> None:
    output = run_example(name, packages=packages)
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
    name: str, words: list[str], packages: list[str], run_example: Runner
) -> None:
    output = run_example(name, *words, packages=packages)
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
def test_fine_tuning_goes_on_from_its_last_checkpoint(run_example: Runner, tmp_path: Path) -> None:
    words, packages = ["--save", str(tmp_path / "run")], ["trl", "peft"]
    assert "from the beginning" in run_example("sft_lora", *words, packages=packages)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    again = run_example("sft_lora", *words, packages=packages)
    assert "step 4, from" in again and "checkpoint-2" in again


def write_notebook(name: str, folder: Path) -> Path:
    """A script of its code, which says how many figures that has drawn at last."""
    notebook = json.loads((ROOT / "examples" / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    count = "import matplotlib.pyplot\nprint(len(matplotlib.pyplot.get_fignums()), 'figures')"
    script = folder / f"{name}.py"
    script.write_text("\n".join([*cells, count]), encoding="utf-8")
    return script


@pytest.mark.slow
def test_the_notebooks_bert_keeps_less_and_learns(run_example: Runner, tmp_path: Path) -> None:
    found = run_example(write_notebook("finetune_bert", tmp_path), packages=["transformers"])
    stock, tempo = (float(number) for number in re.findall(r": ([\d.]+) MiB kept", found))
    assert tempo < 0.5 * stock
    rows = re.findall(r"loss ([\d.]+) at first, ([\d.]+) at last, (\d+)% right", found)
    assert len(rows) == 2
    for first, last, right in rows:
        assert float(last) < 0.9 * float(first) and int(right) > 40  # a third by chance


@pytest.mark.slow
def test_the_notebooks_command_becomes_a_table_a_figure_and_a_plan(run_example: Runner, tmp_path: Path) -> None:
    found = run_example(write_notebook("will_it_fit", tmp_path))
    (stock, tempo) = re.findall(r"^peak +([\d.]+) +([\d.]+)", found, re.MULTILINE)[0]
    assert float(tempo) < 0.7 * float(stock) and "Tempo fits 40.00 GiB" in found
    assert float(re.search(r"([\d.]+) GiB  ", found)[1]) <= 14 and "--use-tempo" in found
    assert found.endswith("1 figures\n")

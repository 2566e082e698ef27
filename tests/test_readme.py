"""What README and docs/training.md say is so: commands run, links lead somewhere, the table is what is measured."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm_python
from example_outputs import EXAMPLES
from rank_processes import PRELOAD

from tempo_megatron import TempoConfig
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.training.run.arguments import parse_arguments

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def kept_bytes() -> dict:
    return runpy.run_path(str(ROOT / "benchmarks" / "kept_bytes.py"))


def command_blocks() -> list[str]:
    """Those of the README, and of the page that goes on from it."""
    return re.findall(r"^```bash\n(.*?)^```$", README + TRAINING, re.MULTILINE | re.DOTALL)


def test_every_block_without_a_language_is_none_of_commands() -> None:
    languages = re.findall(r"^```(.*)\n(?:.*\n)*?```$", README + TRAINING, re.MULTILINE)
    assert set(languages) == {"bash", "json", "python"}
    assert len(command_blocks()) >= 5


def test_the_edits_for_a_real_job_are_known_arguments() -> None:
    (edits,) = re.findall(r"raise the rest: `(.*?)`", TRAINING, re.DOTALL)
    required = ["--deepspeed_config", "d", "--model", str(ROOT / "configs/model/gpt2_124m.json"), "--data-path", "x"]
    assert parse_arguments([*required, *edits.split()]).train_iters == 10000


def test_the_tempo_block_switches_everything_on() -> None:
    (block,) = re.findall(r'^"tempo": (\{.*\})$', TRAINING, re.MULTILINE)
    first = TempoConfig(**{name: operation.preference[0] for name, operation in OPERATIONS.items()})
    assert TempoConfig.from_dict(json.loads(block)) in (first, TempoConfig())


def test_the_paths_of_the_reading_order_exist() -> None:
    named = re.findall(r"^\| (`.*?`) \|", CONTRIBUTING.partition("In reading order:")[2], re.MULTILINE)
    paths = [path for cell in named for path in re.findall(r"`([^`]+)`", cell)]
    assert len(paths) >= 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_table_is_written_from_the_results_file(kept_bytes: dict) -> None:
    records = [json.loads(line) for line in kept_bytes["OUTPUT"].read_text(encoding="utf-8").splitlines()]
    assert kept_bytes["table_in_readme"]() == kept_bytes["table"](records)


@pytest.mark.slow
def test_the_results_file_holds_what_is_measured_now(kept_bytes: dict) -> None:
    recorded = [json.loads(line) for line in kept_bytes["OUTPUT"].read_text(encoding="utf-8").splitlines()]
    for old, new in zip(recorded, kept_bytes["measure"](), strict=True):
        for key in ("layout", "model", "shape", "dtype", "p", "stock", "stock_on_gpu", "tempo", "recompute"):
            assert old[key] == new[key], f"{old['layout']}: {key}; run python benchmarks/kept_bytes.py"


# What is not run as printed, and how often it stands there: fewer steps and less text, so that all fits into CI.
REPLACED = {
    "bash launch/quickstart.sh ": ("bash launch/quickstart.sh --iters 6 ", 1),
    "--train-iters 10 --eval-iters 2 ": ("--train-iters 6 --eval-iters 1 ", 1),
    "--input kernels tempo_megatron tests ": ("--input kernels ", 2),
}


@pytest.fixture
def fresh_clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a clone would have, changes of the working tree included."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("this is not a git checkout, so what a clone would have is not known")
    clone = tmp_path_factory.mktemp("clone") / "tempo"
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    return clone


def lend_environment(clone: Path) -> None:
    """Make the clone's .venv as the README's first command leaves it, with the packages of the environment that the
    tests run in, which launch/environment.sh made too."""
    folder = clone / ".venv"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    packages = [clone, clone / "kernels", *site_packages()]
    (site / "lent.pth").write_text("".join(f"{path}\n" for path in packages))
    for entry in importlib.metadata.entry_points(group="console_scripts"):
        if entry.name.startswith(("tempo", "torchrun")):
            script = folder / "bin" / entry.name
            call = f"if __name__ == '__main__':  # and not in a worker\n    sys.exit({entry.attr}())\n"
            script.write_text(f"#!{folder}/bin/python\nimport sys\nfrom {entry.module} import {entry.attr}\n{call}")
            script.chmod(0o755)
    launcher = Path(sys.executable).with_name("deepspeed").read_text().partition("\n")[2]
    (folder / "bin" / "deepspeed").write_text(f"#!{folder}/bin/python\n{launcher}")
    (folder / "bin" / "deepspeed").chmod(0o755)
    (folder / "made-for").write_text(f"{folder}\n")
    stamp = f'. launch/environment.sh; VENV={folder} environment_stamp >"{folder}/installed-train"'
    subprocess.run(["bash", "-c", stamp], cwd=clone, check=True)


@contextlib.contextmanager
def warm_up(clone: Path) -> Iterator[None]:
    """Let launchers, ranks, commands and examples of the lent environment run in forks of one process;
    test_trainer_launchers.py has launchers and ranks that start as they do elsewhere."""
    folder = clone / ".venv"
    (site,) = folder.glob("lib/python*/site-packages")
    shutil.copy2(warm_python.__file__, site)
    (site / "warm.pth").write_text("import warm_python; warm_python.delegate()\n")
    program = "import sys, warm_python; warm_python.serve(*sys.argv[1:])"
    support = str(Path(warm_python.__file__).parent)
    server = subprocess.Popen(
        [str(folder / "bin" / "python"), "-W", "ignore", "-c", program, *PRELOAD],
        cwd=clone,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": support},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def site_packages() -> list[str]:
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


@pytest.mark.slow
@pytest.mark.parametrize("is_lent", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_every_command_runs_in_order_as_printed_in_a_fresh_clone(fresh_clone: Path, is_lent: bool) -> None:
    """One shell, as a newcomer's. The README's first command finds its environment made, as .ci/run has made one by the
    same function, or makes it with this Python's torch."""
    if is_lent:
        lend_environment(fresh_clone)
    script = "\n".join(command_blocks())
    for printed, (run, times) in REPLACED.items():
        assert script.count(printed) == times
        script = script.replace(printed, run)
    # Nothing of the environment that the tests run in is at hand.
    here = os.path.realpath(Path(sys.executable).parent)
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if os.path.realpath(p) != here)
    # One thread and one compiler per process: the two of some commands share the cores with whatever else runs here.
    # pip compiles no bytecode: of tens of thousands of files the commands read a part, and write what they read.
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_")) or name == "HOME"}
    single = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PIP_COMPILE": "0"}
    with warm_up(fresh_clone) if is_lent else contextlib.nullcontext():
        done = subprocess.run(
            ["bash", "-c", f"set -euxo pipefail\n{script}"],
            cwd=fresh_clone,
            env={**kept, **single, "PATH": path, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert f"source {Path('.venv/bin/activate')}\n" in done.stdout
    assert ("The environment is ready" in done.stdout) is not is_lent
    check_quickstart(fresh_clone / "runs" / "quickstart", done.stdout)
    for said in ("1 x CPU", "2 x CPU (1 threads) by torchrun: ", "2 x CPU (1 threads) by deepspeed: TP 2 + SP, DP 1"):
        assert torch.cuda.is_available() or said in done.stdout
    assert done.stdout.count("step 3/3 | loss ") == 7  # each of the commands of docs/training.md that train
    for check in EXAMPLES.values():
        check(done.stdout)
    assert (fresh_clone / "runs/mine/weights.safetensors").stat().st_size > 1_000_000
    exported = {path.name for path in (fresh_clone / "runs/mine/hf").iterdir()}
    assert exported == {"model.safetensors", "config.json", "generation_config.json", "vocab.json", "merges.txt"}
    assert "the weights are those of runs/imported/iter_0000000" in done.stdout


def check_quickstart(output: Path, printed: str) -> None:
    """It ended with a table and a figure, and Tempo's run learned as stock's did, with less kept for backward."""
    table = (output / "table.txt").read_text()
    assert table in printed
    columns = re.findall(r"^(.+?)  +(.+)$", table, re.MULTILINE)
    rows = {name: values.replace(",", "").split() for name, values in columns}
    assert float(rows["kept for backward per layer, sbh"][2]) < 0.5
    assert 0.97 < float(rows["validation loss"][2]) < 1.03
    assert float(rows["CPU ms per step of a rank, median"][0]) > 0.0
    for run in ("stock", "tempo"):
        records = [json.loads(line) for line in (output / run / "metrics.jsonl").read_text().splitlines()]
        losses = [record["loss"] for record in records if record["kind"] == "train"]
        assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
        choices = next(record["tempo"] for record in records if record["kind"] == "run")
        assert (choices == dataclasses.asdict(TempoConfig.off())) == (run == "stock")
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")

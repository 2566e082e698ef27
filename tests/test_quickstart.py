"""How the environment is chosen and made, and what the quickstart says; tests/test_readme.py runs it to its end."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tempo_megatron.training.comparison import compare

ROOT = Path(__file__).parent.parent
BASH = shutil.which("bash") or "/bin/bash"


def write_command(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{BASH}\n{body}\n")
    path.chmod(0o755)
    return path


def bash(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"HOME": os.environ.get("HOME", "/"), "PATH": os.environ["PATH"], **variables}
    return subprocess.run([BASH, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)


def source_and(call: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return bash(f"set -euo pipefail; . launch/environment.sh; {call}", **variables)


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """A machine without torch or GPU: its Python cannot import torch, and its pip finds nothing without an index."""
    no_torch = 'case "$*" in *torch*) exit 1 ;; esac\n'
    python = write_command(tmp_path / "bin", "python3", no_torch + f'exec {sys.executable} "$@"')
    pip = f'echo "pip: $*" >>{tmp_path}/calls\ncase "$*" in *--no-index*) exit 1 ;; *-m*pip*) exit 0 ;; esac\n'
    write_command(tmp_path / "venv" / "bin", "python", pip + no_torch + f'exec {sys.executable} "$@"')
    write_command(tmp_path / "bin", "nvidia-smi", "exit 9")
    venv = str(tmp_path / "venv")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    return {"PATH": path, "PYTHON": str(python), "VENV": venv, "LOG": f"{venv}/install.log"}


NO_GPU = ("bin", "nvidia-smi", "exit 9")
GPU = ("bin", "nvidia-smi", 'echo "GPU 0: some"')
# A pip that finds a wheel at hand.
WHEEL = ("venv/bin", "python", 'echo "pip: $*" >>{0}/calls\ncase "$*" in -c*) exit 1; esac')


@pytest.mark.parametrize(
    ("command", "variables", "calls", "said"),
    [
        (NO_GPU, {}, ["--no-index --no-deps", ""], ["several GB", "--torch-index-url"]),  # the registry comes last
        (NO_GPU, {"TORCH_INDEX_URL": "file:///builds"}, ["--index-url file:///builds"], []),
        (WHEEL, {}, ["--no-index --no-deps"], []),
        (GPU, {}, [""], []),  # the registry's build has CUDA
    ],
    ids=["registry", "index", "wheel", "GPU"],
)
def test_torch_is_installed_from_the_nearest_place_that_has_the_right_build(
    tmp_path: Path, machine: dict, command: tuple[str, str, str], variables: dict, calls: list[str], said: list[str]
) -> None:
    folder, name, body = command
    write_command(tmp_path / folder, name, body.replace("{0}", str(tmp_path)))
    done = source_and("install_torch", **machine, **variables)
    assert done.returncode == 0, done.stderr
    found = [call for call in (tmp_path / "calls").read_text().splitlines() if " -m pip install " in call]
    for call, options in zip(found, calls, strict=True):
        assert call.endswith(f"{options} torch>=2.7") and ("index" in call) == bool(options)
    assert all(words in done.stdout for words in said)


def test_the_users_torch_is_shared_instead_of_installed(tmp_path: Path, machine: dict) -> None:
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text('__version__ = "2.9.1+cpu"\n')
    python = write_command(tmp_path / "bin", "python3", f'PYTHONPATH={site} exec {sys.executable} "$@"')
    target = tmp_path / "purelib"
    target.mkdir()
    write_command(tmp_path / "venv" / "bin", "python", f'case "$*" in *purelib*) echo {target} ;; *) exit 1 ;; esac')
    done = source_and("install_torch", **{**machine, "PYTHON": str(python)})
    assert done.returncode == 0, done.stderr
    assert (target / "torch.pth").read_text() == f"{site}\n"


def test_a_shared_torch_gets_a_launcher_of_this_environment(tmp_path: Path, machine: dict) -> None:
    write_command(tmp_path / "venv" / "bin", "python", 'echo "python: $*"')
    done = source_and('write_torchrun; "$VENV/bin/torchrun" --nproc_per_node 2 "a b"', **machine)
    assert done.stdout == "python: -m torch.distributed.run --nproc_per_node 2 a b\n", done.stderr


def test_a_failed_installation_is_one_sentence_with_the_logs_path(tmp_path: Path, machine: dict) -> None:
    write_command(tmp_path / "venv" / "bin", "python", 'echo "pip says why"; exit 1')
    done = source_and("install_torch", TORCH_INDEX_URL="file:///builds", **machine)
    assert done.returncode == 1
    assert done.stderr == f"No torch could be installed from file:///builds; pip's words are in {machine['LOG']}\n"
    assert "pip says why" in Path(machine["LOG"]).read_text()


def test_a_python_that_cannot_make_an_environment_is_named_with_what_to_install(tmp_path: Path) -> None:
    body = f'case "$*" in *"import venv"*) exit 1 ;; esac\nexec {sys.executable} "$@"'
    without_venv = str(write_command(tmp_path / "without", "python3", body))
    for command in ("bash", "basename", "dirname", "id", "mkdir"):
        write_command(tmp_path / "bin", command, f'exec {shutil.which(command)} "$@"')
    for variables, *said in (
        ({"PYTHON": without_venv}, f"apt-get install -y python3.{sys.version_info.minor}-venv"),
        ({"PATH": str(tmp_path / "bin")}, "apt-get install -y python3 python3-venv"),
        ({"PYTHON": "/nowhere/python3"}, "/nowhere/python3", "Python >= 3.10"),
    ):
        done = source_and("prepare_environment", VENV=str(tmp_path / "venv"), **variables)
        assert done.returncode == 1 and all(words in done.stderr for words in said), done.stderr
        assert not (tmp_path / "venv").exists()


def test_a_missing_compiler_is_one_line_and_no_obstacle(tmp_path: Path, machine: dict) -> None:
    for command in ("bash", "id", "dirname"):
        write_command(tmp_path / "few", command, f'exec {shutil.which(command)} "$@"')
    done = source_and("note_missing_compiler", **{**machine, "PATH": str(tmp_path / "few")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and "apt-get install -y g++ python3." in done.stdout


def test_the_stamp_changes_with_the_place_of_the_environment(tmp_path: Path, machine: dict) -> None:
    write_command(tmp_path / "venv" / "bin", "python", f'exec {sys.executable} "$@"')
    write_command(tmp_path / "other" / "bin", "python", f'exec {sys.executable} "$@"')
    one, again = (source_and("environment_stamp", **machine).stdout for _ in range(2))
    other = source_and("environment_stamp", **{**machine, "VENV": str(tmp_path / "other")}).stdout
    assert one == again != other
    assert len(one.strip()) == 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [("--iters 0", "--iters is 0"), ("--iters", "--iters needs a value"), ("--iterations 5", "--iterations is not")],
)
def test_a_wrong_option_is_refused_before_anything_is_installed(arguments: str, said: str, tmp_path: Path) -> None:
    done = bash(f"bash launch/quickstart.sh {arguments}", VENV=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def write_run(path: Path, losses: list[float], speeds: list[float]) -> Path:
    steps = [
        {"kind": "train", "iteration": number, "loss": loss, "tokens_per_s": speed, "step_cpu_ms": 6e4 / speed}
        for number, (loss, speed) in enumerate(zip(losses, speeds, strict=True), 1)
    ]
    records = [{"kind": "run"}, *steps, {"kind": "validation", "loss": losses[-1] + 1}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    sides = {
        "stock": {"layer_sbh": 40.0, "layer_bytes": 2**22, "model_bytes": 2**23},
        "tempo": {"layer_sbh": 20.0, "layer_bytes": 2**21, "model_bytes": 2**22},
    }
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps(sides))
    return path


def test_the_table_compares_the_runs_without_their_first_interval(tmp_path: Path, ledger: Path) -> None:
    stock = write_run(tmp_path / "stock.jsonl", [9.0, 9.0, *[4.0] * 10], [1.0, 1.0, *[100.0] * 10])
    tempo = write_run(tmp_path / "tempo.jsonl", [9.0, 9.0, *[5.0] * 10], [1.0, 1.0, *[150.0] * 10])
    rows = dict(re.findall(r"^(.+?)  +(.+)$", compare(stock, tempo, ledger), re.MULTILINE))
    assert rows["training loss, last 10 steps"].split() == ["4.0000", "5.0000", "1.250"]
    assert rows["validation loss"].split() == ["5.0000", "6.0000", "1.200"]
    assert rows["tokens/s, median"].split() == ["100", "150", "1.500"]
    assert rows["kept for backward per layer, sbh"].split() == ["40.00", "20.00", "0.500"]
    assert rows["kept for backward per layer, MiB"].split() == ["4.00", "2.00", "0.500"]


def test_speeds_are_compared_interval_by_interval(tmp_path: Path, ledger: Path) -> None:
    """A machine that slows down in both runs at different times does not decide: the median of the ratios does."""
    losses, first = [4.0] * 6, [1.0]
    stock = write_run(tmp_path / "stock.jsonl", losses, [*first, 100.0, 200.0, 300.0, 400.0, 500.0])
    tempo = write_run(tmp_path / "tempo.jsonl", losses, [*first, 120.0, 240.0, 100.0, 480.0, 50.0])
    rows = dict(re.findall(r"^(.+?)  +(.+)$", compare(stock, tempo, ledger), re.MULTILINE))
    assert rows["tokens/s, median"].split() == ["300", "120", "1.200"]
    assert rows["CPU ms per step of a rank, median"].split() == ["200", "500", "0.833"]


def test_what_cannot_be_compared_is_named(tmp_path: Path, ledger: Path) -> None:
    stock = write_run(tmp_path / "stock.jsonl", [3.0, 2.0], [1.0, 1.0])
    tempo = write_run(tmp_path / "tempo.jsonl", [3.0], [1.0])
    with pytest.raises(ValueError, match="2 steps and .* has 1; give"):
        compare(stock, tempo, ledger)
    with pytest.raises(ValueError, match="none.jsonl holds no training step"):
        compare(stock, tmp_path / "none.jsonl", ledger)
    with pytest.raises(ValueError, match="none.json is no ledger"):
        compare(stock, stock, tmp_path / "none.json")

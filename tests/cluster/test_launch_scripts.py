"""The Slurm script, the hostfiles and the jobs: what they start, and whether the trainer's own parser takes it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tempo_megatron.cli import main
from tempo_megatron.training.run.arguments import parse_arguments

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "launch" / "jobs").glob("*.sh"))


def test_slurm_starts_a_job_of_launch_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "srun $*"\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def submit(*words: str) -> subprocess.CompletedProcess[str]:
        script = ["bash", "launch/slurm/pretrain_gpt.sbatch", *words]
        return subprocess.run(script, cwd=ROOT, capture_output=True, text=True)

    done = submit("launch/jobs/gpt2_xl_2x8.sh", "--data-path", "data/x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("srun --kill-on-bad-exit=1 --cpus-per-task=1 python -u launch/pretrain_gpt.py --deep")
    assert done.stdout.endswith("--data-path data/x\n")
    assert "no job is given, expected a file of launch/jobs" in submit().stderr


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "hostfiles").iterdir()), ids=lambda path: path.name)
def test_the_hostfiles_are_what_their_names_say(path: Path) -> None:
    hosts, slots = map(int, path.stem.split("x"))
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert (
        [words[1] for words in lines] == [f"slots={slots}"] * hosts == [f"slots={slots}"] * len({w[0] for w in lines})
    )


@pytest.mark.slow
def test_the_document_says_what_the_estimate_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    document = (ROOT / "docs" / "multinode.md").read_text(encoding="utf-8")
    commands = re.findall(r"^tempo-megatron (estimate(?:.*\\\n)*.*)$", document, re.MULTILINE)
    assert len(commands) == 2
    tempo, stock = (
        re.search(rf"^\| peak of a GPU, {name} \|(.*)$", document, re.MULTILINE) for name in ("Tempo", "stock")
    )
    for command, *cells in zip(commands, tempo[1].split("|"), stock[1].split("|"), strict=False):
        assert main(shlex.split(command.replace("\\\n", " "))) == 0
        (peak,) = re.findall(r"^peak +(\S+) +(\S+)$", capsys.readouterr().out, re.MULTILINE)
        assert [cell.split()[0] for cell in cells] == [peak[1], peak[0]]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_the_trainer_takes_the_jobs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    printed = subprocess.run(["bash", "-c", f'. {path}; printf "%s\\n" "${{JOB[@]}}"'], capture_output=True, text=True)
    args = parse_arguments([*printed.stdout.split(), "--data-path", "data/x"])
    hosts, slots = map(int, path.stem.rpartition("_")[2].split("x"))
    replicas = hosts * slots // (args.tensor_model_parallel_size or 1)
    assert args.global_batch_size % (replicas * args.micro_batch_size) == 0
    assert Path(args.deepspeed_config).is_file() and args.use_tempo

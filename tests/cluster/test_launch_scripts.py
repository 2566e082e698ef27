"""The scripts of launch/multinode and launch/slurm: how many ranks they start, where, and what of.

The launchers are scripts that print their arguments; the arguments of the jobs are read by the trainer's own parser.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tempo_megatron.cli import main
from tempo_megatron.cluster.hostfile import read_hostfile
from tempo_megatron.training.run.arguments import parse_arguments

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "launch" / "jobs").glob("*.sh"))


@pytest.fixture
def launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tempo-megatron", "torchrun", "mpirun", "mpiexec", "srun"):
        # The last line is what a machine file holds, where one is given.
        text = '#!/bin/sh\necho "$(basename "$0") $*"\n[ "$1" != -f ] || cat "$2"\n'
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in ("INTERFACE", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)


def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *words], cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True)


HOSTS = "configs/hostfiles/2x8.txt"


@pytest.mark.usefixtures("launchers")
@pytest.mark.parametrize(
    ("script", "first", "command"),
    [
        ("pdsh", [], f"tempo-megatron launch deepspeed --hostfile {HOSTS} run.py --lr 1"),
        (
            "no_ssh",
            ["1", "10.0.0.1"],
            f"tempo-megatron launch deepspeed --no_ssh --hostfile {HOSTS} --node_rank 1 --master_addr 10.0.0.1 "
            "--master_port 29500 run.py --lr 1",
        ),
        (
            "torchrun",
            ["1", "10.0.0.1"],
            "torchrun --nnodes 2 --nproc_per_node 8 --node_rank 1 --master_addr 10.0.0.1 --master_port 29500 "
            "run.py --lr 1",
        ),
    ],
)
def test_each_script_starts_its_launcher(script: str, first: list[str], command: str) -> None:
    done = run(f"launch/multinode/{script}.sh", HOSTS, *first, "run.py", "--lr", "1")
    assert (done.stdout, done.stderr, done.returncode) == (command + "\n", "", 0)


@pytest.mark.usefixtures("launchers")
def test_mpi_gets_as_many_ranks_as_there_are_slots_and_its_own_interface() -> None:
    done = run("launch/multinode/openmpi.sh", HOSTS, "run.py", INTERFACE="ib0", MASTER_ADDR="10.0.0.1")
    assert done.stdout.startswith(f"mpirun -n 16 --hostfile {HOSTS} --bind-to none")
    assert "btl_tcp_if_include ib0 -x PATH" in done.stdout and "-x MASTER_ADDR" in done.stdout
    assert "-x GLOO_SOCKET_IFNAME" in done.stdout and done.stdout.endswith(" python run.py\n")
    done = run("launch/multinode/mpich.sh", HOSTS, "run.py", INTERFACE="ib0")
    command, *machines = done.stdout.splitlines()
    assert command.endswith(" -n 16 -iface ib0 -genvall python run.py") and machines == ["node1:8", "node2:8"]


@pytest.mark.usefixtures("launchers")
def test_slurm_starts_a_job_of_launch_jobs() -> None:
    done = run("launch/slurm/pretrain_gpt.sbatch", "launch/jobs/gpt2_xl_2x8.sh", "--data-path", "data/x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("srun --kill-on-bad-exit=1 --cpus-per-task=1 python -u launch/pretrain_gpt.py --deep")
    assert done.stdout.endswith("--data-path data/x\n")
    assert "no job is given, expected a file of launch/jobs" in run("launch/slurm/pretrain_gpt.sbatch").stderr


@pytest.mark.usefixtures("launchers")
def test_what_is_missing_is_one_sentence(tmp_path: Path) -> None:
    for script in ("pdsh", "no_ssh", "torchrun", "openmpi", "mpich"):
        done = run(f"launch/multinode/{script}.sh", HOSTS)
        assert (
            done.returncode == 2 and f"expected at least {4 if script in ('no_ssh', 'torchrun') else 2}" in done.stderr
        )
        done = run(f"launch/multinode/{script}.sh", "no_file", "0", "a", "run.py")
        assert done.returncode == 2 and done.stderr.startswith("no_file is not a file; expected a hostfile")
    (tmp_path / "uneven").write_text("a slots=8\nb slots=4\n")
    done = run("launch/multinode/torchrun.sh", str(tmp_path / "uneven"), "0", "a", "run.py")
    assert done.returncode == 2 and "have different slots, expected the same" in done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "hostfiles").iterdir()), ids=lambda path: path.name)
def test_the_hostfiles_are_what_their_names_say(path: Path) -> None:
    hosts, slots = map(int, path.stem.split("x"))
    assert [len(host.slots) for host in read_hostfile(path)] == [slots] * hosts


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

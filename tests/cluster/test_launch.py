"""`tempo-megatron launch`: a stop reaches all ranks, and nothing of a job stays, whatever happens to its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tempo_megatron.cluster.job_processes import JOB_VARIABLE, find_processes
from tempo_megatron.cluster.launch import choose_variables, main
from tempo_megatron.training.watch.heartbeat_process import read_state

ROOT = Path(__file__).parents[2]
# In the place of DeepSpeed's: starts two ranks by a launcher, as it does, and has no handler for SIGTERM either.
RUNNER = """
import os, subprocess, sys
if os.path.exists(os.path.join(sys.argv[-1], "another_host_is_cut_off")):
    # Over several hosts only the ranks have the variable of the job, not what waits for them here.
    of_job = os.environ.pop("TEMPO_LAUNCH_ID", None)
    if of_job:
        os.environ["OF_JOB"] = of_job
        os.execv(sys.executable, [sys.executable, *sys.argv])
    subprocess.Popen([sys.executable, sys.argv[-2], "launcher", *sys.argv[-1:]],
                     env={**os.environ, "TEMPO_LAUNCH_ID": os.environ["OF_JOB"]}, start_new_session=True)
    ssh = subprocess.Popen(["sleep", "300"])
    with open(os.path.join(sys.argv[-1], "ssh"), "w") as file:
        file.write(str(ssh.pid))
    print("pdsh@here: node1: ssh exited with exit code 7", file=sys.stderr, flush=True)
    sys.exit(ssh.wait())
if os.path.exists(os.path.join(sys.argv[-1], "one_host_failed")):
    print("pdsh@here: node1: ssh exited with exit code 7", file=sys.stderr, flush=True)
sys.exit(subprocess.run([sys.executable, sys.argv[-2], "launcher", *sys.argv[-1:]]).returncode)
"""
# As a launcher it starts ranks and waits; as a rank it has a child of its own, and saves when it is asked to stop.
JOB = """
import os, pathlib, signal, subprocess, sys, time

role, folder = sys.argv[1], pathlib.Path(sys.argv[2])
if role == "launcher":
    ranks = [subprocess.Popen([sys.executable, *sys.argv[:1], "rank", str(folder)], env={**os.environ, "RANK": str(i)})
             for i in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))
if role == "worker":
    signal.signal(signal.SIGTERM, lambda *_: (folder / "worker_was_signalled").touch())
    time.sleep(60)
rank = os.environ["RANK"]
worker = subprocess.Popen([sys.executable, *sys.argv[:1], "worker", str(folder)])

def save(*_):
    (folder / f"saved{rank}").touch()
    worker.kill()
    sys.exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if (folder / "deaf").exists() else save)
(folder / f"ready{rank}").write_text(str(os.getpid()))
time.sleep(60)
"""


class Job:
    """A job of two ranks under `launch`, and what it leaves behind in a folder."""

    def __init__(self, folder: Path, *signs: str) -> None:
        self.folder = folder
        for sign in signs:
            (folder / sign).touch()
        package = folder / "deepspeed" / "launcher"
        package.mkdir(parents=True)
        for path in (package.parent, package):
            (path / "__init__.py").touch()
        (package / "runner.py").write_text(RUNNER)
        (folder / "job.py").write_text(JOB)
        code = (
            "import sys; from tempo_megatron.cluster import launch; launch._SECONDS_FOR_OTHER_HOSTS = 2.0; "
            "sys.exit(launch.main())"
        )
        command = [sys.executable, "-c", code, "deepspeed", "--num_gpus", "2", str(folder / "job.py"), str(folder)]
        paths = os.pathsep.join([str(folder), str(ROOT)])
        self.process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": paths}, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + 60
        while sum(path.read_text() != "" for path in folder.glob("ready*")) < 2:
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        (rank, *_) = folder.glob("ready*")
        environ = Path(f"/proc/{rank.read_text()}/environ").read_bytes().decode().split("\0")
        self.name = next(entry.partition("=")[2] for entry in environ if entry.startswith(JOB_VARIABLE))

    def finish(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        assert find_processes(self.name) == {}
        return self.process.returncode, errors.decode()

    def saved(self) -> int:
        return len(list(self.folder.glob("saved*")))

    def runner(self) -> int:
        """The process in the place of `deepspeed`."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_every_rank_save_and_end(number: signal.Signals, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.process.send_signal(number)
    code, errors = job.finish()
    assert (code, job.saved()) == (0, 2)
    assert "asked 2 ranks to save and end" in errors
    # A rank's own children are its own business.
    assert not (tmp_path / "worker_was_signalled").exists()


@pytest.mark.slow
def test_a_second_stop_ends_ranks_that_do_not_listen(tmp_path: Path) -> None:
    job = Job(tmp_path, "deaf")
    job.process.terminate()
    assert b"asked 2 ranks" in job.process.stderr.readline()
    job.process.terminate()
    code, errors = job.finish()
    assert (code, job.saved()) == (128 + signal.SIGKILL, 0)
    assert "processes that deepspeed left behind" in errors


def test_ranks_do_not_outlive_a_deepspeed_that_was_killed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    os.kill(job.runner(), signal.SIGKILL)
    code, errors = job.finish()
    assert code == 128 + signal.SIGKILL
    # The launcher, two ranks, and the child of each, unless its rank took it along.
    assert "tempo-megatron launch: ended 5 processes that deepspeed left behind" in errors


@pytest.mark.slow
def test_ranks_of_other_hosts_are_ended_when_those_of_one_have_failed(tmp_path: Path) -> None:
    """pdsh would wait for them, and they for a timeout."""
    job = Job(tmp_path, "one_host_failed", "deaf")
    code, errors = job.finish()
    assert code != 0
    assert "pdsh@here: node1: ssh exited with exit code 7" in errors
    assert "the ranks of a host have failed; those of the others are ended" in errors


@pytest.mark.slow
def test_launch_does_not_wait_for_the_ssh_of_a_host_that_is_cut_off(tmp_path: Path) -> None:
    job = Job(tmp_path, "another_host_is_cut_off")
    code, errors = job.finish()
    assert code == 1 and "the ranks of a host have failed; those of the others are ended" in errors
    assert read_state(int((tmp_path / "ssh").read_text()))[0] in "XZ"


def test_a_command_that_is_not_deepspeeds_is_one_sentence() -> None:
    for argv, sentence in (
        (["torchrun", "x.py"], "torchrun is given, expected `tempo-megatron launch deepspeed ...`; torchrun, mpirun"),
        (["--dry-run"], "nothing is given, expected"),
        (["--fast", "deepspeed"], "--fast is given before deepspeed, expected --dry-run or --timeout"),
        (["--timeout", "soon", "deepspeed"], "--timeout is 'soon', expected seconds above 0"),
        (["--timeout=0", "deepspeed"], "--timeout is '0', expected seconds above 0"),
    ):
        with pytest.raises(ValueError) as error:
            main(argv)
        assert sentence in str(error.value)


def test_a_dry_run_shows_the_command_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["--dry-run", "deepspeed", "--num_gpus", "2", __file__, "--lr", "1"]) == 0
    assert capsys.readouterr().out.startswith(f"deepspeed --num_gpus 2 {__file__} --lr 1\n  with {JOB_VARIABLE}=")


def test_the_users_variables_win_and_what_deepspeed_would_trip_over_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text("OMP_NUM_THREADS=5\n\n# FAST=1\nNCCL_SOCKET_IFNAME = ib0\n")
    (tmp_path / ".deepspeed_env").write_text("OMP_NUM_THREADS=7\n")
    assert main(["--dry-run", "deepspeed", __file__]) == 0
    said = capsys.readouterr().out
    assert " OMP_NUM_THREADS=7" in said and "NCCL_SOCKET_IFNAME=ib0" in said and "FAST" not in said
    (tmp_path / ".deepspeed_env").write_text("export NCCL_DEBUG=INFO\n")
    with pytest.raises(ValueError, match="has the line 'export NCCL_DEBUG=INFO', expected NAME=VALUE; correct it"):
        main(["--dry-run", "deepspeed", __file__])


def test_what_is_set_here_reaches_the_ranks_and_nothing_else_does() -> None:
    environ = {"DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "3", "SECRET": "x"}
    assert choose_variables("j", None, environ) == {JOB_VARIABLE: "j", "DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "3"}

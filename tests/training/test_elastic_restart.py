"""torchrun's agent starts the ranks again when one dies, and the run goes on from its newest checkpoint."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest
from training_job import SCRIPT, Data, arguments, free_port, launch, wait_for


@pytest.mark.exhaustive
def test_a_killed_rank_comes_back_and_the_run_ends_as_if_nothing_had_happened(data: Data, tmp_path: Path) -> None:
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

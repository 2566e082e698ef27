"""The ranks as one another's witnesses: a difference is told before anything starts, and a loss ends all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_processes import make_process
from training_job import Data, environment, free_port, run, zero

from tempo_megatron.training.rank_process import RankLog, find_launchers, is_launcher
from tempo_megatron.training.run.option import flatten
from tempo_megatron.training.team import Team, find_difference


def wait_as_rank(rank: int, folder: Path, what: str, limit: float, variables: dict[str, str]) -> None:
    """A rank of a team that does nothing but wait."""
    with open(folder / f"rank{rank}.log", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(variables)
    log = RankLog(rank)
    log.set_folder(str(folder / "logs"))
    team = Team.join(log, timeout_s=200, fault_timeout=limit)
    team.compare({"setting": {"lr": 1.0, "same": [rank * 0, None]}}, 200)
    print("met", flush=True)
    if what == "fail" and rank == 1:
        time.sleep(1)
        team.fail("the cause")
        os._exit(1)
    else:
        time.sleep(100)
    team.leave()


def start_waiting(folder: Path, what: str, limit: float = 3.0) -> list[Any]:
    """Two ranks that have met."""
    port, ranks = free_port(), []
    for rank in range(2):
        variables = environment(rank=rank, world_size=2, port=port)
        ranks.append(make_process(wait_as_rank, rank, folder, what, limit, variables))
        ranks[-1].start()
    deadline = time.monotonic() + 200
    while not all("met" in read(folder, rank) for rank in range(2)):
        assert time.monotonic() < deadline, [read(folder, rank) for rank in range(2)]
        time.sleep(0.1)
    return ranks


def read(folder: Path, rank: int) -> str:
    path = folder / f"rank{rank}.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def wait_for_ranks(ranks: list[Any], timeout_s: float) -> tuple[list[int | None], float]:
    """Exit codes, None of one that had not ended in time, and after how many seconds the last one ended."""
    start = time.monotonic()
    for rank in ranks:
        rank.join(max(0.1, timeout_s - (time.monotonic() - start)))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    return codes, time.monotonic() - start


FAULTS: dict[str, tuple[str, Callable[[list[Any]], None], int, str, list[int]]] = {
    "killed": ("wait", lambda ranks: ranks[1].kill(), 0, "error on rank 1 (.*): nothing has come from it", [1, -9]),
    "the first one killed": ("wait", lambda r: r[0].kill(), 1, "error on rank 0 (.*): the store that it se", [-9, 1]),
    "stopped": ("wait", lambda r: os.kill(r[1].pid, signal.SIGSTOP), 0, "error on rank 1 (.*): nothing has", [1, -9]),
    "the first one stopped": ("wait", lambda r: os.kill(r[0].pid, signal.SIGSTOP), 1, "error on rank 0 (.*)", [-9, 1]),
    "failed": ("fail", lambda ranks: None, 0, "error on rank 1 (.*): the cause", [1, 1]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("what", "act", "speaker", "words", "codes"), FAULTS.values(), ids=FAULTS)
def test_a_rank_that_is_gone_ends_the_others(
    tmp_path: Path, what: str, act: Callable[[Any], None], speaker: int, words: str, codes: list[int]
) -> None:
    """Also the one that is stopped: a launcher would wait 30 s for it."""
    ranks = start_waiting(tmp_path, what)
    act(ranks)
    found, seconds = wait_for_ranks(ranks, 40)
    assert found == codes and seconds < 30
    assert re.search(words, read(tmp_path, speaker))
    assert [rank for rank in range(2) if "error" in read(tmp_path, rank)] == [speaker]
    log = (tmp_path / "logs" / f"rank_{speaker:05d}.log").read_text(encoding="utf-8")
    assert "This rank was here:" in log and "in wait_as_rank" in log and re.search(words, log)


@pytest.mark.slow
def test_ranks_that_all_stop_are_not_blamed(tmp_path: Path) -> None:
    """A job is suspended for longer than the limit, and goes on."""
    ranks = start_waiting(tmp_path, "wait")
    for number, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 3)):
        for rank in ranks:
            os.kill(rank.pid, number)
        time.sleep(seconds)
    assert all(rank.is_alive() for rank in ranks)
    wait_for_ranks(ranks, 0)


def test_the_first_difference_is_named_with_both_values() -> None:
    first = {"host": "a", "setting": {"lr": 1.0, "deepspeed": {"stage": 1}}, "data": {"content of set 1": "x"}}
    same = {**first, "host": "b", "data": {}}  # another rank of that node reads no data
    assert find_difference([first, same]) is None
    other = {**same, "setting": {"lr": 1.0, "deepspeed": {"stage": 3}}, "package": {"torch": "2"}}
    said = find_difference([first, same, other]) or ""
    assert "setting deepspeed.stage is 3 on rank 2 (b) and 1 on rank 0 (a) (1 more: package torch)" in said
    assert "\n" not in said
    assert find_difference([first, {**same, "data": {"content of set 1": "y"}}]) is not None
    assert flatten(first)["setting deepspeed.stage"] == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/usr/bin/python", "/opt/bin/deepspeed", "--num_gpus", "2", "train.py"], True),
        (["python", "-u", "-m", "deepspeed.launcher.launch", "--world_info=x"], True),
        (["/opt/bin/python", "/opt/bin/torchrun", "--nproc_per_node", "2"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["bash", "run_deepspeed.sh"], False),
        (["/bin/sh", "-c", "deepspeed train.py"], False),
        (["python", "train.py", "--deepspeed"], False),
        ([], False),
    ],
)
def test_launchers_are_known_by_their_command_lines(words: list[str], expected: bool) -> None:
    assert is_launcher(words) is expected and find_launchers() == []  # a test has none


@pytest.mark.slow
def test_another_clipping_and_missing_data_on_one_rank_are_told_by_rank_0(data: Data, tmp_path: Path) -> None:
    config = tmp_path / "other.json"
    config.write_text(json.dumps({"gradient_clipping": 0.5, **zero(1)}))
    for of_rank_1, sentences in (
        (["--deepspeed_config", str(config)], ["setting clip_grad is 0.5 on rank 1", "and 1.0 on rank 0"]),
        (["--data-path", str(tmp_path / "none")], ["none.idx and ", "error on rank 1 ("]),
    ):
        failed = run(data, tmp_path, "--train-iters", "2", world_size=2, config=zero(1), of_rank_1=of_rank_1)
        assert failed.exit_codes == [1, 1] and "Traceback" not in failed.output
        assert all(sentence in failed.output for sentence in sentences), failed.output

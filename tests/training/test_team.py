"""The ranks as one another's witnesses: a difference is told before anything starts, and a loss ends all of them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_processes import make_process
from training_job import Data, environment, free_port, run, zero

from tempo_megatron.training.differences import find_difference, flatten
from tempo_megatron.training.watch.rank_process import RankLog, find_launchers, is_launcher
from tempo_megatron.training.watch.team import Team, check_open_files, open_listener, start_process


def wait_as_rank(rank: int, folder: Path, what: str, limit: float, variables: dict[str, str]) -> None:
    """A rank of a team that does nothing but wait."""
    with open(folder / f"rank{rank}.log", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(variables)
    log = RankLog(rank)
    log.set_folder(str(folder / "logs"))
    team = Team.join(log, timeout_s=200, heartbeat_s=limit)
    team.compare({"setting": {"lr": 1.0, "same": [rank * 0, None]}}, 200)
    print("met", flush=True)
    if what == "hold the lock" and rank == 1:
        ctypes.PyDLL(None).sleep(6)  # a C function that does not release the interpreter's lock
    elif what == "fail" and rank == 1:
        time.sleep(1)
        team.fail("the cause")
        team.confirm()
        os._exit(1)
    else:
        time.sleep(100)
    team.leave()


def start_waiting(folder: Path, what: str, limit: float = 2.0) -> list[Any]:
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
    "killed": ("wait", lambda ranks: ranks[1].kill(), 0, "error on rank 1 (.*): its process has ended", [1, -9]),
    "the first one killed": ("wait", lambda r: r[0].kill(), 1, "error on rank 0 (.*): its process has", [-9, 1]),
    "stopped": ("wait", lambda r: os.kill(r[1].pid, signal.SIGSTOP), 0, "error on rank 1 (.*): its .*stopped", [1, -9]),
    "failed": ("fail", lambda ranks: None, 0, "error on rank 1 (.*): the cause", [1, 1]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("what", "act", "speaker", "words", "codes"), FAULTS.values(), ids=FAULTS)
def test_a_rank_that_is_gone_ends_the_others(
    tmp_path: Path, what: str, act: Callable[[Any], None], speaker: int, words: str, codes: list[int]
) -> None:
    ranks = start_waiting(tmp_path, what)
    act(ranks)
    found, seconds = wait_for_ranks(ranks, 30)
    assert found == codes and seconds < 20
    assert re.search(words, read(tmp_path, speaker))
    assert [rank for rank in range(2) if "error" in read(tmp_path, rank)] == [speaker]
    log = (tmp_path / "logs" / f"rank_{speaker:05d}.log").read_text(encoding="utf-8")
    assert "This rank was here:" in log and "in wait_as_rank" in log and re.search(words, log)


@pytest.mark.slow
def test_a_rank_that_is_busy_is_not_gone(tmp_path: Path) -> None:
    """Three times the limit inside a C function that holds the interpreter's lock, in one rank; then all end well."""
    ranks = start_waiting(tmp_path, "hold the lock")
    ranks[1].join(30)
    assert ranks[1].exitcode == 0 and ranks[0].is_alive()
    assert "error" not in read(tmp_path, 0) + read(tmp_path, 1)
    wait_for_ranks(ranks, 0)


@pytest.mark.slow
def test_ranks_that_all_stop_are_not_blamed(tmp_path: Path) -> None:
    """Ctrl-Z stops all of them, and they go on later."""
    ranks = start_waiting(tmp_path, "wait")
    for number, seconds in ((signal.SIGSTOP, 4), (signal.SIGCONT, 1.5)):
        for rank in ranks:
            os.kill(rank.pid, number)
        time.sleep(seconds)
    assert all(rank.is_alive() for rank in ranks)
    wait_for_ranks(ranks, 0)


@contextlib.contextmanager
def start_judge(world_size: int, limit: float) -> Iterator[tuple[subprocess.Popen[bytes], tuple[str, int]]]:
    """A judge as rank 0 starts it, with the token "token", and its address."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        settings = {"token": "token", "world_size": world_size, "limit": limit, "listener": listener.fileno()}
        judge = start_process("judge", settings, pass_fds=(listener.fileno(),))
        address = listener.getsockname()
    try:
        yield judge, address
    finally:
        judge.kill()
        judge.wait()
        assert judge.stdin is not None
        judge.stdin.close()


def join_judge(address: tuple[str, int], rank: int) -> socket.socket:
    connection = socket.create_connection(address)
    connection.sendall(f"hello token {rank} host{rank}\n".encode())
    connection.settimeout(20)
    assert connection.recv(5) == b"beat\n"
    return connection


def hear_end(connection: socket.socket) -> str:
    """What the judge says at the end; this rank beats on until then."""
    heard, deadline = "", time.monotonic() + 20
    connection.settimeout(0.5)
    while "end " not in heard:
        assert time.monotonic() < deadline, heard
        connection.sendall(b"beat R\n")
        with contextlib.suppress(TimeoutError):
            heard += connection.recv(4096).decode()
    return heard


def test_a_host_that_falls_silent_ends_the_run_at_both_ends() -> None:
    """As with a link that is cut: nothing is closed, and nothing comes. The judge does not wait for that host."""
    with start_judge(2, 2.0) as (judge, address):
        ends = [join_judge(address, rank) for rank in range(2)]
        heard = hear_end(ends[0])
        assert '"rank": 1, "host": "host1"' in heard and "nothing has come from its host for 2 s" in heard
        ends[0].close()
        assert judge.wait(10) == 0
        ends[1].close()

    silent = socket.create_server(("127.0.0.1", 0))
    settings = {"address": silent.getsockname(), "token": "t", "rank": 1, "limit": 2, "launchers": []}
    with start_process("watch", settings, stdout=subprocess.PIPE) as watcher:
        connection = silent.accept()[0]
        connection.sendall(b"beat\n")
        assert watcher.stdout is not None and watcher.stdout.readline() == b"ready\n"
        said = watcher.stdout.readline().decode()
        watcher.kill()
    assert said.startswith("end ") and '"rank": 0' in said and "nothing has come from it for 2 s" in said
    connection.close()
    silent.close()


@contextlib.contextmanager
def allow_open_files(needed: int) -> Iterator[None]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files[1] != resource.RLIM_INFINITY and files[1] < needed:
        pytest.skip(f"needs {needed} open files, this machine allows {files[1]} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files[0], needed), files[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, files)


@pytest.mark.parametrize("world_size", [4096, pytest.param(16384, marks=pytest.mark.exhaustive)])
def test_a_judge_hears_thousands_of_ranks(world_size: int) -> None:
    """All beat, then one fails, and all are told."""
    with allow_open_files(world_size + 500), contextlib.ExitStack() as stack:
        judge, address = stack.enter_context(start_judge(world_size, 600.0))
        ranks = [stack.enter_context(join_judge(address, rank)) for rank in range(world_size)]
        for rank in ranks:
            rank.sendall(b"beat R\n")
            assert rank.recv(4096).startswith(b"beat")  # one a second: the judge sets the pace
        ranks[-1].sendall(b'failed {"sentence": "the cause", "patience": 0}\n')
        assert "the cause" in hear_end(ranks[0])
        ranks[0].sendall(b"told\n")
        for rank in ranks[1:]:
            rank.settimeout(20)
            heard = b""
            while b"end " not in heard:
                heard += rank.recv(4096)
        for rank in ranks:
            rank.close()
        assert judge.wait(20) == 0


def flood(address: tuple[str, int], until: threading.Event, counts: list[int]) -> None:
    """Connect as fast as this thread can, idle and talking nonsense in turn, and keep the newest few hundred."""
    held: deque[socket.socket] = deque()
    while not until.is_set():
        if len(held) == 300:
            held.popleft().close()
        with contextlib.suppress(OSError):
            held.append(socket.create_connection(address, timeout=1))
            counts[0] += 1
            if counts[0] % 2:
                held[-1].sendall(b"hello who 0 me\n" if counts[0] % 4 == 1 else b"x" * 5000)
    for stranger in held:
        stranger.close()


WRONG_WORDS = ["hello guess 1 h", "hello token 2 h", "hello token -1 h", "hello token x h", "hello token 0 h", "x"]


def test_strangers_do_not_disturb_the_judge() -> None:
    """Endless lines, wrong tokens, ranks that are none, and a flood of more connections than it may have files."""
    until, counts = threading.Event(), [0]
    with contextlib.ExitStack() as stack:
        judge, address = stack.enter_context(start_judge(2, 5.0))
        settings = {"address": address, "token": "token", "limit": 5.0, "launchers": []}

        def start_watcher(rank: int) -> subprocess.Popen[bytes]:
            watcher = start_process("watch", {**settings, "rank": rank}, stdout=subprocess.PIPE)
            assert watcher.stdout is not None and watcher.stdout.readline() == b"ready\n"
            return watcher

        watchers = [start_watcher(0)]
        endless = stack.enter_context(socket.create_connection(address))
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                endless.sendall(b"x" * (1 << 16))
        for words in WRONG_WORDS:
            stranger = stack.enter_context(socket.create_connection(address))
            stranger.settimeout(10)
            stranger.sendall(words.encode() + b"\n")
            assert stranger.recv(1) == b"", words
        thread = threading.Thread(target=flood, args=(address, until, counts))
        thread.start()
        try:
            while counts[0] < 700:
                assert judge.poll() is None
                time.sleep(0.01)
            assert len(os.listdir(f"/proc/{judge.pid}/fd")) < 300
            watchers.append(start_watcher(1))
            time.sleep(2)
        finally:
            until.set()
            thread.join()
        with pytest.raises(ConnectionRefusedError):  # all are there: nobody else may come
            for _ in range(100):
                stack.enter_context(socket.create_connection(address, timeout=1))
                time.sleep(0.1)
        for watcher in watchers:
            output, _ = watcher.communicate(b"bye\n", timeout=20)
            assert output == b"" and watcher.returncode == 0
        assert judge.wait(20) == 0


def test_a_watcher_that_strangers_crowd_out_comes_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = {"address": listener.getsockname(), "token": "t", "rank": 1, "limit": 5, "launchers": []}
        with start_process("watch", settings, stdout=subprocess.PIPE) as watcher:
            listener.accept()[0].close()
            with listener.accept()[0] as connection:
                assert connection.recv(4096).startswith(b"hello t 1 ")
                connection.sendall(b"beat\n")
                assert watcher.stdout is not None and watcher.stdout.readline() == b"ready\n"
            watcher.kill()


def test_the_token_is_no_argument_of_a_process() -> None:
    with start_judge(1, 5.0) as (judge, address), join_judge(address, 0):
        words = Path(f"/proc/{judge.pid}/cmdline").read_bytes().split(b"\0")
        assert words[-2:] == [b"judge", b""] and b"token" not in b" ".join(words)


def test_the_judge_listens_where_the_ranks_meet_and_nowhere_else() -> None:
    one_host = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    address, listener = open_listener(one_host)
    with listener:
        assert listener.getsockname()[0] == address and address in ("127.0.0.1", "::1")
    two_hosts = {**one_host, "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    address, listener = open_listener(two_hosts)  # what this host takes for loopback does not lead to it from another
    with listener:
        assert (address, listener.getsockname()[0]) == ("127.0.0.1", "127.0.0.1")
    elsewhere = {**two_hosts, "MASTER_ADDR": "192.0.2.1", "GLOO_SOCKET_IFNAME": "none"}
    address, listener = open_listener(elsewhere)
    with listener:
        assert (address, listener.getsockname()[0]) == ("192.0.2.1", "::" if socket.has_dualstack_ipv6() else "0.0.0.0")


def test_too_few_open_files_for_the_judge_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    with pytest.raises(ValueError, match="16384 ranks needs 16672 open files .* allows 4096; .* --heartbeat-seconds 0"):
        check_open_files(16384)
    check_open_files(3000)


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

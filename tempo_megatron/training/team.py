"""Lets the ranks of a run meet, notice one another's failure, and end together with one reported cause.

They meet in torch's store, which rank 0 or torchrun's agent serves. It needs no process group: a rank whose command
line is wrong can say so, and the ranks are compared before a collective that some of them would not call.

From then on a thread of each rank counts up in the store once a second. Rank 0 reads all counts, the others rank 0's,
and all see whether the store answers. A process group's timeout cannot do this: it would have to be longer than any
save or compile, and gloo goes on counting while a suspended job sleeps. Here a rank counts only the seconds in which it
runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from tempo_megatron.training.rank_process import RankLog, find_launchers, has_ended
from tempo_megatron.training.run.option import flatten

_BEAT_SECONDS = 1.0
_MISSED_BEATS = 3  # fewer may be a busy machine's
# A failure that may follow from another one waits this long for that to be reported. In this time a rank that has ended
# is also told from one that has not.
_CAUSE_SECONDS = 5.0
_TOLD_SECONDS = 5.0  # how long the ranks wait for one another's last words
_LEAVE_SECONDS = 30.0  # how long rank 0 waits for the others at a good end


class AgreedError(ValueError):
    """An error that every rank raises at once, in the same words; only rank 0 prints it."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """The reason why the run ends, and the rank that has it."""

    rank: int
    host: str
    sentence: str
    lost_pid: int = 0
    """The process of a rank that is lost, which cannot report it itself."""

    def describe(self) -> str:
        return f"error on rank {self.rank} ({self.host}): {self.sentence}"


class Team:
    """One rank's view of the ranks of its run, which share torch's `store`; `join` makes it."""

    def __init__(self, store: Any, rank: int, world_size: int, log: RankLog) -> None:
        self.store, self.rank, self.world_size, self.log = store, rank, world_size, log
        self._cause: Cause | None = None
        self.is_watched = False
        """Whether the ranks are told of one another's failures."""
        self._beats: Any = None
        self._first = Cause(0, "", "")
        self._pause = max(_BEAT_SECONDS, world_size / 1000)  # a store that thousands of ranks ask has more to do
        self._is_ready = False
        self._has_cause = threading.Event()
        self._ending = threading.RLock()  # of the thread that reports the end, for good
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._now = self._answered = 0.0  # seconds in which this process ran

    @classmethod
    def join(cls, log: RankLog, *, timeout_s: float, fault_timeout: float) -> Team:
        """Meets the other ranks, which have `timeout_s` to come. One process alone watches its launchers.

        A rank may be stopped or out of reach for `fault_timeout` seconds; with 0 the ranks do not watch.

        Raises ValueError if rank 0's port is in use or rank 0 cannot be reached.
        """
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        team = cls(open_store(timeout_s) if world_size > 1 else None, rank, world_size, log)
        if not fault_timeout:
            return team
        fault_timeout = max(fault_timeout, _MISSED_BEATS * team._pause)
        if world_size > 1:
            team.is_watched, team._beats = True, connect_again(timeout_s)
            team._beats.set(f"tempo/process/{rank}", json.dumps([socket.gethostname(), os.getpid()]))
            team._first = team._lose(0, "")
            team._start(team._exchange, fault_timeout)
        team._start(team._look, fault_timeout, find_launchers())
        return team

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def compare(self, facts: Mapping[str, Any], timeout_s: float) -> None:
        """Raises AgreedError on every rank if one has other `facts` than rank 0, or has not come within `timeout_s`."""
        if self.world_size == 1:
            return
        self._is_ready = True
        described = {"host": socket.gethostname(), **facts}
        self.store.set(f"tempo/facts/{self.rank}", zlib.compress(json.dumps(described, default=str).encode()))
        if self.rank == 0:
            self.store.set("tempo/verdict", self._judge_facts(timeout_s))
        self.store.wait(["tempo/verdict"], timedelta(seconds=timeout_s + 60))
        if sentence := self.store.get("tempo/verdict").decode():
            raise AgreedError(sentence)

    def _judge_facts(self, timeout_s: float) -> str:
        keys = [f"tempo/facts/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + timeout_s
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                missing = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
                return (
                    f"rank {', '.join(missing)} of {self.world_size} has not come within {timeout_s / 60:g} minutes; "
                    "look at its output, or raise --distributed-timeout-minutes"
                )
            time.sleep(0.1)
        return find_difference([json.loads(zlib.decompress(self.store.get(key))) for key in keys]) or ""

    def begin_to_end(self) -> None:
        """Makes this thread the one that reports the end; if another already does, waits for the end."""
        self._ending.acquire()

    def fail(self, sentence: str, *, is_secondary: bool = False) -> None:
        """Tells every rank that this one has failed, perhaps by another one's failure; reports any other cause."""
        own = Cause(self.rank, socket.gethostname(), sentence)
        self.begin_to_end()
        if self.is_watched:
            if is_secondary:
                self._call(self._beats.add, "tempo/suspicion", 1)
            if is_secondary or (self.rank and not self._is_ready):  # an error that all have, rank 0 reports
                self._has_cause.wait(2 * _CAUSE_SECONDS)
            if not self._has_cause.is_set():
                self._call(self._decide, own)
                self._has_cause.wait(_TOLD_SECONDS)
        cause = self._cause or own
        if cause.sentence != sentence or is_secondary:
            self._report(cause)
        self._confirm()

    def _decide(self, cause: Cause) -> None:
        """Makes `cause` the run's, unless there is one already."""
        self._beats.compare_set("tempo/end", "", json.dumps(dataclasses.asdict(cause)))

    @staticmethod
    def _call(act: Callable[..., Any], *args: Any, seconds: float = _TOLD_SECONDS) -> None:
        """Calls the store from a thread, for at most `seconds`: one that is out of reach never answers."""

        def try_it() -> None:
            with contextlib.suppress(RuntimeError):
                act(*args)

        thread = threading.Thread(target=try_it, daemon=True)
        thread.start()
        thread.join(seconds)

    def _count(self, key: str, awaited: str, number: int) -> None:
        """Counts `key` up, and waits until `awaited` is at least `number`."""
        self._beats.add(key, 1)
        while self._beats.add(awaited, 0) < number:
            time.sleep(0.1)

    def _confirm(self) -> None:
        """Lets the ranks end after rank 0 has reported why, and rank 0, which may serve the store, after the others."""
        others = self.world_size - 1 - (self._cause is not None and self._cause.lost_pid > 0)
        if self.is_watched:
            words = ("tempo/heard", "tempo/said", 1) if self.rank else ("tempo/said", "tempo/heard", others)
            self._call(self._count, *words)

    def leave(self) -> None:
        """Says goodbye, so that the other ranks do not report this one as lost.

        The threads end first: Python aborts a process at whose end a thread is inside the store.
        """
        self.begin_to_end()
        self._is_over.set()
        for thread in self._threads:
            thread.join(_TOLD_SECONDS)
        if self.is_watched:
            self._call(self._beats.set, f"tempo/beat/{self.rank}", "0")  # nobody waits for its beats
            number = 0 if self.rank else self.world_size
            self._call(self._count, "tempo/left", "tempo/left", number, seconds=_LEAVE_SECONDS)

    def _exchange(self, limit: float) -> None:
        """Counts up, reads whether the run ends, and sees who counts: rank 0 all ranks, the others rank 0."""
        beats, counts, heard = self._beats, [0] * self.world_size, [0.0] * self.world_size
        others = range(1, self.world_size) if self.rank == 0 else range(1)
        try:
            while True:
                beats.add(f"tempo/beat/{self.rank}", 1)
                if beats.check(["tempo/end"]):
                    self._end(Cause(**json.loads(beats.get("tempo/end"))))
                    return
                self._answered = self._now
                if beats.add("tempo/suspicion", 0):
                    limit = min(limit, max(_CAUSE_SECONDS, _MISSED_BEATS * self._pause))
                for rank in others:
                    count = beats.add(f"tempo/beat/{rank}", 0)
                    if count != counts[rank]:
                        counts[rank], heard[rank] = count, self._now
                    elif count and self._now - heard[rank] > limit:
                        self._decide(self._lose(rank, _say_silent(self._now - heard[rank])))
                if self._is_over.wait(self._pause):
                    return
        except RuntimeError:
            text = "the store that it serves is gone: its process was killed, or its host has gone down"
            self._end(dataclasses.replace(self._first, sentence=text))

    def _lose(self, rank: int, sentence: str) -> Cause:
        host, pid = json.loads(self._beats.get(f"tempo/process/{rank}"))
        return Cause(rank, host, sentence, pid)

    def _look(self, limit: float, launchers: list[psutil.Process]) -> None:
        """Counts the seconds in which this process runs, and ends it if rank 0 or a launcher is gone."""
        last = time.monotonic()
        while not self._is_over.wait(_BEAT_SECONDS / 4):
            passed, last = time.monotonic() - last, time.monotonic()
            self._now += min(passed, 2 * _BEAT_SECONDS)
            if self.is_watched and self._now - self._answered > limit:
                self._end(dataclasses.replace(self._first, sentence=_say_silent(self._now - self._answered)))
                return
            if any(map(has_ended, launchers)):
                launchers = []
                os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, cause: Cause) -> None:
        """Ends this process, wherever it waits, unless the main thread has failed too and ends it."""
        self._cause = cause
        self._has_cause.set()
        if not self._ending.acquire(blocking=False):
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        self._report(cause, f"\nThis rank was here:\n{''.join(traceback.format_stack(frame))}")
        self._confirm()
        if cause.lost_pid and cause.host == socket.gethostname():
            # Launchers wait 30 s for a process that is stopped.
            with contextlib.suppress(psutil.Error):
                if (lost := psutil.Process(cause.lost_pid)).ppid() == os.getppid():
                    lost.kill()
        os._exit(1)

    def _report(self, cause: Cause, where: str = "") -> None:
        """Logs the cause, and prints it on rank 0 or, if rank 0 was lost, on the first ranks of each node."""
        self.log.write(cause.describe() + where)
        if self.rank == 0 or (cause.rank == 0 and cause.lost_pid and os.environ.get("LOCAL_RANK") in ("0", "1")):
            print(cause.describe(), file=sys.stderr, flush=True)


def _say_silent(seconds: float) -> str:
    return (
        f"nothing has come from it for {seconds:.0f} s: its process was killed or stopped, its host is down, or its "
        "link is cut"
    )


_ABSENT = object()


def find_difference(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Says in one sentence how the first rank that differs from rank 0 differs; returns None if none does.

    `facts` are collect_facts of each rank, and "host".
    """
    first = flatten(facts[0])
    for rank, other in enumerate(facts[1:], start=1):
        found = flatten(other)
        names = [name for name in {**first, **found} if _is_other(name, first, found)]
        if names:
            name = names[0]
            more = f" ({len(names) - 1} more: {', '.join(names[1:4])})" if names[1:] else ""
            return (
                f"the ranks are not of one run: {name} is {_write(found, name)} on rank {rank} ({other['host']}) and "
                f"{_write(first, name)} on rank 0 ({facts[0]['host']}){more}; start every rank with the same command "
                "line, files, packages and environment"
            )
    return None


def _is_other(name: str, first: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    if name == "host":
        return False
    if name.startswith("data content of set "):  # only the first rank of a node has it
        return name in first and name in found and bool(first[name] != found[name])
    return bool(first.get(name, _ABSENT) != found.get(name, _ABSENT))


def _write(facts: Mapping[str, Any], name: str) -> str:
    return repr(facts[name]) if name in facts else "not set"


STORE = "tempo://"


def open_store(timeout_s: float) -> Any:
    """Opens the store that all ranks share; torch.distributed uses it with init_method=STORE.

    Raises ValueError if rank 0's port is in use or rank 0 cannot be reached.
    """
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except dist.DistError as error:
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        if "EADDRINUSE" in str(error):
            raise ValueError(
                f"port {port} is in use by another run; give the launcher another --master_port"
            ) from error
        text = str(error).strip().splitlines()[0]
        raise ValueError(
            f"rank 0 at {address}:{port} was not reached ({text}); check that it runs and that no firewall is between"
        ) from error
    store = _name_attempt(store)
    register_rendezvous_handler("tempo", lambda url, **_: iter([(store, rank, world_size)]))
    return store


def connect_again(timeout_s: float) -> Any:
    """Opens another connection to the store, for a thread: a call that waits keeps its connection to itself."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    how: Any = {"is_master": False, "wait_for_workers": False, "timeout": timedelta(seconds=timeout_s)}
    return _name_attempt(dist.TCPStore(address, port, **how))  # type: ignore[attr-defined]


def _name_attempt(store: Any) -> Any:
    # torchrun's store outlives the ranks: it starts them again with the same one.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}", store)  # type: ignore[attr-defined]

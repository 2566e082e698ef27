"""Lets the ranks of a run meet, detect one another's failure, and exit together with one reported cause.

They meet in torch's store, which needs no process group: a rank whose command line is wrong can say so, and the ranks
are compared before a collective that some of them would not call. From then on a small process beside each rank
(heartbeat_process.py) watches it. If a rank fails, dies, is stopped or cannot be reached, every other one is told why
and ends, wherever it waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Mapping
from typing import Any

from tempo_megatron.cluster.host import is_loopback, list_addresses
from tempo_megatron.training.differences import find_difference
from tempo_megatron.training.watch import heartbeat_process
from tempo_megatron.training.watch.agreement import AgreedError, open_store
from tempo_megatron.training.watch.heartbeat_process import CAUSE_SECONDS, FIRST_SECONDS
from tempo_megatron.training.watch.rank_process import RankLog, find_launchers

_KEY = "tempo"
_VERDICT_SECONDS = 20.0  # how long a rank that has failed waits for the judge's cause
_BACKLOG = 1 << 14  # the system lowers it to its own limit


@dataclasses.dataclass(frozen=True)
class Cause:
    """The reason why the run ends, and the rank that has it."""

    rank: int
    host: str
    sentence: str
    is_lost: bool = False
    """Whether the rank cannot report it itself."""

    def describe(self) -> str:
        return f"error on rank {self.rank} ({self.host}): {self.sentence}"


class Team:
    """One rank's view of the ranks of its run; `join` makes it.

    `store` is the torch.distributed Store that all of them share.
    """

    def __init__(self, store: Any, rank: int, world_size: int, log: RankLog) -> None:
        self.store, self.rank, self.world_size, self.log = store, rank, world_size, log
        self.cause: Cause | None = None
        self._has_cause = threading.Event()
        self._lock = threading.Lock()
        self._ending_thread: threading.Thread | None = None
        self._is_ready = False
        self._watcher: subprocess.Popen[bytes] | None = None

    @classmethod
    def join(cls, log: RankLog, *, timeout_s: float, heartbeat_s: float) -> Team | None:
        """Meets the other ranks; returns None for a run of one process without a launcher.

        Args:
            log: of this rank.
            timeout_s: how long the others may take to come.
            heartbeat_s: how long a rank may be stopped or out of reach; 0 starts no watcher.

        Raises ValueError if rank 0's port is in use or rank 0 cannot be reached.
        """
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        launchers = find_launchers()
        if world_size == 1:
            team = cls(None, rank, world_size, log)
            if not launchers or not heartbeat_s:
                return None
            team._start_watcher(None, "", heartbeat_s, launchers)
            return team
        team = cls(open_store(timeout_s), rank, world_size, log)
        if heartbeat_s:
            address, token = team._find_judge(heartbeat_s)
            team._start_watcher(address, token, heartbeat_s, launchers)
        return team

    @property
    def is_watched(self) -> bool:
        """Whether the ranks are told of one another's failures."""
        return self._watcher is not None and self.world_size > 1

    def compare(self, facts: Mapping[str, Any], timeout_s: float) -> None:
        """Raises AgreedError, with the difference, on every rank if one has other `facts` than rank 0.

        Also raises it if a rank has not come within `timeout_s`.
        """
        if self.world_size == 1:
            return
        self._is_ready = True
        self._order("ready")
        described = {"host": socket.gethostname(), **facts}
        self.store.set(f"{_KEY}/facts/{self.rank}", zlib.compress(json.dumps(described, default=str).encode()))
        verdict = f"{_KEY}/verdict"
        if self.rank == 0:
            self.store.set(verdict, self._judge_facts(timeout_s))
        self.store.wait([verdict], datetime.timedelta(seconds=timeout_s + 60))
        if sentence := self.store.get(verdict).decode():
            raise AgreedError(sentence)

    def _judge_facts(self, timeout_s: float) -> str:
        keys = [f"{_KEY}/facts/{rank}" for rank in range(self.world_size)]
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
        """Makes this thread the one that reports the end; if the heartbeat's thread already does, waits for the end."""
        if not self._claim_end():
            threading.Event().wait()

    def _claim_end(self) -> bool:
        with self._lock:
            if self._ending_thread is None:
                self._ending_thread = threading.current_thread()
            return self._ending_thread is threading.current_thread()

    def fail(self, sentence: str, *, is_secondary: bool = False) -> Cause:
        """Tells every rank that this one has failed; returns why the run ends, which may be another rank's failure.

        `is_secondary` says that this failure may follow from another one.
        """
        own = Cause(self.rank, socket.gethostname(), sentence)
        self.begin_to_end()
        if not self.is_watched:
            return own
        patience = CAUSE_SECONDS if is_secondary else FIRST_SECONDS if self.rank and not self._is_ready else 0.0
        self._order("failed " + json.dumps({"sentence": sentence, "patience": patience}))
        self._has_cause.wait(_VERDICT_SECONDS)
        return self.cause or own

    def confirm(self) -> None:
        """Lets the others end, now that rank 0 has reported why."""
        self._order("told")

    def leave(self) -> None:
        """Says goodbye, so that the other ranks do not report this one as lost."""
        self.begin_to_end()
        self._order("bye")

    def _order(self, line: str) -> None:
        if self._watcher is not None and self._watcher.stdin is not None:
            with contextlib.suppress(OSError):
                self._watcher.stdin.write(line.encode() + b"\n")
                self._watcher.stdin.flush()

    def _find_judge(self, heartbeat_s: float) -> tuple[tuple[str, int], str]:
        """Returns address and token of the judge, which rank 0 starts."""
        key = f"{_KEY}/judge"
        if self.rank == 0:
            check_open_files(self.world_size)
            address, listener = open_listener(os.environ)
            token = secrets.token_hex(16)
            settings = {"token": token, "world_size": self.world_size, "limit": heartbeat_s}
            settings |= {"listener": listener.fileno()}
            judge = start_process("judge", settings, pass_fds=(listener.fileno(),), stdout=subprocess.DEVNULL)
            assert judge.stdin is not None
            judge.stdin.close()
            self.store.set(key, json.dumps([address, listener.getsockname()[1], token]))
            listener.close()
        address, port, token = json.loads(self.store.get(key))
        return (address, port), token

    def _start_watcher(
        self, address: tuple[str, int] | None, token: str, heartbeat_s: float, launchers: list[tuple[int, str]]
    ) -> None:
        settings = {"address": address, "token": token, "rank": self.rank, "limit": heartbeat_s}
        self._watcher = start_process("watch", {**settings, "launchers": launchers}, stdout=subprocess.PIPE)
        assert self._watcher.stdout is not None
        if self._watcher.stdout.readline() != b"ready\n":
            where = "" if address is None else f" rank 0 at {address[0]}, port {address[1]},"
            raise ValueError(
                f"the heartbeat of rank {self.rank} does not reach{where} where another port than the run's own has to "
                "be open; open the ports between the nodes, or go without a heartbeat: --heartbeat-seconds 0"
            )
        threading.Thread(target=self._listen, name="heartbeat", daemon=True).start()

    def _listen(self) -> None:
        assert self._watcher is not None and self._watcher.stdout is not None
        for line in self._watcher.stdout:
            word, _, rest = line.decode().partition(" ")
            if word == "end":
                end = json.loads(rest)
                self._end(Cause(end["rank"], end["host"], end["sentence"], end.get("is_lost", False)))
                return
        if self._claim_end():
            self._end(Cause(self.rank, socket.gethostname(), "the process that watches this rank was killed"))

    def _end(self, cause: Cause) -> None:
        """Ends this process, wherever it waits, unless the main thread has failed too and ends it."""
        self.cause = cause
        self._has_cause.set()
        if not self._claim_end():
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self.log.write(f"{cause.describe()}\nThis rank was here:\n{stack}")
        self.say(cause)
        self.confirm()
        os._exit(1)

    def say(self, cause: Cause) -> None:
        """Prints the cause on rank 0 or, if rank 0 was lost, on the first ranks of each node."""
        if self.rank == 0 or (cause.rank == 0 and cause.is_lost and os.environ.get("LOCAL_RANK") in ("0", "1")):
            print(cause.describe(), file=sys.stderr, flush=True)


def open_listener(environ: Mapping[str, str]) -> tuple[str, socket.socket]:
    """Opens the judge's listener on rank 0's host; returns the address for the other ranks, and the listener.

    It listens at the address of MASTER_ADDR or, if the host resolves that name to loopback, of Gloo's interface. If
    neither belongs to this host, as behind network address translation, it listens at all addresses.
    """
    name = environ["MASTER_ADDR"]
    places = []
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        places = [(str(address[0]), family) for family, _, _, _, address in found]
    if int(environ["LOCAL_WORLD_SIZE"]) < int(environ["WORLD_SIZE"]):
        places = [(address, family) for address, family in places if not is_loopback(address)]
        interface = environ.get("GLOO_SOCKET_IFNAME")
        places += [(address, socket.AF_INET) for device, address, _ in list_addresses() if device == interface]
    for address, family in places:
        with contextlib.suppress(OSError):  # it is not an address of this host
            return address, socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return name, socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return name, socket.create_server(("", 0), backlog=_BACKLOG)


def check_open_files(world_size: int) -> None:
    """Raises ValueError if this host allows fewer open files than the judge of so many ranks needs."""
    needed, allowed = heartbeat_process.count_files(world_size), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise ValueError(
            f"the heartbeat of {world_size} ranks needs {needed} open files on rank 0's host, which allows {allowed}; "
            f"raise its hard limit (`ulimit -Hn {needed}`), or go without a heartbeat: --heartbeat-seconds 0"
        )


def start_process(role: str, settings: Mapping[str, Any], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a watcher or the judge, in a session of its own, which Ctrl-C and Ctrl-Z of a terminal do not reach."""
    command = [sys.executable, "-I", "-S", heartbeat_process.__file__, role]
    process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE, **options)
    assert process.stdin is not None
    process.stdin.write(json.dumps({**settings, "parent": os.getpid()}).encode() + b"\n")
    process.stdin.flush()
    return process

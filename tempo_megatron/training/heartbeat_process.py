"""The small processes beside a run that notice when one of its ranks is gone, and tell the others why.

Each rank has a watcher; rank 0 has a judge as well, which the watchers are connected to. They are processes of their
own, and not threads of the rank, so that nothing a rank does can look like its end: a long save, a compiler, a debugger
or a C function that keeps Python's interpreter lock. A rank counts as lost when its process has ended without saying
so, when it has been stopped (SIGSTOP, Ctrl-Z) for longer than the limit while another rank was not, or when nothing has
come from its host for that long. A rank that runs and makes no progress is not: nobody can tell it from a slow one.

Only the standard library is imported: a watcher takes 10 MB, and starts at once.

The protocol is a line of words in each direction. A watcher says `hello TOKEN RANK HOST`, `beat STATE` every second,
`failed JSON` for its rank, `ready` when that has nothing to say against
its command line, `gone` when its rank has ended without a word, `told` when its rank has been told the end,
and `bye`. The judge says `beat` every second, and `end JSON` once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEAT_SECONDS = 1.0
_TICK_SECONDS = 0.25
# A failure that another one may have caused (a connection that was closed) waits so long for that one to be told, and
# one of a command line, which all ranks have, for rank 0 to say it.
CAUSE_SECONDS = 5.0
FIRST_SECONDS = 10.0
# How long rank 0 may take to say why the run ends before the others end too, and a rank to end when it was told,
# or when it has failed by itself.
_TOLD_SECONDS = 5.0
_END_SECONDS = 10.0
_OWN_END_SECONDS = 45.0


class Lines:
    """A socket or a pipe that carries lines, read without waiting."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_open = True
        self._rest = b""
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self.descriptor

    def read(self) -> Iterator[str]:
        try:
            while content := os.read(self.descriptor, 1 << 16):
                self._rest += content
            self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, self._rest = self._rest.split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)

    def write(self, line: str) -> None:
        """A beat that the network does not take is left out; the next one says the same."""
        try:
            os.write(self.descriptor, line.encode() + b"\n")
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False


class Clock:
    """Seconds that pass only while this process runs, so that a machine that slept does not blame the others."""

    def __init__(self) -> None:
        self.now = 0.0
        self._last = time.monotonic()

    def advance(self) -> float:
        passed = time.monotonic() - self._last
        self._last += passed
        self.now += min(passed, 5 * BEAT_SECONDS)
        return self.now


def read_state(pid: int) -> tuple[str, str]:
    """(state, start time) of a process; state is one letter of ps, X where there is no such process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return words[0], words[19]


@dataclasses.dataclass
class Member:
    """What the judge knows of one rank."""

    lines: Lines
    host: str
    heard: float
    stopped_since: float | None = None
    has_left: bool = False
    """Has ended, or said that it will."""
    was_sent_end: bool = False
    has_been_told: bool = False


class Judge:
    """Decides once, for all ranks, why the run ends."""

    def __init__(self, listener: socket.socket, token: str, world_size: int, limit: float) -> None:
        self.listener, self.token, self.world_size, self.limit = listener, token, world_size, limit
        self.strangers: list[tuple[Lines, socket.socket]] = []
        self.members: dict[int, Member] = {}
        self.sockets: list[socket.socket] = []
        self.clock = Clock()
        self.end: dict[str, Any] | None = None
        self.ended_at = 0.0
        self.first_is_ready = False
        self.suspicion: tuple[float, dict[str, Any]] | None = None
        """From when on that is the cause, if nothing else is told."""

    def run(self, parent: int) -> None:
        next_beat, alone_since = 0.0, None
        while True:
            open_lines = [m.lines for m in self.members.values() if m.lines.is_open] + [s[0] for s in self.strangers]
            select.select([self.listener.fileno(), *(lines.fileno() for lines in open_lines)], [], [], _TICK_SECONDS)
            now = self.clock.advance()
            self._accept()
            for rank, member in list(self.members.items()):
                self._hear(rank, member, now)
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                for member in self.members.values():
                    member.lines.write("beat")
            if self.end is None:
                self._look_for_losses(now)
            self._announce(now)
            is_alone = not any(member.lines.is_open for member in self.members.values())
            alone_since = (now if alone_since is None else alone_since) if is_alone else None
            if alone_since is not None and (
                len(self.members) == self.world_size or (os.getppid() != parent and now - alone_since > self.limit)
            ):
                for connection in self.sockets:
                    connection.close()
                return

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection = self.listener.accept()[0]
                self.strangers.append((Lines(connection.fileno()), connection))
        for stranger in list(self.strangers):
            lines, connection = stranger
            said = list(lines.read())
            if said or not lines.is_open:
                self.strangers.remove(stranger)
            words = said[0].split(" ") if said else []
            if len(words) == 4 and words[:2] == ["hello", self.token]:
                rank = int(words[2])
                self.members[rank] = Member(lines, words[3], self.clock.now)
                self.sockets.append(connection)
                for line in said[1:]:
                    self._take(rank, self.members[rank], line, self.clock.now)
            elif said:
                connection.close()

    def _hear(self, rank: int, member: Member, now: float) -> None:
        for line in member.lines.read() if member.lines.is_open else ():
            self._take(rank, member, line, now)
        if not member.lines.is_open and not member.has_left:
            member.has_left = True
            text = "the connection to it was closed without a word: its host has gone down, or what watches it there"
            self._suspect(now, {"rank": rank, "host": member.host, "sentence": text, "is_lost": True})

    def _take(self, rank: int, member: Member, line: str, now: float) -> None:
        word, _, rest = line.partition(" ")
        member.heard = now
        if word == "beat":
            if rest != "T":
                member.stopped_since = None
            elif member.stopped_since is None:
                member.stopped_since = now
        elif word == "failed":
            failure = {"rank": rank, "host": member.host, **json.loads(rest)}
            self._suspect(now, failure, failure["patience"])
        elif word == "ready":
            self.first_is_ready = self.first_is_ready or rank == 0
        elif word == "gone":
            member.has_left = True
            text = "its process has ended without a word: it was killed, by the kernel for want of memory perhaps"
            self._decide(now, {"rank": rank, "host": member.host, "sentence": text, "is_lost": True})
        elif word == "told":
            member.has_been_told = True
        elif word == "bye":
            member.has_left = True

    def _look_for_losses(self, now: float) -> None:
        if self.suspicion is not None:
            due, failure = self.suspicion
            if now >= due or (self.first_is_ready and failure.get("patience") == FIRST_SECONDS):
                self._decide(now, failure)
        present = {rank: member for rank, member in self.members.items() if not member.has_left}
        if all(member.stopped_since is not None for member in present.values()):
            for member in present.values():  # Ctrl-Z: nobody waits for anybody
                member.stopped_since = now
        for rank, member in present.items():
            place = {"rank": rank, "host": member.host}
            if now - member.heard > self.limit:
                text = (
                    f"nothing has come from its host for {self.limit:g} s: the host is down, or the link to it is cut"
                )
                self._decide(now, {**place, "sentence": text, "is_lost": True})
            if member.stopped_since is not None and now - member.stopped_since > self.limit:
                text = f"its process has been stopped (SIGSTOP or Ctrl-Z) for {self.limit:g} s"
                self._decide(now, {**place, "sentence": text, "is_lost": True})

    def _suspect(self, now: float, failure: dict[str, Any], patience: float = CAUSE_SECONDS) -> None:
        if self.suspicion is None or now + patience < self.suspicion[0]:
            self.suspicion = (now + patience, failure)

    def _decide(self, now: float, end: dict[str, Any]) -> None:
        if self.end is None:
            self.end, self.ended_at = end, now

    def _announce(self, now: float) -> None:
        """To rank 0 first, which says it; a launcher ends every rank as soon as one has ended."""
        if self.end is None:
            return
        line = f"end {json.dumps(self.end)}"
        first = self.members.get(0)
        is_said = first is None or first.has_been_told or not first.lines.is_open or now - self.ended_at > _TOLD_SECONDS
        for rank, member in self.members.items():
            if (rank == 0 or is_said) and not member.was_sent_end:
                member.was_sent_end = True
                member.lines.write(line)


class Watcher:
    """Watches the process that has started it, and the launchers above, on behalf of the judge."""

    def __init__(self, parent: int, rank: int, limit: float, launchers: list[tuple[int, str]]) -> None:
        self.parent, self.rank, self.limit, self.launchers = parent, rank, limit, launchers
        self.orders, self.answers = Lines(0), Lines(1)
        self.clock = Clock()
        self.judge: Lines | None = None
        self.judge_host = ""
        self.ended_at: float | None = None
        self.has_left = False
        self.patience = _END_SECONDS

    def run(self, address: tuple[str, int] | None, token: str) -> None:
        connection = None
        if address is not None:
            try:
                connection = socket.create_connection(address, timeout=self.limit)
            except OSError:
                return  # the rank says that there is no connection
            self.judge, self.judge_host = Lines(connection.fileno()), address[0]
            self.judge.write(f"hello {token} {self.rank} {socket.gethostname()}")
        self.answers.write("ready")
        heard, next_beat = self.clock.advance(), 0.0
        while True:
            sources = [lines for lines in (self.orders, self.judge) if lines is not None and lines.is_open]
            select.select(sources, [], [], _TICK_SECONDS)
            now = self.clock.advance()
            self._take_orders()
            if os.getppid() != self.parent or not self.orders.is_open:
                return self._leave()
            for line in self.judge.read() if self.judge is not None and self.judge.is_open else ():
                heard = now
                if line.startswith("end "):
                    self._end(now, line)
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._beat()
            self._look_for_judge(now, heard)
            if self.ended_at is not None and (now - self.ended_at > self.patience or self._is_stopped()):
                os.kill(self.parent, signal.SIGKILL)

    def _take_orders(self) -> None:
        for line in self.orders.read():
            if line == "bye":
                self.has_left = True
            elif line.startswith("failed"):
                self.patience = _OWN_END_SECONDS
            if self.judge is not None:
                self.judge.write(line)

    def _leave(self) -> None:
        """The rank has ended. Without a bye that is news."""
        if self.judge is not None and not self.has_left:
            self.judge.write("gone")

    def _beat(self) -> None:
        if self.judge is not None:
            self.judge.write("beat T" if self._is_stopped() else "beat R")
        if self.launchers and any(read_state(pid) not in _list_alive(start) for pid, start in self.launchers):
            self.launchers = []
            os.kill(self.parent, signal.SIGTERM)

    def _is_stopped(self) -> bool:
        return read_state(self.parent)[0] == "T"

    def _look_for_judge(self, now: float, heard: float) -> None:
        if self.judge is None or self.ended_at is not None or self.has_left:
            return
        if now - heard > self.limit:
            text = f"nothing has come from it for {self.limit:g} s: its host is down, or the link to it is cut"
        elif not self.judge.is_open:
            text = "the connection to it was closed: its host has gone down, or what watches the run there"
        else:
            return
        end = {"rank": 0, "host": self.judge_host, "sentence": text, "is_lost": True}
        self._end(now, f"end {json.dumps(end)}")

    def _end(self, now: float, line: str) -> None:
        if self.ended_at is None:
            self.ended_at = now
            self.answers.write(line)


def _list_alive(start: str) -> list[tuple[str, str]]:
    return [(state, start) for state in "RSDTtI"]


def main(argv: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(argv[1])
    if argv[0] == "judge":
        listener = socket.socket(fileno=settings["listener"])
        listener.setblocking(False)
        Judge(listener, settings["token"], settings["world_size"], settings["limit"]).run(settings["parent"])
        return
    launchers = [(int(pid), str(start)) for pid, start in settings["launchers"]]
    address = settings["address"] and (settings["address"][0], settings["address"][1])
    Watcher(settings["parent"], settings["rank"], settings["limit"], launchers).run(address, settings["token"])


if __name__ == "__main__":
    main(sys.argv[1:])

"""Watches a run from small processes beside it, which notice that a rank is gone and tell the others why.

Each rank has a watcher. Rank 0 also has a judge, to which all watchers connect. They are processes and not threads of
the rank, so that nothing a rank does looks like its end: a long save, a compiler, a debugger, or a C function that
holds Python's interpreter lock. A rank counts as lost if its process has ended without saying so, if it has been
stopped (SIGSTOP, Ctrl-Z) for longer than the limit while another rank was not, or if its host has been silent for that
long. A rank that runs without progress is not lost: it cannot be told from a slow one.

Only the standard library is imported: a watcher takes 10 MB and starts at once.

Each side sends lines of words. A watcher sends `hello TOKEN RANK HOST`, `beat STATE` every second, `ready` when its
rank's command line is accepted, `failed JSON` when its rank has failed, `gone` when its rank has ended without a word,
`told` when its rank has reported the end, and `bye`. The judge answers `hello` with a `beat`, sends `beat` every second
and `end JSON` once.

Anybody who reaches the judge's port may connect, and must not disturb the run. A stranger has one short line and a few
seconds to show the token; the number of strangers is limited, and the oldest makes room for a new one; once all ranks
are connected, the judge stops listening. A watcher that was crowded out connects again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hmac
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEAT_SECONDS = 1.0
_TICK_SECONDS = 0.25
# A failure that may be a consequence, such as a closed connection, waits this long for its cause to be reported.
CAUSE_SECONDS = 5.0
# An error in the command line, which all ranks have, waits this long for rank 0 to report it.
FIRST_SECONDS = 10.0
# How long rank 0 may take to report the end before the other ranks are told.
_TOLD_SECONDS = 5.0
# How long a rank may take to end after it was told, or after it has failed by itself.
_END_SECONDS = 10.0
_OWN_END_SECONDS = 45.0
_JOIN_SECONDS = 30.0  # how long a watcher tries to connect
_STRANGER_SECONDS = 5.0  # how long a stranger may take to show the token
_STRANGERS = 256
# One turn of the judge's loop accepts no more connections than this, so that it also hears the ranks.
_ACCEPTED_AT_ONCE = 64
_LONGEST_HELLO = 1 << 10
_LONGEST_LINE = 1 << 20


def count_files(world_size: int) -> int:
    """Returns how many files the judge of a run may have open at a time."""
    return world_size + _STRANGERS + 32


class Lines:
    """A socket or a pipe that carries lines, read and written without waiting.

    A line of more than `longest` bytes counts as the end of the connection.
    """

    def __init__(self, descriptor: int, longest: int = _LONGEST_LINE) -> None:
        self.descriptor, self.longest = descriptor, longest
        self.is_open = True
        self._rest = self._unsent = b""
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self.descriptor

    def read(self) -> Iterator[str]:
        try:
            size = min(self.longest, 1 << 16)
            while len(content := os.read(self.descriptor, size)) == size and len(self._rest) < self.longest:
                self._rest += content
            self._rest += content
            self.is_open = bool(content)
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) >= self.longest:
            self.is_open = False
        yield from (line.decode(errors="replace") for line in lines)

    def write(self, line: str) -> None:
        """Sends a line, or keeps what the other end cannot take yet for the next call; a beat is then dropped."""
        if not self._unsent or not line.startswith("beat"):
            self._unsent += line.encode() + b"\n"
        try:
            self._unsent = self._unsent[os.write(self.descriptor, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False


class Clock:
    """Counts the seconds in which this process runs, so that a machine that slept does not blame the others."""

    def __init__(self) -> None:
        self.now = 0.0
        self._last = time.monotonic()

    def advance(self) -> float:
        passed = time.monotonic() - self._last
        self._last += passed
        self.now += min(passed, 5 * BEAT_SECONDS)
        return self.now


def read_state(pid: int) -> tuple[str, str]:
    """Returns (state, start time) of a process. The state is a letter as in ps, X if there is no such process."""
    words = read_stat(pid)
    return words[0], words[19]


def read_stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name: state, parent, and others; `X 0` and empty ones if none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ["X", "0", *[""] * 18]


@dataclasses.dataclass
class Peer:
    """A connection to the judge: a stranger, then a member with its rank."""

    connection: socket.socket
    lines: Lines
    heard: float
    """When its last line came; of a stranger, when it connected."""
    rank: int = -1
    host: str = ""
    stopped_since: float | None = None
    was_sent_end: bool = False
    has_been_told: bool = False

    def describe(self, sentence: str) -> dict[str, Any]:
        """Returns the end of a run for the reason that this member is lost."""
        return {"rank": self.rank, "host": self.host, "sentence": sentence, "is_lost": True}


class Judge:
    """Decides once, for all ranks, why the run ends.

    The work for an event does not depend on the number of ranks; what does is done once a second.
    """

    def __init__(self, listener: socket.socket, token: str, world_size: int, limit: float) -> None:
        self.listener, self.token, self.world_size, self.limit = listener, token, world_size, limit
        self.selector = selectors.DefaultSelector()
        self.strangers: dict[int, Peer] = {}
        """Those that have not shown the token, by descriptor, the oldest first."""
        self.members: dict[int, Peer] = {}
        self.present: dict[int, Peer] = {}
        """The members that have neither ended nor said goodbye."""
        self.clock = Clock()
        self.end: dict[str, Any] | None = None
        self.ended_at = 0.0
        self.first_is_ready = False
        self.suspicion: tuple[float, dict[str, Any]] | None = None
        """(time, failure): the failure becomes the cause at this time, unless another one is reported before."""

    def run(self, parent: int) -> None:
        next_beat, alone_since = 0.0, None
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        while True:
            events = self.selector.select(_TICK_SECONDS)
            now = self.clock.advance()
            for key, _ in events:
                if self.selector.get_map().get(key.fd) == key:  # an event before it may have closed it
                    key.data(now)
            self._drop_strangers(now)
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                for member in self.present.values():
                    member.lines.write("beat")
                self._look_for_losses(now)
            self._look_at_suspicion(now)
            self._announce(now)
            alone_since = (now if alone_since is None else alone_since) if not self.present else None
            if self._is_through(now) or (
                alone_since is not None
                and (
                    len(self.members) == self.world_size or (os.getppid() != parent and now - alone_since > self.limit)
                )
            ):
                return self._close()

    def _close(self) -> None:
        self.listener.close()
        for peer in (*self.members.values(), *self.strangers.values()):
            peer.connection.close()
        self.selector.close()

    def _is_through(self, now: float) -> bool:
        """Whether all ranks that can be reached know the end. A connection to a host that is gone stays open."""
        if self.end is None:
            return False
        reachable = (m for m in self.present.values() if m.lines.is_open and now - m.heard <= self.limit)
        return now - self.ended_at > _TOLD_SECONDS + _END_SECONDS or not any(reachable)

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection = self.listener.accept()[0]
            except BlockingIOError:
                return
            except OSError:  # it is gone again, or this host has no files left: do not loop without a pause
                time.sleep(_TICK_SECONDS)
                return
            if len(self.strangers) == _STRANGERS:
                self._drop(next(iter(self.strangers.values())))
            stranger = Peer(connection, Lines(connection.fileno(), _LONGEST_HELLO), now)
            self.strangers[connection.fileno()] = stranger
            self.selector.register(connection, selectors.EVENT_READ, functools.partial(self._ask, stranger))

    def _ask(self, peer: Peer, now: float) -> None:
        """Makes a stranger that shows the token a member."""
        said = list(peer.lines.read())
        words = said[0].split(" ") if said else []
        if len(words) != 4 or not self._knows(*words[:3]):
            if said or not peer.lines.is_open:
                self._drop(peer)
            return
        del self.strangers[peer.connection.fileno()]
        peer.lines.longest = _LONGEST_LINE
        peer.rank, peer.host, peer.heard = int(words[2]), words[3], now
        self.members[peer.rank] = self.present[peer.rank] = peer
        self.selector.modify(peer.connection, selectors.EVENT_READ, functools.partial(self._hear, peer))
        peer.lines.write("beat")
        for line in said[1:]:
            self._take(peer, line, now)
        if len(self.members) == self.world_size:
            self.selector.unregister(self.listener)
            self.listener.close()
            for other in list(self.strangers.values()):
                self._drop(other)

    def _knows(self, word: str, token: str, rank: str) -> bool:
        if word != "hello" or not hmac.compare_digest(token.encode(), self.token.encode()):
            return False
        return rank.isdecimal() and int(rank) < self.world_size and int(rank) not in self.members

    def _drop(self, stranger: Peer) -> None:
        del self.strangers[stranger.connection.fileno()]
        self.selector.unregister(stranger.connection)
        stranger.connection.close()

    def _drop_strangers(self, now: float) -> None:
        while self.strangers and now - (oldest := next(iter(self.strangers.values()))).heard > _STRANGER_SECONDS:
            self._drop(oldest)

    def _hear(self, member: Peer, now: float) -> None:
        for line in member.lines.read():
            self._take(member, line, now)
        if not member.lines.is_open:
            self.selector.unregister(member.connection)
            if self.present.pop(member.rank, None):
                text = "the connection to it was closed without a word: its host has gone down, or its watcher there"
                self._suspect(now, member.describe(text))

    def _take(self, member: Peer, line: str, now: float) -> None:
        word, _, rest = line.partition(" ")
        member.heard = now
        if word == "beat":
            if rest != "T":
                member.stopped_since = None
            elif member.stopped_since is None:
                member.stopped_since = now
        elif word == "failed":
            failure = {"rank": member.rank, "host": member.host, **json.loads(rest)}
            self._suspect(now, failure, failure["patience"])
        elif word == "ready":
            self.first_is_ready = self.first_is_ready or member.rank == 0
        elif word == "gone":
            self.present.pop(member.rank, None)
            text = "its process has ended without a word: it was killed, perhaps by the kernel for want of memory"
            self._decide(now, member.describe(text))
        elif word == "told":
            member.has_been_told = True
        elif word == "bye":
            self.present.pop(member.rank, None)

    def _look_at_suspicion(self, now: float) -> None:
        if self.suspicion is not None:
            due, failure = self.suspicion
            if now >= due or (self.first_is_ready and failure.get("patience") == FIRST_SECONDS):
                self._decide(now, failure)

    def _look_for_losses(self, now: float) -> None:
        if all(member.stopped_since is not None for member in self.present.values()):
            for member in self.present.values():  # Ctrl-Z stopped all of them: none waits for another
                member.stopped_since = now
        for member in self.present.values():
            if now - member.heard > self.limit:
                text = f"nothing has come from its host for {self.limit:g} s: the host is down, or its link is cut"
                self._decide(now, member.describe(text))
            if member.stopped_since is not None and now - member.stopped_since > self.limit:
                text = f"its process has been stopped (SIGSTOP or Ctrl-Z) for {self.limit:g} s"
                self._decide(now, member.describe(text))

    def _suspect(self, now: float, failure: dict[str, Any], patience: float = CAUSE_SECONDS) -> None:
        if self.suspicion is None or now + patience < self.suspicion[0]:
            self.suspicion = (now + patience, failure)

    def _decide(self, now: float, end: dict[str, Any]) -> None:
        if self.end is None:
            self.end, self.ended_at = end, now

    def _announce(self, now: float) -> None:
        """Tells rank 0 first, which reports the end: a launcher ends every rank as soon as one has ended."""
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
    """Watches the rank that has started it, and the launchers above, on behalf of the judge."""

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
            connection = self._join(address, token)
            if connection is None:
                return  # the rank reports that there is no connection
            self.judge, self.judge_host = Lines(connection.fileno()), address[0]
        self.answers.write("ready")
        heard, next_beat = self.clock.advance(), 0.0
        with selectors.DefaultSelector() as selector:
            sources = [lines for lines in (self.orders, self.judge) if lines is not None]
            for lines in sources:
                selector.register(lines, selectors.EVENT_READ)
            while True:
                selector.select(_TICK_SECONDS)
                now = self.clock.advance()
                self._take_orders()
                if os.getppid() != self.parent or not self.orders.is_open:
                    return self._leave()
                for line in self.judge.read() if self.judge is not None and self.judge.is_open else ():
                    heard = now
                    if line.startswith("end "):
                        self._end(now, line)
                for lines in [lines for lines in sources if not lines.is_open]:
                    selector.unregister(lines)
                    sources.remove(lines)
                if now >= next_beat:
                    next_beat = now + BEAT_SECONDS
                    self._beat()
                self._look_for_judge(now, heard)
                if self.ended_at is not None and (now - self.ended_at > self.patience or self._is_stopped()):
                    os.kill(self.parent, signal.SIGKILL)

    def _join(self, address: tuple[str, int], token: str) -> socket.socket | None:
        """Returns the connection to the judge once it has answered, or None if it does not."""
        deadline = time.monotonic() + max(self.limit, _JOIN_SECONDS)
        while (left := deadline - time.monotonic()) > 0 and os.getppid() == self.parent:
            with contextlib.suppress(OSError):
                connection = socket.create_connection(address, timeout=left)
                try:
                    connection.sendall(f"hello {token} {self.rank} {socket.gethostname()}\n".encode())
                    connection.settimeout(max(0.01, deadline - time.monotonic()))
                    if connection.recv(1) == b"b":
                        return connection
                except OSError:
                    pass
                connection.close()  # strangers crowded it out
            time.sleep(_TICK_SECONDS)
        return None

    def _take_orders(self) -> None:
        for line in self.orders.read():
            if line == "bye":
                self.has_left = True
            elif line.startswith("failed"):
                self.patience = _OWN_END_SECONDS
            if self.judge is not None:
                self.judge.write(line)

    def _leave(self) -> None:
        """Reports that the rank has ended, unless it has said goodbye."""
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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # The settings are not arguments, which every user of this host can see. Unbuffered, because orders follow.
    with open(0, "rb", buffering=0, closefd=False) as standard_input:
        settings = json.loads(standard_input.readline())
    if argv[0] == "judge":
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = count_files(settings["world_size"])
        if limits[0] != resource.RLIM_INFINITY and limits[0] < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, limits[1]))
        listener = socket.socket(fileno=settings["listener"])
        Judge(listener, settings["token"], settings["world_size"], settings["limit"]).run(settings["parent"])
        return
    launchers = [(int(pid), str(start)) for pid, start in settings["launchers"]]
    address = settings["address"] and (settings["address"][0], settings["address"][1])
    Watcher(settings["parent"], settings["rank"], settings["limit"], launchers).run(address, settings["token"])


if __name__ == "__main__":
    main(sys.argv[1:])

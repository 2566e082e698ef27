"""Surveys all hosts of a job at once over ssh: what each says of itself, and which ones reach rank 0's port."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tempo_megatron.cluster import host as this_host
from tempo_megatron.cluster.hostfile import Host
from tempo_megatron.cluster.remote_host import HostConnection, HostError, Ssh
from tempo_megatron.cluster.versions import PACKAGES

SOURCES = ("tempo_megatron", "tempo_kernels")
DEFAULT_SECONDS = 10.0
# Shares of the total time: for hosts to describe themselves, for rank 0 to listen, for others to reach its port.
_DESCRIBE_SHARE, _LISTEN_SHARE, _REACH_SHARE = 0.65, 0.1, 0.2


@dataclasses.dataclass
class SurveyedHost:
    """What is known about one host."""

    host: Host
    error: str | None = None
    """The reason if nothing else is known."""

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The result of host.describe_host there."""

    clock_ahead: float = 0.0
    """By how many seconds its clock is ahead of this host's, at least: the message's travel time is subtracted."""

    reached: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The result of host.reach there: which of rank 0's addresses accepted a connection."""

    interface: str | None = None
    """The interface by which its ranks reach rank 0."""


@dataclasses.dataclass
class Survey:
    """The hosts in the order of their ranks, and an address of rank 0 that all can reach."""

    hosts: list[SurveyedHost]
    port: int
    port_error: str | None = None
    """The reason if rank 0's host cannot open the port."""

    address: str | None = None
    candidates: list[str] = dataclasses.field(default_factory=list)

    @property
    def first(self) -> SurveyedHost:
        return self.hosts[0]

    @property
    def answered(self) -> list[SurveyedHost]:
        return [surveyed for surveyed in self.hosts if surveyed.error is None]


def survey_hosts(
    hosts: list[Host],
    ssh: Ssh,
    *,
    port: int,
    master_addr: str = "",
    files: tuple[str, ...] = (),
    seconds: float = DEFAULT_SECONDS,
) -> Survey:
    """Asks all hosts in parallel, for at most `seconds`.

    Args:
        hosts: those of the job; rank 0 runs on the first.
        ssh: how to get there.
        port: the one on which rank 0 will listen.
        master_addr: rank 0's address; found if it is left out.
        files: those that must have the same content on all hosts.
    """
    start = time.monotonic()
    survey = Survey([SurveyedHost(host) for host in hosts], port)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(max_workers=len(hosts)) as threads:

        def describe(surveyed: SurveyedHost) -> HostConnection | None:
            try:
                connection = stack.enter_context(HostConnection(surveyed.host.name, ssh))
                names = {"packages": list(PACKAGES), "sources": list(SOURCES), "files": list(files)}
                # A second, empty question takes only the time of the way there and back.
                surveyed.facts = connection.ask(start + _DESCRIBE_SHARE * seconds, "describe", **names)
                asked = time.time()
                again = connection.ask(start + _DESCRIBE_SHARE * seconds, "describe", packages=[], sources=[], files=[])
                surveyed.clock_ahead = _find_clock_difference(asked, again["time"], time.time())
            except HostError as error:
                surveyed.error = str(error)
                return None
            return connection

        connections = list(threads.map(describe, survey.hosts))
        first = connections[0]
        if first is None:
            return survey
        survey.candidates = _find_candidates(survey.first, master_addr)
        try:
            deadline = time.monotonic() + _LISTEN_SHARE * seconds
            survey.port_error = first.ask(deadline, "listen", port=port)["error"]
            if survey.port_error is None:
                _connect_all(survey, connections, threads, _REACH_SHARE * seconds)
        except HostError as error:
            survey.first.error = str(error)
    return survey


def _connect_all(
    survey: Survey, connections: list[HostConnection | None], threads: ThreadPoolExecutor, seconds: float
) -> None:
    """Lets every host try rank 0's addresses, and takes the first that all reach."""
    deadline = time.monotonic() + seconds

    def reach(surveyed: SurveyedHost, connection: HostConnection | None) -> None:
        if connection is None:
            return
        question = {"addresses": survey.candidates, "port": survey.port, "seconds": 0.75 * seconds}
        try:
            surveyed.reached = connection.ask(deadline, "reach", **question)
        except HostError as error:
            surveyed.error = str(error)

    list(threads.map(reach, survey.hosts, connections))
    others = [surveyed for surveyed in survey.hosts[1:] if surveyed.error is None]
    reachable = [
        address
        for address in survey.candidates
        if all(address in surveyed.reached["accepted"] for surveyed in others)
        # Every host reaches its own loopback, which proves nothing about rank 0's.
        and (len(survey.hosts) == 1 or not this_host.is_loopback(address))
    ]
    survey.address = reachable[0] if reachable else None
    for surveyed in survey.answered:
        surveyed.interface = surveyed.reached.get("interfaces", {}).get(survey.address)


def _find_candidates(first: SurveyedHost, master_addr: str) -> list[str]:
    """Lists the addresses that rank 0 may have, best first: the given one, or its name's, then its interfaces'."""
    if master_addr:
        return this_host.resolve(master_addr) or [master_addr]
    name = first.host.name.rpartition("@")[2]
    own = [address for _, address, _ in first.facts["addresses"]]
    # An alias in ~/.ssh/config does not resolve; then the interfaces' addresses remain.
    return list(dict.fromkeys([*(a for a in this_host.resolve(name) if a in own), *own]))


def _find_clock_difference(asked: float, told: float, answered: float) -> float:
    """Returns how far `told`, the other clock's time, lies outside of this clock's interval [asked, answered]."""
    if asked <= told <= answered:
        return 0.0
    return told - answered if told > answered else told - asked

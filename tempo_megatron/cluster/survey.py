"""Looks at all hosts of a job at once, over ssh: what each says of itself, and who reaches rank 0's port."""

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
# Shares of the time that all takes: until hosts have described themselves, and for rank 0's port to be tried.
_DESCRIBE_SHARE, _LISTEN_SHARE, _REACH_SHARE = 0.65, 0.1, 0.2


@dataclasses.dataclass
class HostReport:
    """What was found out about one host."""

    host: Host
    error: str | None = None
    """Why nothing else is known of it."""

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """As describe_host of host.py gives them."""

    clock_ahead: float = 0.0
    """Seconds its clock is ahead of this host's, beyond what the way there can explain."""

    reached: dict[str, Any] = dataclasses.field(default_factory=dict)
    """As reach of host.py gives it: which of rank 0's addresses accepted a connection."""

    interface: str | None = None
    """By which its ranks reach rank 0."""


@dataclasses.dataclass
class Survey:
    """All hosts' reports, in the order of their ranks, and the address of rank 0 that all can reach."""

    reports: list[HostReport]
    port: int
    port_error: str | None = None
    """Why rank 0's host does not get the port."""

    address: str | None = None
    candidates: list[str] = dataclasses.field(default_factory=list)

    @property
    def first(self) -> HostReport:
        return self.reports[0]

    @property
    def answered(self) -> list[HostReport]:
        return [report for report in self.reports if report.error is None]


def survey_hosts(
    hosts: list[Host],
    ssh: Ssh,
    *,
    port: int,
    master_addr: str = "",
    files: tuple[str, ...] = (),
    seconds: float = DEFAULT_SECONDS,
) -> Survey:
    """Ask all hosts, in parallel, and never for longer than `seconds`.

    Args:
        hosts: those of the job; rank 0 runs on the first.
        ssh: how to get there.
        port: that rank 0 will listen on.
        master_addr: its address; found where it is left out.
        files: whose content is to be the same on all hosts.
    """
    start = time.monotonic()
    survey = Survey([HostReport(host) for host in hosts], port)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(max_workers=len(hosts)) as threads:

        def describe(report: HostReport) -> HostConnection | None:
            try:
                connection = stack.enter_context(HostConnection(report.host.name, ssh))
                names = {"packages": list(PACKAGES), "sources": list(SOURCES), "files": list(files)}
                # The time of a question that takes nothing but the way there and back.
                report.facts = connection.ask(start + _DESCRIBE_SHARE * seconds, "describe", **names)
                asked = time.time()
                again = connection.ask(start + _DESCRIBE_SHARE * seconds, "describe", packages=[], sources=[], files=[])
                report.clock_ahead = _find_clock_difference(asked, again["time"], time.time())
            except HostError as error:
                report.error = str(error)
                return None
            return connection

        connections = list(threads.map(describe, survey.reports))
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
    """Let every host try rank 0's addresses, and take the first that all reach."""
    deadline = time.monotonic() + seconds

    def reach(report: HostReport, connection: HostConnection | None) -> None:
        if connection is None:
            return
        question = {"addresses": survey.candidates, "port": survey.port, "seconds": 0.75 * seconds}
        try:
            report.reached = connection.ask(deadline, "reach", **question)
        except HostError as error:
            report.error = str(error)

    list(threads.map(reach, survey.reports, connections))
    others = [report for report in survey.reports[1:] if report.error is None]
    reachable = [
        address
        for address in survey.candidates
        if all(address in report.reached["accepted"] for report in others)
        # Every host reaches its own loopback, which proves nothing about rank 0's.
        and (len(survey.reports) == 1 or not this_host.is_loopback(address))
    ]
    survey.address = reachable[0] if reachable else None
    for report in survey.answered:
        report.interface = report.reached.get("interfaces", {}).get(survey.address)


def _find_candidates(first: HostReport, master_addr: str) -> list[str]:
    """The addresses that rank 0 may have, the best first: the given one, or its name's, then its interfaces'."""
    if master_addr:
        return this_host.resolve(master_addr) or [master_addr]
    name = first.host.name.rpartition("@")[2]
    own = [address for _, address, _ in first.facts["addresses"]]
    # An alias of ~/.ssh/config is no name that resolves.
    return list(dict.fromkeys([*(a for a in this_host.resolve(name) if a in own), *own]))


def _find_clock_difference(asked: float, told: float, answered: float) -> float:
    if asked <= told <= answered:
        return 0.0
    return told - answered if told > answered else told - asked

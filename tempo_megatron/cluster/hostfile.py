"""Reads DeepSpeed's hostfile strictly, and refuses lines that DeepSpeed would misread."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

_ENTRY = re.compile(r"(\S+)\s+slots=(\d+)")
# Neither user nor host may begin with a dash, which ssh would read as an option.
_HOST = re.compile(r"(?:\w[\w.-]*@)?[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?|[0-9A-Fa-f:]+:[0-9A-Fa-f:]*")
_FILTER = re.compile(r"([^:\s]+)(?::(\d+(?:,\d+)*))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A host of the job: its name as ssh takes it, the slots (devices) used there, and its place in the hostfile."""

    name: str
    slots: tuple[int, ...]
    place: str
    """Such as "hosts.txt, line 3"; messages about the host begin with it."""

    def __post_init__(self) -> None:
        assert self.slots, self.name


def read_hostfile(path: str | Path) -> list[Host]:
    """Returns the hosts in the file's order; the first one has rank 0.

    A line is `HOST slots=N`; empty lines and comments behind a # are skipped.

    Raises ValueError with file and line, what is given and what is expected.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"--hostfile {path} is not a file (DeepSpeed would train on this host only, without a word); expected a "
            'file of lines such as "node1 slots=8"; give the path of one'
        )
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start}); expected lines of HOST slots=N") from error
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        place = f"{path}, line {number}"
        name, num_slots = _read_entry(entry, place)
        if name in hosts:
            raise ValueError(
                f"{place}: {name} is given again, after {hosts[name].place.rpartition(', ')[2]}; expected one line for "
                "each host; add its slots up in one of them"
            )
        hosts[name] = Host(name=name, slots=tuple(range(num_slots)), place=place)
    if not hosts:
        raise ValueError(f'{path} names no host; expected at least one line such as "node1 slots=8"')
    return list(hosts.values())


def _read_entry(entry: str, place: str) -> tuple[str, int]:
    match = _ENTRY.fullmatch(entry)
    if match is None or not _HOST.fullmatch(match[1]):
        raise ValueError(f'{place}: {entry!r} is given, expected HOST slots=N, such as "node1 slots=8"; correct it')
    if len(match[2]) > 6 or int(match[2]) == 0:
        raise ValueError(
            f"{place}: slots={match[2]} is given, expected the number of {match[1]}'s devices to use, 1 or more; "
            "correct it, or remove the line to leave the host out"
        )
    return match[1], int(match[2])


def choose_hosts(
    hosts: list[Host], *, include: str = "", exclude: str = "", num_nodes: int = -1, num_gpus: int = -1
) -> list[Host]:
    """Returns the hosts and slots that DeepSpeed's options of these names select, such as include "node1@node2:0,2".

    Raises ValueError if the options contradict one another or the hostfile, or select nothing.
    """
    if include and exclude:
        raise ValueError("--include and --exclude are given; expected one of them; remove the other")
    if (include or exclude) and max(num_nodes, num_gpus) >= 0:
        raise ValueError(
            "--num_nodes or --num_gpus is given beside --include or --exclude; expected one way; remove one"
        )
    if num_nodes == 0 or num_nodes > len(hosts):
        raise ValueError(f"--num_nodes {num_nodes} is given, expected 1 to {len(hosts)}, as many as the hostfile has")
    if num_gpus == 0:
        raise ValueError("--num_gpus 0 is given, expected 1 or more; leave it out for all slots")
    named = _read_filter(include or exclude, "--include" if include else "--exclude", hosts)
    chosen: list[Host] = []
    # DeepSpeed applies num_nodes before num_gpus, and takes num_gpus for every host, whatever its line says.
    for host in hosts[: num_nodes if num_nodes > 0 else None]:
        slots = host.slots if num_gpus < 0 else tuple(range(num_gpus))
        if include:
            slots = tuple(named.get(host.name, ()))
        elif exclude:
            slots = tuple(slot for slot in slots if slot not in named.get(host.name, ()))
        if slots:
            chosen.append(dataclasses.replace(host, slots=slots))
    if not chosen:
        raise ValueError(f"--exclude {exclude} leaves no slot of any host; exclude less")
    return chosen


def _read_filter(text: str, option: str, hosts: list[Host]) -> dict[str, list[int]]:
    slots_of = {host.name: host.slots for host in hosts}
    named: dict[str, list[int]] = {}
    for part in text.split("@") if text else []:
        match = _FILTER.fullmatch(part.strip())
        if match is None:
            raise ValueError(f'{option} {text!r} is given, expected HOST[:SLOT,...]@HOST..., such as "node1@node2:0,2"')
        name, slots = match[1], match[2]
        if name not in slots_of:
            raise ValueError(
                f"{option} names {name}, which is not in the hostfile; expected one of {', '.join(slots_of)}"
            )
        wanted = sorted({int(slot) for slot in slots.split(",")}) if slots else list(slots_of[name])
        if missing := [slot for slot in wanted if slot not in slots_of[name]]:
            raise ValueError(
                f"{option} names slot {missing[0]} of {name}, expected 0 to {len(slots_of[name]) - 1}, as its line says"
            )
        named[name] = sorted({*named.get(name, ()), *wanted})
    return named

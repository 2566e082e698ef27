"""Judges a survey of the hosts: what stops the job, what may disturb it, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tempo_megatron.cluster.host import is_loopback
from tempo_megatron.cluster.survey import Survey, SurveyedHost

_GIB = 2**30
# Containers get 64 MiB of /dev/shm by default, but NCCL and workers of data loaders need more.
_LEAST_SHM_BYTES, _LEAST_DISK_BYTES, _MOST_CLOCK_SECONDS = _GIB // 2, 2 * _GIB, 2.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """One sentence about a host, or about all hosts (None). An error stops the job, a warning may disturb it."""

    level: str
    host: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.host + ': ' if self.host else ''}{self.text}"


def judge(survey: Survey) -> list[Finding]:
    """Lists all findings, errors first."""
    found: list[Finding] = []
    for surveyed in survey.hosts:
        if surveyed.error is not None:
            found.append(Finding("error", surveyed.host.name, f"{surveyed.error} ({surveyed.host.place})"))
        else:
            found += [Finding(level, surveyed.host.name, text) for level, text in _judge_alone(surveyed)]
    found += [Finding("error", host, text) for host, text in _judge_network(survey)]
    for level, rule in _COMPARISONS:
        found += [Finding(level, host, text) for host, text in rule(survey.answered)]
    found += [Finding("error", None, text) for text in _find_same_machine(survey.answered)]
    return sorted(found, key=lambda finding: finding.level != "error")


def _judge_alone(surveyed: SurveyedHost) -> Iterator[tuple[str, str]]:
    facts, host = surveyed.facts, surveyed.host
    most, given = max(host.slots) + 1, f"{host.place}: slots up to {max(host.slots)} are used"
    if facts["gpus"] and most > facts["gpus"]:
        yield "error", f"{given}, but it has {facts['gpus']} GPUs; write slots={facts['gpus']} or fewer"
    elif not facts["gpus"] and most > facts["cores"]:
        yield "error", f"{given}, but it has no GPU and {facts['cores']} cores; write slots={facts['cores']} or fewer"
    if facts["gpus"] and (facts["versions"].get("torch") or "").endswith("+cpu"):
        yield (
            "error",
            f"it has {facts['gpus']} GPUs, but torch {facts['versions']['torch']} is for the CPU; install CUDA's",
        )
    for name, what in (("torch", "the job"), ("deepspeed", "the deepspeed launcher")):
        if facts["versions"].get(name) is None:
            yield (
                "error",
                f"{name} is not installed for its Python, which {what} needs; pip install tempo-megatron[train]",
            )
    if abs(surveyed.clock_ahead) > _MOST_CLOCK_SECONDS:
        direction = "ahead of" if surveyed.clock_ahead > 0 else "behind"
        yield (
            "warning",
            f"its clock is {abs(surveyed.clock_ahead):.1f} s {direction} this host's; start chrony or ntpd there",
        )
    for name, least, why in (
        ("shm", _LEAST_SHM_BYTES, "/dev/shm, which NCCL and data loaders use; start its container with --shm-size 8g"),
        ("disk", _LEAST_DISK_BYTES, "the folder the job starts in; remove something, or save elsewhere"),
    ):
        if facts[f"{name}_bytes"] < least:
            yield "warning", f"{facts[f'{name}_bytes'] / _GIB:.2f} GiB are free in {why}"


def _judge_network(survey: Survey) -> Iterator[tuple[str, str]]:
    first, port = survey.first, survey.port
    if first.error is not None:
        return
    name = first.host.name
    if survey.port_error is not None:
        yield name, f"port {port} cannot be taken for rank 0 ({survey.port_error}); give another --master_port"
        return
    if survey.address is not None or first is survey.hosts[-1]:
        return
    own = [address for address in survey.candidates if not is_loopback(address)]
    if not own:
        yield (
            name,
            (
                "rank 0 would listen on loopback only, where no other host comes: its name or --master_addr means "
                f"{', '.join(survey.candidates) or 'nothing'}; give --master_addr its address in their network"
            ),
        )
        return
    for surveyed in survey.answered[1:]:
        if not surveyed.reached.get("accepted"):
            why = "; ".join(f"{address}: {surveyed.reached['failed'].get(address, '?')}" for address in own)
            yield (
                surveyed.host.name,
                (
                    f"it does not reach rank 0's port {port} on {name} ({why}); open it and those above 1023 "
                    "between the hosts, or give --master_addr the address of a network that they share"
                ),
            )
    if all(surveyed.reached.get("accepted") for surveyed in survey.answered[1:]):
        yield name, f"no address of it is reached by all hosts (of {', '.join(own)}); give --master_addr one that is"


def _compare(
    read: Callable[[SurveyedHost], dict[str, Any]], remedy: str
) -> Callable[[list[SurveyedHost]], Iterator[tuple[str, str]]]:
    """Makes a rule that reads a dictionary of each host and names the entries that differ from most hosts'."""

    def find_differences(hosts: list[SurveyedHost]) -> Iterator[tuple[str, str]]:
        names = list(dict.fromkeys(name for surveyed in hosts for name in read(surveyed)))
        # The value that most hosts have. If two values are equally frequent, the one of the lower rank.
        usual = {name: Counter(read(surveyed).get(name) for surveyed in hosts).most_common(1)[0][0] for name in names}
        witness = {
            name: next(surveyed.host.name for surveyed in hosts if read(surveyed).get(name) == usual[name])
            for name in names
        }
        for surveyed in hosts:
            for name in names:
                value = read(surveyed).get(name)
                if value != usual[name]:
                    yield (
                        surveyed.host.name,
                        (f"{name} is {_say(value)}, on {witness[name]} it is {_say(usual[name])}; {remedy}"),
                    )

    return find_differences


def _say(value: Any) -> str:
    return "not there" if value is None else str(value)


def _count_devices(surveyed: SurveyedHost) -> dict[str, Any]:
    return {"the device it trains on": "GPU" if surveyed.facts["gpus"] else "CPU"}


def _read_files(surveyed: SurveyedHost) -> dict[str, Any]:
    return {name: value and f"of content {value}" for name, value in surveyed.facts["files"].items()}


def _read_sources(surveyed: SurveyedHost) -> dict[str, Any]:
    return {f"the code of {name}": value for name, value in surveyed.facts["sources"].items()}


_COMPARISONS = (
    ("error", _compare(_count_devices, "leave one kind of hosts out, or see whether its driver runs (nvidia-smi)")),
    ("error", _compare(_read_sources, "copy the same checkout there, install the same release, or share the folder")),
    ("error", _compare(_read_files, "copy the same file there, or share its folder")),
    ("error", _compare(lambda surveyed: surveyed.facts["versions"], "install the same version on all hosts")),
)


def _find_same_machine(hosts: list[SurveyedHost]) -> Iterator[str]:
    """Finds two lines of the hostfile that are one machine, such as a name and its address."""
    seen: dict[str, SurveyedHost] = {}
    for surveyed in hosts:
        facts = surveyed.facts
        identity = f"{facts['boot']} {facts['hostname']} {sorted(facts['addresses'])}"
        host = surveyed.host
        if (other := seen.setdefault(identity, surveyed).host) is not host:
            yield (
                f"{other.name} and {host.name} are one machine ({other.place}; {host.place}); expected one line for "
                "each; remove one and add their slots up"
            )

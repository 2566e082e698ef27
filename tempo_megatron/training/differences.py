"""Finds the differences between descriptions of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ABSENT = object()


def find_difference(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Says in one sentence how the first rank that differs from rank 0 differs; returns None if none does.

    Args:
        facts: of each rank, collect_facts and "host".
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


def flatten(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens `{"setting": {"deepspeed": {"stage": 1}}}` to `{"setting deepspeed.stage": 1}`."""

    def walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, Mapping):
            yield name, value
            return
        for key, inner in value.items():
            yield from walk(f"{name}.{key}" if " " in name else f"{name} {key}", inner)

    return dict(pair for kind, block in facts.items() for pair in walk(kind, block))


def _is_other(name: str, first: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    if name == "host":
        return False
    if name.startswith("data content of set "):  # only the first rank of a node has it
        return name in first and name in found and bool(first[name] != found[name])
    return bool(first.get(name, _ABSENT) != found.get(name, _ABSENT))


def _write(facts: Mapping[str, Any], name: str) -> str:
    return repr(facts[name]) if name in facts else "not set"

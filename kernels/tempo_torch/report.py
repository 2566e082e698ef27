"""Reports what `tempoize` replaced, what it left, and why."""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass(frozen=True)
class Entry:
    """One module of the report.

    Args:
        name: its qualified name.
        module: its former class.
        operation: the argument of `tempoize` that decides about it.
        now: what it does now; None if it was left.
        why: the reason if it was left.
        stock_bytes, tempo_bytes: expected bytes per element of its input that it keeps beyond what the next linear
            keeps, for elements of 2 bytes on a GPU.
    """

    name: str
    module: str
    operation: str
    now: str | None
    why: str = ""
    stock_bytes: float = 0.0
    tempo_bytes: float = 0.0

    def leave(self, why: str) -> Entry:
        """Returns the entry of this module as one that was left."""
        return dataclasses.replace(self, now=None, why=why)


@dataclasses.dataclass(frozen=True)
class Report:
    """The modules of one model, in the order of its `named_modules`, then what else draws; `str` gives a table.

    Args:
        entries: the modules.
        seen: which training forward was watched to confirm the entries, or why none was yet.
        checked: on what the model was compared with its stock modules, or why it was not.
    """

    entries: tuple[Entry, ...]
    seen: str = ""
    checked: str = ""

    @property
    def replaced(self) -> tuple[Entry, ...]:
        """The modules that are Tempo's now."""
        return tuple(entry for entry in self.entries if entry.now is not None)

    @property
    def left(self) -> tuple[Entry, ...]:
        """The modules that stay as they were, each with its `why`."""
        return tuple(entry for entry in self.entries if entry.now is None)

    def __str__(self) -> str:
        found: Counter[tuple[str, ...]] = Counter()
        for entry in self.entries:
            if entry.now is None:
                line = ("left", entry.operation, entry.module, entry.why, "")
            else:
                saving = f"{entry.stock_bytes:g} -> {entry.tempo_bytes:g} bytes per element"
                line = ("replaced", entry.operation, entry.module, entry.now, saving)
            found[line] += 1
        rows = [(f"{count} x", *line) for line, count in found.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
        table = "\n".join(line.rstrip() for line in lines) or "nothing to replace"
        return "\n".join(line for line in (table, self.seen, self.checked) if line)

"""Writes docs/settings.md: the switches of Tempo and the options of the trainer, from the tables that the code reads.

python -m tempo_megatron.training.settings_page > docs/settings.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tempo_megatron.settings.operations import OPERATIONS, Operation
from tempo_megatron.slots.block_slots import CLASSES
from tempo_megatron.training.run.option import Option, list_options, name_argument
from tempo_megatron.training.run.run_config import MASKINGS, RunConfig

_HEAD = """# Settings

`python -m tempo_megatron.training.settings_page` writes this page; do not edit it.

## Switches

Each is an argument (`--tempo-norm recompute`), a key of the `"tempo"` block of the DeepSpeed JSON (`"norm"`), and a
field of `TempoConfig`. `"off"` is stock Megatron. `"auto"`, the default, is the first value in its line that the model
allows; a run's banner says which and why."""
_OPTIONS = """## Options of the trainer

Of `tempo-pretrain-gpt`, `-bert` and `-t5`, without the model's (`--help` has them) and Tempo's. On `--load` an option
that *stays* or *may change* is as in the checkpoint if it is left out; all others are as the command line says."""


def write_page() -> str:
    """Returns the page."""
    return "\n".join([_HEAD, *_write_switches(), "", _OPTIONS, *_write_options()]) + "\n"


def _write_switches() -> Iterator[str]:
    for operation in OPERATIONS.values():
        yield f"\n### {operation.name}\n"
        yield f"{operation.what[0].upper()}{operation.what[1:]}. `auto`: {', '.join(operation.preference)}."
        if places := (*operation.slots, *operation.block_slots):
            yield f"Slots: {_quote(places)}."
        yield f"Operations: {_quote(operation.functions)}."
        if operation.kernels:
            yield f"Kernels: {_quote(f'kernels/tempo_kernels/{path}' for path in operation.kernels)}."
        rows = ((f"`{value}`", _quote(_list_names(operation, value)), kept) for value, kept in operation.keeps.items())
        yield from _write_table(("value", "code", "keeps"), rows)


def _list_names(operation: Operation, value: str) -> list[str]:
    found = CLASSES[operation.name, value]
    return [f"{each.__module__.removeprefix('tempo_megatron.')}.{each.__name__}" for each in found]


def _write_options() -> Iterator[str]:
    groups: dict[str, list[tuple[str, ...]]] = {}
    for kind in (RunConfig, *MASKINGS.values()):
        for field, option in list_options(kind).items():
            if option.group and (row := _write_option(field, option)) not in groups.setdefault(option.group, []):
                groups[option.group].append(row)
    for group, rows in groups.items():
        if rows := [row for row in rows if row[0]]:
            yield f"\n### {group.partition(':')[0].capitalize()}"
            on_load = {row[2] for row in rows}
            columns = 2 if len(on_load) == 1 else 3
            if columns == 2 and (only := on_load.pop()):
                yield f"\nOn `--load` each of them *{only}*."
            yield from _write_table(("option", "meaning", "`--load`")[:columns], [row[:columns] for row in rows])


def _write_option(field: str, option: Option) -> tuple[str, ...]:
    names = option.keywords.get("names", (name_argument(field),))[:1]
    words = _quote([*names, *(f"--{name}" for name in option.switches)])
    text = option.text.replace("%(const)s", str(option.keywords.get("const")))
    return words, text, option.on_load.title if option.on_load.is_taken else ""


def _quote(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _write_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield ""
    for cells in (titles, ["---"] * len(titles), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(write_page(), end="")

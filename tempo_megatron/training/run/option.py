"""An option of the trainer is one dataclass field: its help, its parser, its default, and what a resumed run does.

The parser, the tables of `resume`, `config --show` and docs/settings.md read these fields, so that adding an option is
adding a field to RunConfig.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class OnLoad:
    """What a run that goes on from a checkpoint does with a field; `is_taken`: one left out has its value there."""

    title: str
    is_taken: bool


STAYS = OnLoad("stays", True)
"""Another value than the checkpoint's is refused."""
SCHEDULE = OnLoad("stays", True)
"""As STAYS, unless --override-opt-param-scheduler takes the whole schedule."""
MAY_CHANGE = OnLoad("may change", True)
"""The command line's value is used: what the checkpoint holds fits any."""
OF_EACH_START = OnLoad("of each start", False)
"""How this start reads, computes, watches and writes; the checkpoint's value says nothing about it."""
COMPUTED = OnLoad("computed", False)
"""It follows from other fields."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """What is known of a field."""

    help: str
    on_load: OnLoad
    group: str = ""
    """Title of the group in `--help`; empty for a field without an argument."""

    parse: Callable[[str], Any] | None = None
    """Reads one word; None for a word as it is, a switch or a choice."""

    default: Any = None
    """Used if neither the command line, the DeepSpeed JSON nor the checkpoint has a value."""

    switches: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Arguments that stand for values of the field, with their help."""

    family: str = ""
    """The family of models that has it; empty for all."""

    needs: str = ""
    """The field that must be set too; with =VALUE behind its name, to that value."""

    in_json: str = ""
    """The name in the DeepSpeed JSON, which may give the value."""

    in_save: str = ""
    """The name in the folder of --save that is used if the option is left out."""

    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further ones of add_argument, and `names`: the argument's, if they are not the field's; () for switches alone."""

    @property
    def text(self) -> str:
        """The help, with the default where it does not say one; a switch that is off has none."""
        default = self.default
        if "default" in self.help or default is None or default is False:
            return self.help
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else "yes" if default is True else default
        return f"{self.help} (default {shown})"

    def add_to(self, group: Any, field: str) -> None:
        """Adds the argument of `field`, and the switches, to a group of a parser."""
        for name, text in self.switches.items():
            group.add_argument(f"--{name}", action="store_true", help=text)
        keywords = dict(self.keywords)
        if self.parse is not None:
            keywords["type"] = self.parse
        if names := keywords.pop("names", (name_argument(field),)):
            # A value that the checkpoint or the JSON may decide is None as long as nobody has given it.
            default = None if self.on_load.is_taken else self.default
            group.add_argument(*names, default=default, help=self.text, **keywords)


def option(help: str, parse: Callable[[str], Any] | None = None, *, on_load: OnLoad, **more: Any) -> Any:
    """Returns a dataclass field with this Option; `more` are its fields, or keywords of add_argument."""
    own = {field.name for field in dataclasses.fields(Option)}
    kept = {name: value for name, value in more.items() if name in own}
    keywords = {name: value for name, value in more.items() if name not in own}
    made = Option(help=help, parse=parse, on_load=on_load, keywords=keywords, **kept)
    return dataclasses.field(metadata={"option": made})


def list_options(kind: type) -> dict[str, Option]:
    """Returns the options of a dataclass by the names of their fields."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(kind)}


def add_options(parser: argparse.ArgumentParser, kind: type, family: str) -> None:
    """Adds the arguments of a dataclass that a family of models has, in their groups."""
    groups: dict[str, Any] = {}
    for name, each in list_options(kind).items():
        if each.group and each.family in ("", family):
            title, _, text = each.group.partition(": ")
            if title not in groups:
                groups[title] = parser.add_argument_group(title, text or None)
            each.add_to(groups[title], name)


def name_argument(field: str) -> str:
    """`--lr-decay-style` of lr_decay_style."""
    return f"--{field.replace('_', '-')}"


def flatten(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens `{"setting": {"deepspeed": {"stage": 1}}}` to `{"setting deepspeed.stage": 1}`."""

    def walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, Mapping):
            yield name, value
            return
        for key, inner in value.items():
            yield from walk(f"{name}.{key}" if " " in name else f"{name} {key}", inner)

    return dict(pair for kind, block in facts.items() for pair in walk(kind, block))

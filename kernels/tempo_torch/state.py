"""Holds what `tempoize` knows of a model: what was replaced, what a forward was seen to run, what a check found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from tempo_kernels.offload import Offload
from tempo_torch.attention import NAME, PLACE, get_change, give_back_attention, name_implementation
from tempo_torch.check import check_model
from tempo_torch.compare import Unit
from tempo_torch.functional import RedirectsFunctions
from tempo_torch.inputs import Inputs
from tempo_torch.linear import DropsInput
from tempo_torch.loss import FusedLoss
from tempo_torch.mlp import TiledMLP, find_dropout
from tempo_torch.position import Passes
from tempo_torch.probe import Seen, probe
from tempo_torch.replace import change_class, give_class_back
from tempo_torch.replacements import is_apart
from tempo_torch.report import Entry, Report

CHOICES = {
    "activation": ("auto", "recompute", "inplace", "off"),
    "norm": ("auto", "inplace", "recompute", "off"),
    "dropout": ("recompute", "auto", "off"),
    "attention": ("auto", "flash", "off"),
    "loss": ("auto", "fused", "off"),
    "mlp": ("off", "tile"),
    "check": ("auto", "off"),
}
"""The values of each argument of `tempoize`, the default first."""


class State:
    """The state that `tempoize` attaches to a model.

    Args:
        made: the entries of modules that were replaced or left.
        given: the arguments of tempoize.
    """

    def __init__(self, passes: Passes, choices: dict[str, str], made: list[Entry], given: tuple[Any, ...]) -> None:
        self.passes, self.choices, self.made, self.given = passes, choices, made, given
        self.offloads: list[Offload] = []
        self.seen: Seen | str = "its inputs are not; the first one tells"
        self.checked = 'not checked: check is "off"; check(model, **batch) does it'
        self._is_settled = False

    def leave(self) -> None:
        """Removes the hooks, and lets nothing be moved any more."""
        self.passes.leave()
        for offload in self.offloads:
            offload.remove()
        self.offloads = []

    def watch(self, model: nn.Module, call: Inputs) -> None:
        """Finds out what model(*args, **kwargs) runs. If no module asks for Tempo's attention, stock's comes back.

        Raises ValueError if a value other than "auto" and "off" applies to nothing that runs.
        """
        modules = dict(model.named_modules())
        self.seen = probe(model, self.passes, call)
        self.give_back_tiles(modules)
        flash = [entry for entry in self.made if entry.now and self._is_of_registry(entry, modules)]
        is_asked = isinstance(self.seen, str) or not all(is_apart(modules[name]) for name in self.seen.attention)
        if flash and not is_asked and not any(map(get_change, modules.values())):
            give_back_attention(model)
            self._leave(flash, "none of its modules asks transformers' registry for attention")
            self.seen = probe(model, self.passes, call)
        self.check_applied(model)

    def give_back_tiles(self, modules: dict[str, nn.Module]) -> None:
        """Gives the MLPs in tiles that draw masks, as adapters put in since then do, their classes back."""
        for name, module in modules.items():
            if isinstance(module, TiledMLP) and (why := find_dropout(module)) is not None:
                give_class_back(module)
                self._leave([each for each in self.made if each.name == name and each.operation == "mlp"], f"it {why}")

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def watch_first(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Watches, as a hook before forwards, the first training forward whose inputs differ from the watched ones."""
        if not model.training:
            return
        self.passes.samples.check_sequence()
        is_flash = self.choices["attention"] == "flash"
        if self._is_settled and not is_flash:
            return
        changes = [(type(each).__name__, why) for each in model.modules() if (why := get_change(each)) is not None]
        if changes and is_flash:
            kind, why = changes[0]
            raise ValueError(f'attention is "flash", but {kind} {why}, or tempoize with "auto"')
        if self._is_settled or changes:
            return
        self._is_settled = True
        if isinstance(self.seen, str) or args[1:] or any(name not in self.seen.inputs for name in kwargs):
            self.watch(model, (args, kwargs))

    def check(self, model: nn.Module, call: Inputs | None = None) -> None:
        """Compares the model with its stock modules, on made-up inputs without a call, and gives back what differs.

        Raises ValueError where that is a value other than "auto" and "off".
        """
        has_loss = any(entry.operation == "loss" and entry.now for entry in self.made)
        before, self._is_settled = self._is_settled, True  # no forward of the check is the first
        try:
            found = check_model(model, self.passes, self._list_units(model), call, has_loss)
        finally:
            self._is_settled = before
        self.checked = found.text
        for unit, why in found.units.items():
            self._give_back(model, unit, why)

    def _list_units(self, model: nn.Module) -> list[Unit]:
        modules, is_asked = dict(model.named_modules()), name_implementation(model) == NAME
        found: dict[tuple[str, str, bool], list[nn.Module]] = {}
        for entry in self.made:
            is_registry = self._is_of_registry(entry, modules)
            if entry.now is not None and (is_asked or not is_registry):
                of_kind = found.setdefault((entry.operation, entry.module, is_registry), [])
                of_kind += [] if is_registry else [modules[entry.name]]
        return [Unit(operation, kind, tuple(each), registry) for (operation, kind, registry), each in found.items()]

    def _give_back(self, model: nn.Module, unit: Unit, why: str) -> None:
        value = self.choices[unit.operation]
        if _is_by_name(unit.operation, value):
            own = why.partition("ValueError: ")[2]
            if own.startswith(f'{unit.operation} is "'):
                raise ValueError(own)
            raise ValueError(_refuse(unit.operation, value, f"{unit.kind}: {why}"))
        if unit.is_registry:
            give_back_attention(model)
        modules: tuple[Any, ...] = unit.modules
        for module in modules:
            head = module.get_output_embeddings() if isinstance(module, FusedLoss) else None
            give_class_back(module)
            if head is not None:
                give_class_back(head)
                change_class(head, DropsInput)
        kind = unit.operation, unit.kind
        self._leave([each for each in self.made if each.now is not None and (each.operation, each.module) == kind], why)

    def _leave(self, entries: list[Entry], why: str) -> None:
        """Notes that the modules of these entries are stock again."""
        self.made = [each.leave(why) if each in entries else each for each in self.made]

    def check_applied(self, model: nn.Module) -> None:
        """Raises ValueError if a value that was asked for by name applies to nothing."""
        report = self.report(model)
        done = {entry.operation for entry in report.replaced}
        for operation, value in self.choices.items():
            if operation not in done and _is_by_name(operation, value):
                reasons = [entry.why for entry in report.left if entry.operation == operation]
                raise ValueError(_refuse(operation, value, (reasons or ["the model has no module for it"])[0]))

    def report(self, model: nn.Module) -> Report:
        """Returns the report of what is known by now."""
        modules = dict(model.named_modules())
        if isinstance(self.seen, str):
            entries = self._leave_changed(self.made, modules)
            seen = f"What a forward in training runs is not known yet: {self.seen}."
            return Report(tuple(entries), seen, self.checked)
        entries = [entry for made in self.made for entry in self._confirm(made, self.seen, modules)]
        listed = {entry.name for entry in entries if entry.now is None and entry.operation in ("dropout", "attention")}
        for name, functions in self.seen.draws.items():
            is_attention = PLACE in modules[name].__dict__ or any("attention" in function for function in functions)
            if name not in listed:
                why = f"{', '.join(sorted(functions))} draws from torch's generator"
                operation = "attention" if is_attention else "dropout"
                entries.append(Entry(name, type(modules[name]).__name__, operation, None, why))
        seen = f"Seen in a forward in training, without memory, of {self.seen.inputs}."
        return Report(tuple(entries), seen, self.checked)

    def _is_of_registry(self, entry: Entry, modules: dict[str, nn.Module]) -> bool:
        """Returns whether an entry stands for all attention that asks transformers' registry."""
        return entry.operation == "attention" and not is_apart(modules.get(entry.name))

    def _leave_changed(self, entries: Iterable[Entry], modules: dict[str, nn.Module]) -> list[Entry]:
        """Returns these entries; the registry's attention counts as left if another one was set since."""
        why = next(filter(None, map(get_change, modules.values())), None)
        return [
            each.leave(f"it {why}") if why and each.now and self._is_of_registry(each, modules) else each
            for each in entries
        ]

    def _confirm(self, made: Entry, seen: Seen, modules: dict[str, nn.Module]) -> Iterator[Entry]:
        """Yields an entry of `made` as it was seen to run."""
        module, is_loss = modules[made.name], made.operation == "loss"
        if made.now is None:
            yield made
        elif self._is_of_registry(made, modules):
            if not seen.attention:
                yield from (each for each in self._leave_changed([made], modules) if each is not made)
            for name, why in seen.attention.items():
                if not is_apart(modules[name]):
                    yield _confirm_attention(made, name, modules[name], why)
        elif made.operation == "attention" and made.name in seen.attention:
            yield _confirm_attention(made, made.name, module, seen.attention[made.name])
        elif made.operation == "attention" or (not is_loss and made.name not in seen.called):
            yield made.leave("the forward that was watched does not call it")
        elif is_loss:
            is_there = any("linear_cross_entropy" in operators for operators in seen.operators.values())
            yield made if is_there else made.leave("the forward that was watched does not come to its loss")
        elif "forward" in module.__dict__:
            yield made.leave("its forward was replaced on the object itself")
        elif isinstance(module, RedirectsFunctions) and not seen.operators.get(made.name):
            return  # its functions dropped nothing and got nothing that needs a gradient
        elif made.operation == "norm" and not seen.operators.get(made.name):
            yield made.leave("stock ran: it has a gate, or two dtypes")
        else:
            yield made


def _confirm_attention(made: Entry, name: str, module: nn.Module, why: str | None) -> Entry:
    why = get_change(module) or module.__dict__[PLACE].why or why
    found = dataclasses.replace(made, name=name, module=type(module).__name__)
    return found if why is None else found.leave(f"it {why}")


def _is_by_name(operation: str, value: str) -> bool:
    """Returns whether a value was asked for by name and has to apply."""
    return value not in ("auto", "off", CHOICES[operation][0])


def _refuse(operation: str, value: str, why: str) -> str:
    others = '"auto" or "off"' if "auto" in CHOICES[operation] else '"off"'
    return f'{operation} is "{value}", but {why}; set it to {others}'

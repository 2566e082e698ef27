"""TempoConfig: which operations of a transformer layer keep less for backward, and how."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tempo_megatron.settings.layer_values import (
    LAYER_OPERATIONS,
    OFFLOAD,
    FrozenDict,
    freeze_layers,
    read_range,
    write_key,
    write_layers,
)
from tempo_megatron.settings.operations import CHOICES, OPERATIONS, check_offload, check_value
from tempo_megatron.words.argument_types import parse_memory
from tempo_megatron.words.json_text import read_object


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TempoConfig:
    """What each operation keeps for backward. `TempoConfig()` is `"auto"` throughout.

    `"auto"` is in place if the model allows that, else recompute, else stock; `tempo_megatron.slots.choose.choose` says
    which and why. `"off"` is stock Megatron. Any other value is taken as written, and a model that cannot have it is
    refused. `tempo_megatron.settings.operations.OPERATIONS` and docs/settings.md say what each value keeps.

    `layers` gives single layers other values. Operations that a range leaves out have the fields' values; so do the
    final norm, the embedding's dropout and the loss head.

    Raises ValueError for an unknown value, a key that is not a range of layers, and ranges that share a layer.
    """

    activation: str = "auto"
    norm: str = "auto"
    dropout: str = "auto"
    attention: str = "auto"
    linear_fc1: str = "auto"
    linear_qkv: str = "auto"
    moe_permute: str = "auto"
    loss: str = "auto"

    offload: str = "off"
    """What goes to the host after the forward and comes back before the backward, in every layer: "all" that the layer
    keeps, whatever its operations keep, or some rows of the ledger by their modules' names, joined by "+":
    "input_layernorm+mlp.linear_fc2". See `tempo_kernels.offload`."""

    check: str = "auto"
    """"auto" compares the first layer of each kind with Megatron's own in a run's first step, and stops the run where
    they differ; "off" does not."""

    layers: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=FrozenDict)
    """Range of layers -> operation -> value: `{"0-11": {"activation": "recompute", "attention": "off"}, "20-": {...}}`.
    Layers are numbered from 0 over the whole model, across all pipeline stages, and ranges include both ends; see
    `tempo_megatron.settings.layer_values` for the two stacks of a T5. Any mapping is accepted, and stored as one that
    can be hashed."""

    def __post_init__(self) -> None:
        for name in CHOICES:
            check_value("tempo.", name, getattr(self, name), tuple(CHOICES))
        check_offload("tempo.", self.offload)
        if self.check not in CHECKS:
            raise ValueError(f"tempo.check is {self.check!r}; it must be one of {', '.join(map(repr, CHECKS))}")
        object.__setattr__(self, "layers", freeze_layers(self.layers))

    @classmethod
    def off(cls) -> TempoConfig:
        """Stock Megatron in every slot."""
        off: Any = dict.fromkeys(CHOICES, "off")
        return cls(**off)

    @property
    def is_off(self) -> bool:
        """Whether every operation is stock by its value, in every layer, and nothing is offloaded; "auto" counts as
        stock only for operations whose "auto" is always "off"."""
        stock = {name: {"off", *(("auto",) if OPERATIONS[name].is_opt_in else ())} for name in CHOICES}
        return not self.offloads and all(self.values_of(name) <= stock[name] for name in CHOICES)

    @property
    def offloads(self) -> bool:
        """Whether any layer's tensors go to the host."""
        return self.values_of(OFFLOAD) != {"off"}

    def values_of(self, operation: str) -> set[str]:
        """The values that an operation has in the layers and outside of them."""
        return {value for _, value in self.list_values(operation)}

    def list_values(self, operation: str) -> Iterator[tuple[str, str]]:
        """(name for messages, value) of an operation: `tempo.norm`, then each `tempo.layers["0-11"].norm`."""
        yield f"tempo.{operation}", getattr(self, operation)
        for key, values in self.layers.items():
            if operation in values:
                yield f"tempo.layers{write_key(key)}.{operation}", values[operation]

    def for_layer(self, layer: int, stack: str = "decoder") -> TempoConfig:
        """The values of one layer, as a TempoConfig without `layers`.

        Args:
            layer: counted from 0 over the whole model.
            stack: "encoder" or "decoder".
        """
        key = self.get_range(layer, stack)
        return dataclasses.replace(self, layers={}, **(self.layers[key] if key is not None else {}))

    def for_layers(self, layers: range, stacks: Sequence[str]) -> TempoConfig:
        """The values of consecutive layers, as those of a model that has only these: `layers` then counts from 0.

        Args:
            layers: counted from 0 over the whole model, of each of the stacks.
            stacks: "encoder", "decoder" or both.
        """
        found = {}
        for stack in stacks:
            values = [self.for_layer(layer, stack) for layer in layers]
            for each, group in itertools.groupby(range(len(values)), key=values.__getitem__):
                pairs = ((name, getattr(each, name)) for name in (*LAYER_OPERATIONS, OFFLOAD))
                if own := {name: value for name, value in pairs if value != getattr(self, name)}:
                    found[f"{stack} {write_layers(list(group))}" if len(stacks) > 1 else write_layers(list(group))] = (
                        own
                    )
        return dataclasses.replace(self, layers=found)

    def get_range(self, layer: int, stack: str = "decoder") -> str | None:
        """The key of `layers` to which a layer belongs; None where it has the values of the fields."""
        return next((key for key in self.layers if read_range(key).holds(layer, stack)), None)

    def fill_auto(self, values: Mapping[str, str]) -> TempoConfig:
        """A copy in which each "auto" of the operations in `values`, in layers too, is the value given there."""

        def fill(block: Mapping[str, str]) -> dict[str, str]:
            return {name: values.get(name, value) if value == "auto" else value for name, value in block.items()}

        layers = {key: fill(block) for key, block in self.layers.items()}
        return dataclasses.replace(self, **fill({name: getattr(self, name) for name in CHOICES}), layers=layers)

    def check_layers(self, stack: str, num_layers: int) -> None:
        """Raise ValueError where `layers` names layers that a stack, "encoder" or "decoder", does not have."""
        for each in map(read_range, self.layers):
            if each.is_of(stack) and max(each.first, each.last or 0) >= num_layers:
                raise ValueError(
                    f"tempo.layers{write_key(each)} goes beyond the {stack}'s {num_layers} layers; expected layers "
                    f"from 0 to {num_layers - 1}; change the range"
                )

    def check_stacks(self, stacks: tuple[str, ...], model_name: str) -> None:
        """Raise ValueError where `layers` names a stack that is not one of a model's `stacks`."""
        for each in map(read_range, self.layers):
            if each.stack is not None and each.stack not in stacks:
                raise ValueError(
                    f"tempo.layers{write_key(each)} is given, and a {model_name} has no {each.stack}; expected layers "
                    f'of its {" or ".join(stacks)}; write "{dataclasses.replace(each, stack=None)}"'
                )

    @classmethod
    def from_dict(cls, block: Mapping[str, Any]) -> TempoConfig:
        """From a `"tempo"` block. `"enabled": false` gives `TempoConfig.off()`; a missing `enabled` means true.

        Raises ValueError for an unknown key, naming the nearest known one, and for a value that does not exist.
        """
        checked = check_block(block)
        if not checked.pop("enabled", True):
            return cls.off()
        for key in {BUDGET, HOST_MEMORY} & checked.keys():
            raise ValueError(
                f"tempo.{key} is given, and only a run that starts plans by it (tempo-pretrain-gpt, "
                "tempo-pretrain-bert, run_megatron.py); leave it out, or ask tempo-megatron plan"
            )
        return cls(**checked)

    @classmethod
    def from_file(cls, path: str | Path) -> TempoConfig:
        """From the `"tempo"` block of a DeepSpeed JSON, or from a file that holds only such a block.

        Raises ValueError where the file is not JSON or a key is unknown, OSError where it cannot be read.
        """
        content = read_object(path)
        if "tempo" in content:
            return cls.from_dict(content["tempo"])
        if content and not set(content) & set(_KEYS):
            raise ValueError(f'{path} has no "tempo" block; add one, for example "tempo": {{"activation": "auto"}}')
        return cls.from_dict(content)

    def describe(self) -> str:
        """One line: `activation=inplace norm=auto dropout=recompute attention=flash loss=auto`, and of single layers
        ` layers 0-11: activation=recompute attention=off, 12: norm=off`."""
        return " ".join(
            [f"{name}={getattr(self, name)}" for name in self.list_mentioned()]
            + list(filter(None, (self.describe_offload(), self.describe_layers())))
        )

    def describe_offload(self) -> str:
        """`offload=all`, or nothing."""
        return "" if self.offload == "off" else f"{OFFLOAD}={self.offload}"

    def list_mentioned(self) -> list[str]:
        """The operations that banners and reports mention: all except opt-in ones that nobody set."""
        return [
            name
            for name, operation in OPERATIONS.items()
            if not operation.is_opt_in or self.values_of(name) - {"auto", "off"}
        ]

    def describe_layers(self) -> str:
        """What single layers have: `layers 0-11: activation=recompute attention=off, 12: norm=off`, or nothing."""
        parts = (
            f"{key}: {' '.join(f'{name}={value}' for name, value in values.items()) or 'as all'}"
            for key, values in self.layers.items()
        )
        return f"layers {', '.join(parts)}" if self.layers else ""


BUDGET = "memory_budget"
"""The key of a block that says what a rank of a run may hold; the run plans its operations by it."""

HOST_MEMORY = "host_memory"
"""The key that says what of a host's memory its ranks may use together for what the plan of a budget sends there."""

CHECKS = ("auto", "off")
"""The values of TempoConfig.check."""

SETTINGS = (*CHOICES, OFFLOAD, "check", "layers", BUDGET, HOST_MEMORY)
"""The keys of a block besides `enabled`; each has an argument too."""

_KEYS = ("enabled", *SETTINGS)


def check_block(block: object) -> dict[str, Any]:
    """A copy of a `"tempo"` block whose keys are known and whose values exist; else ValueError."""
    if not isinstance(block, Mapping):
        raise ValueError(f'"tempo" is {block!r}; expected a block such as {{"activation": "auto"}}')
    for key, value in block.items():
        check_value("tempo.", key, value, _KEYS)
        if key == "enabled" and not isinstance(value, bool):
            raise ValueError(f"tempo.enabled is {value!r}; it must be true or false")
    checked = dict(block)
    for key in {BUDGET, HOST_MEMORY} & checked.keys():
        checked[key] = _read_size(key, checked[key])
    if OFFLOAD in checked:
        check_offload("tempo.", checked[OFFLOAD])
    if "layers" in checked:
        checked["layers"] = freeze_layers(checked["layers"])
    return checked


def _read_size(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f'tempo.{key} is {value!r}; expected a size such as "72GiB", or a number of bytes')
    try:
        return parse_memory(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"tempo.{key}: {error}") from error

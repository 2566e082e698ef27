"""Values of single layers in a "tempo" block: `"layers": {"0-11": {"activation": "recompute"}, "12": {"norm": "off"}}`.

A key is a layer or a range of layers: "12", "0-11" (with both ends), "20-" (to the last layer). Layers are numbered
from 0 over the whole model, across all pipeline stages, as in checkpoint keys: `decoder.layers.0`. In a model of two
stacks (T5) a key applies to both unless it begins with "encoder " or "decoder ". BERT's layers are an encoder's, GPT's
a decoder's.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from tempo_megatron.settings.operations import CHOICES, OPERATIONS, check_offload, check_value

LAYER_OPERATIONS = tuple(operation.name for operation in OPERATIONS.values() if operation.slots)
"""The operations that a layer has; the loss head belongs to the model."""

OFFLOAD = "offload"
"""The key that says which of the tensors that a layer keeps go to the host, whatever its operations keep."""

_KEYS_OF_LAYER = (*LAYER_OPERATIONS, OFFLOAD)

_KEY = re.compile(r"(?:(encoder|decoder) )?(\d+)(?:(-)(\d+)?)?")


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers from `first` to `last`, both included."""

    first: int
    last: int | None
    """None means the last layer of the stack."""

    stack: str | None
    """"encoder" or "decoder"; None means both."""

    def holds(self, layer: int, stack: str) -> bool:
        """Whether a layer, counted from 0, belongs to the range."""
        return self.is_of(stack) and self.first <= layer and (self.last is None or layer <= self.last)

    def is_of(self, stack: str) -> bool:
        """Whether the range applies to a stack."""
        return self.stack in (None, stack)

    def find_shared(self, other: LayerRange) -> int | None:
        """The first layer that belongs to both ranges; None where there is none."""
        if None not in (self.stack, other.stack) and self.stack != other.stack:
            return None
        first = max(self.first, other.first)
        is_shared = all(each.last is None or first <= each.last for each in (self, other))
        return first if is_shared else None

    def __str__(self) -> str:
        """The key: `12`, `0-11`, `encoder 20-`."""
        end = "-" if self.last is None else "" if self.last == self.first else f"-{self.last}"
        return f"{self.stack} {self.first}{end}" if self.stack else f"{self.first}{end}"


class FrozenDict(dict[str, Any]):
    """A dict that can be hashed but not changed; json, copy, pickle and dataclasses.asdict take it as a plain dict."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the layers of a TempoConfig cannot be changed; make another with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = cast("Any", _refuse)


def freeze_layers(layers: object) -> FrozenDict:
    """`layers` of a "tempo" block, checked, sorted by layer, with keys in one spelling.

    Raises ValueError where a key is not a range of layers, two ranges share a layer, or a value is unknown.
    """
    if not isinstance(layers, Mapping):
        raise ValueError(
            f"tempo.layers is {layers!r}; expected ranges of layers with their values, such as "
            '{"0-11": {"activation": "recompute"}}'
        )
    found = {read_range(key): _check_values(key, values) for key, values in layers.items()}
    ranges = sorted(found, key=lambda each: (each.first, each.stack or ""))
    for one, other in itertools.combinations(ranges, 2):
        if (shared := one.find_shared(other)) is not None:
            raise ValueError(
                f"tempo.layers{write_key(one)} and tempo.layers{write_key(other)} both hold layer {shared}; expected "
                "each layer in one range at most; shorten one of them"
            )
    if len(found) < len(layers):
        raise ValueError("tempo.layers names a range twice, in two spellings; leave one out")
    return FrozenDict({str(each): found[each] for each in ranges})


def write_key(layers: LayerRange | str) -> str:
    """`["0-11"]`, as a message names a range."""
    return f'["{layers}"]'


def write_layers(layers: Sequence[int]) -> str:
    """`0-2,5` of ascending numbers."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def read_layers(written: str) -> list[int]:
    """The numbers that `write_layers` wrote."""
    ends = [[int(end) for end in span.split("-")] for span in written.split(",")]
    return [layer for span in ends for layer in range(span[0], span[-1] + 1)]


def read_range(key: object) -> LayerRange:
    """The layers that a key of `"layers"` names.

    Raises ValueError where it names none.
    """
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        raise ValueError(
            f"tempo.layers has the key {key!r}; expected a layer or a range of layers, counted from 0, such as "
            '"12", "0-11" or "20-", in a T5 perhaps after "encoder " or "decoder "'
        )
    stack, first, dash, last = match.groups()
    end = None if dash and last is None else int(last or first)
    if end is not None and end < int(first):
        raise ValueError(f'tempo.layers["{key}"] ends before it begins; write the smaller number first')
    return LayerRange(int(first), end, stack)


def _check_values(key: object, values: object) -> FrozenDict:
    where = f"tempo.layers{write_key(str(key))}"
    if not isinstance(values, Mapping):
        raise ValueError(f'{where} is {values!r}; expected a block such as {{"activation": "recompute"}}')
    for name, value in values.items():
        if name == "enabled":
            raise ValueError(f'{where}.enabled is given; expected operations; set each one to "off" in these layers')
        if name in CHOICES and name not in LAYER_OPERATIONS:
            raise ValueError(
                f"{where}.{name} is given; expected what a layer has, {', '.join(_KEYS_OF_LAYER)}; set tempo.{name}"
            )
        check_value(f"{where}.", name, value, _KEYS_OF_LAYER)
        if name == OFFLOAD:
            check_offload(f"{where}.", value)
    return FrozenDict({name: values[name] for name in _KEYS_OF_LAYER if name in values})

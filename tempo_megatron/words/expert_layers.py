"""Reads which layers have experts, as Megatron-LM's --moe-layer-freq says it."""

from __future__ import annotations

import re
from typing import Any


def parse_layer_frequency(frequency: Any, num_layers: int) -> tuple[bool, ...]:
    """Every n-th layer from the first, or a list such as ([0]*1+[1]*15), as Megatron-LM's arguments.py reads it.

    Raises ValueError where it is neither.
    """
    text = str(frequency)
    if text.isdecimal() and int(text):
        return tuple(layer % int(text) == 0 for layer in range(num_layers))
    found: list[bool] = []
    for part in re.sub(r"[()\s]", "", text).split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d+))?", part)
        if match is None:
            raise ValueError(f"--moe-layer-freq is {frequency}; expected a number, or lists such as ([0]*1+[1]*15)")
        found += [number == "1" for number in match[1].split(",")] * int(match[2] or 1)
    if len(found) != num_layers:
        raise ValueError(f"--moe-layer-freq {frequency} names {len(found)} layers, and there are {num_layers}")
    return tuple(found)

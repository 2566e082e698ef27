"""Sizes of memory as people write them: 80GiB, 512 MB."""

from __future__ import annotations

import argparse
import re

_UNITS = {"b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([a-z]*)")
# No GPU and no budget is smaller: "80" without a unit is a slip.
_LEAST = 1 << 20


def parse_memory(text: str) -> int:
    """Bytes of `80GiB`, `80 GB` (10**9), `80G` (2**30), or of a number of bytes such as `72e9`, for argparse."""
    match = _SIZE.fullmatch(text.strip().lower())
    unit = match[2] if match else ""
    number = float(match[1]) if match else 0.0
    if match is None or (unit and unit not in _UNITS) or not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no size of memory; give one such as 80GiB, 80GB or 72e9")
    if not unit and number < _LEAST:
        raise argparse.ArgumentTypeError(
            f"{text!r} without a unit is in bytes; write {text.strip()}GiB or {text.strip()}MiB"
        )
    return int(number * _UNITS.get(unit, 1) + 0.5)


def format_bytes(num_bytes: int) -> str:
    """`79.25 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB"

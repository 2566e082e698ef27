"""Sizes of memory as people write them: 80GiB, 512 MB."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def parse_memory(text: str) -> int:
    """Bytes of `80GiB`, `80 GB` (10**9), `80G` (2**30) or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of memory; give one such as 80GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(num_bytes: int) -> str:
    """`79.25 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB"

"""Parses words of a command line, sizes of memory such as 80GiB too; an unreadable word is a one-sentence error."""

from __future__ import annotations

import argparse
import errno
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_Number = TypeVar("_Number", int, float)

_LARGEST = 10**12
"""No size of a run exceeds it, and products of larger sizes would not fit into 64 bits."""


def parse_whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_shorten(text)} is not a whole number") from None
    if abs(value) > _LARGEST:
        raise argparse.ArgumentTypeError(f"{_shorten(text)} is beyond {_LARGEST}, the largest number that is taken")
    return value


def parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def _restrict(
    parse: Callable[[str], _Number], is_allowed: Callable[[_Number], bool], complaint: str
) -> Callable[[str], _Number]:
    """`parse`, which refuses `TEXT complaint` where the number is not allowed."""

    def parse_allowed(text: str) -> _Number:
        if not is_allowed(value := parse(text)):
            raise argparse.ArgumentTypeError(f"{text} {complaint}")
        return value

    return parse_allowed


parse_positive = _restrict(parse_whole, lambda value: value >= 1, "is not at least 1")
parse_not_negative = _restrict(parse_whole, lambda value: value >= 0, "is negative")
parse_workers = _restrict(
    parse_not_negative, lambda value: value <= 1024, "is more than 1024 processes a rank; give a few"
)
parse_seed = _restrict(parse_not_negative, lambda value: value < 2**32, f"is not below {2**32}")  # numpy's seeds
parse_minutes = _restrict(parse_positive, lambda value: value <= 10**6, "is more than 1000000 minutes")
parse_positive_float = _restrict(parse_number, lambda value: 0.0 < value < math.inf, "is not a positive number")
parse_not_negative_float = _restrict(parse_number, lambda value: 0.0 <= value < math.inf, "is negative or not finite")
parse_fraction = _restrict(parse_number, lambda value: 0.0 <= value < 1.0, "is not in [0, 1)")
parse_probability = _restrict(parse_number, lambda value: 0.0 <= value <= 1.0, "is not in [0, 1]")
parse_mask_prob = _restrict(
    parse_probability,
    lambda value: 0.0 < value < 1.0,
    "leaves nothing to predict, or nothing to predict from; expected a share above 0 and below 1",
)
parse_share = _restrict(parse_number, lambda value: 0.0 < value <= 1.0, "is not in (0, 1]")
# With fewer than 5 seconds, a machine that is busy for a moment would count as lost.
parse_fault_timeout = _restrict(
    parse_not_negative_float,
    lambda value: value == 0 or 5.0 <= value <= 1e6,
    "is neither 0 nor from 5 to 1000000 seconds",
)


def parse_output(text: str) -> str:
    """Reads the path of a file that is written after the work; makes its folder and checks that it can be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written, the folder {path.parent} cannot be made ({error.strerror}); give another place"
        ) from None
    # Open it, because permissions do not tell on file systems such as /proc. Not a pipe, which would wait for a reader.
    existed = path.exists()
    try:
        if path.is_file() or not existed:
            path.open("ab").close()
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written ({error.strerror}); give another place") from None
    if not existed:
        path.unlink()
    return text


def parse_folder(text: str) -> str:
    """Reads the path of a folder, which need not exist."""
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} has a character of number 0; remove it")
    for part in (folder := Path(text), *folder.parents):
        if os.path.exists(part) and not os.path.isdir(part):
            raise argparse.ArgumentTypeError(f"{text}: {part} is a file; give a folder")
    if folder.resolve() == Path(folder.resolve().anchor):
        raise argparse.ArgumentTypeError(f"{text} is the root folder; give one of its own")
    return text


def parse_png(text: str) -> str:
    if Path(text).suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text} does not end in .png, which is what is drawn")
    return parse_output(text)


def parse_steps(text: str) -> tuple[int, int]:
    """`10-12`, or `10` for this step alone."""
    words = text.split("-")
    first, last = (parse_whole(word) for word in (words[0], words[-1]))
    if len(words) > 2 or not 1 <= first <= last:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps; give two such as 10-12, or one above 0")
    return first, last


def parse_window(text: str) -> tuple[int, int]:
    """`128,0` or, as Megatron-LM also takes it, `(128,0)`."""
    words = text.strip().removeprefix("(").removesuffix(")").split(",")
    if len(words) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no window; give two whole numbers such as 128,0")
    left, right = (parse_whole(word) for word in words)
    if min(left, right) < -1:
        raise argparse.ArgumentTypeError(f"{text!r} is no window; its numbers are -1, 0 or more")
    return left, right


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

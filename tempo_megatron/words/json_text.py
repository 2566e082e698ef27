"""Reads JSON that people write by hand: strictly, with one sentence for what is ambiguous or wrong."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn


def read_json(path: str | Path) -> Any:
    """Reads a JSON file. Raises OSError if it cannot be read, and parse_json's errors with the file's name."""
    content = Path(path).read_bytes()
    try:
        return parse_json(decode(content))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); correct it or give another file") from error


def read_object(path: str | Path) -> dict[str, Any]:
    """Reads a JSON file that must hold an object; raises ValueError if it holds anything else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text.

    Raises ValueError, without quoting the text, for invalid JSON, a name that appears twice in an object, a number that
    is not finite, and too deep nesting.
    """
    if not text.strip():
        raise ValueError("it is empty")
    try:
        return json.loads(
            text, object_pairs_hook=refuse_duplicates, parse_constant=_refuse_constant, parse_float=read_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def decode(content: bytes) -> str:
    """Decodes UTF-8, with or without a byte order mark; raises ValueError for other bytes."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no UTF-8") from None


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of names and values; raises ValueError if a name appears twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{min(name for name in found if names.count(name) > 1)} appears twice")
    return found


def find_near_name(key: str, names: Iterable[str]) -> str | None:
    """Returns the known name that `key` may stand for, ignoring case, or None.

    It accepts names with nearly the same letters, and names of which one begins or ends with all words of the other:
    `zero` stands for `zero_optimization`, and `tempo_config` for `tempo`.
    """
    word, known = key.lower(), list(names)
    if close := difflib.get_close_matches(word, known, n=1, cutoff=0.85):
        return close[0]
    parts = [name for name in known if _shares_an_end(word, name)]
    return next(iter(difflib.get_close_matches(word, parts, n=1, cutoff=0.0)), None)


def _shares_an_end(one: str, other: str) -> bool:
    short, long = sorted((one.replace("-", "_"), other), key=len)
    return bool(short) and (long.startswith(f"{short}_") or long.endswith(f"_{short}"))


def read_finite(text: str) -> float:
    """Reads a number with a point or an exponent; raises ValueError if a float cannot hold it."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is beyond the numbers that there are")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")

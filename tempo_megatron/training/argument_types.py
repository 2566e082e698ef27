"""Parsers for words of a command line; a word that cannot be read is one sentence."""

from __future__ import annotations

import argparse
import math


def parse_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def parse_positive(text: str) -> int:
    if (value := parse_whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def parse_not_negative(text: str) -> int:
    if (value := parse_whole(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def parse_positive_float(text: str) -> float:
    if not 0.0 < (value := parse_number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def parse_not_negative_float(text: str) -> float:
    if not 0.0 <= (value := parse_number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is negative or not finite")
    return value


def parse_fraction(text: str) -> float:
    if not 0.0 <= (value := parse_number(text)) < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


Blend = tuple[tuple[str, ...], tuple[float, ...] | None]
"""Prefixes of data sets, and their weights where there are several."""


def parse_blend(words: list[str]) -> Blend:
    """(prefixes, weights) of `--data-path PREFIX` or `--data-path WEIGHT PREFIX WEIGHT PREFIX ...`."""
    if len(words) == 1:
        return (words[0],), None
    if len(words) % 2:
        raise ValueError(f"--data-path has {len(words)} words; give one prefix, or pairs of a weight and a prefix")
    weights = []
    for word in words[0::2]:
        try:
            weight = float(word)
        except ValueError:
            raise ValueError(
                f"--data-path: {word!r} stands where a weight is expected; give WEIGHT PREFIX pairs"
            ) from None
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"--data-path: weight {word} is not positive; give positive weights")
        weights.append(weight)
    return tuple(words[1::2]), tuple(weights)


def parse_split(split: str) -> tuple[float, float, float]:
    """`969,30,1` -> the three fractions; missing ones are 0."""
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or any(not 0 <= weight < math.inf for weight in weights) or not weights[0]:
        raise ValueError(
            f"--split {split!r} is not understood; give up to three weights such as 969,30,1, train above 0"
        )
    total = sum(weights)
    train, valid, test = (weight / total for weight in [*weights, 0.0, 0.0][:3])
    return train, valid, test

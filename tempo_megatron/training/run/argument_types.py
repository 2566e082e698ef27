"""Parsers of what `--data-path` and `--split` say."""

from __future__ import annotations

import math

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
    if not math.isfinite(sum(weights)):
        raise ValueError(f"--data-path: the weights {' '.join(words[0::2])} have no finite sum; give smaller ones")
    return tuple(words[1::2]), tuple(weights)


def parse_split(split: str) -> tuple[float, float, float]:
    """`969,30,1` -> the three fractions; missing ones are 0."""
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    is_sound = 1 <= len(weights) <= 3 and min(weights) >= 0 and weights[0] > 0 and math.isfinite(sum(weights))
    if not is_sound:
        raise ValueError(
            f"--split {split!r} is not understood; give up to three weights such as 969,30,1, train above 0"
        )
    total = sum(weights)
    train, valid, test = (weight / total for weight in [*weights, 0.0, 0.0][:3])
    return train, valid, test

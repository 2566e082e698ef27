"""Parsers for words of a command line; a word that cannot be read is one sentence."""

from __future__ import annotations

import argparse


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


def parse_probability(text: str) -> float:
    if not 0.0 <= (value := parse_number(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1]")
    return value


def parse_share(text: str) -> float:
    if not 0.0 < (value := parse_number(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def parse_window(text: str) -> tuple[int, int]:
    """`128,0` or, as Megatron-LM also takes it, `(128,0)`."""
    words = text.strip().removeprefix("(").removesuffix(")").split(",")
    if len(words) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no window; give two whole numbers such as 128,0")
    left, right = (parse_whole(word) for word in words)
    if min(left, right) < -1:
        raise argparse.ArgumentTypeError(f"{text!r} is no window; its numbers are -1, 0 or more")
    return left, right

"""Numbers on a command line, and one sentence for what is not one."""

from __future__ import annotations

import argparse


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def positive(text: str) -> int:
    if (value := whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def not_negative(text: str) -> int:
    if (value := whole(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def positive_float(text: str) -> float:
    if not 0.0 < (value := number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def not_negative_float(text: str) -> float:
    if not 0.0 <= (value := number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is negative or not finite")
    return value


def fraction(text: str) -> float:
    if not 0.0 <= (value := number(text)) < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value

"""Lets the ranks agree on errors and values before one of them gives up."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class AgreedError(ValueError):
    """What every rank raises at once, with the same words: rank 0 says it, and none has failed by itself."""


def raise_on_all_ranks(sentence: str | None) -> None:
    """Raise AgreedError on every rank where some rank has a sentence, so that none waits for one that has ended.

    Every rank calls it, with None where nothing is wrong. The sentence is that of the lowest rank that has one.
    """
    sentences: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(sentences, sentence)
    if wrong := [text for text in sentences if text is not None]:
        raise AgreedError(wrong[0])


def differs_between_ranks(value: Any) -> bool:
    """Whether some rank has another value than this one; every rank calls it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return any(other != value for other in values)


def is_true_on_any_rank(value: bool) -> bool:
    """Whether `value` is true on at least one rank; every rank calls it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return any(values)

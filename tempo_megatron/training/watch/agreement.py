"""Lets the ranks meet in torch's store, and agree on errors and values before one of them gives up."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous


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


STORE = "tempo://"


def open_store(timeout_s: float) -> Any:
    """The store that all ranks share; init_method=STORE lets torch.distributed take it.

    Raises ValueError where rank 0's port is taken or rank 0 is not reached.
    """
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
    except dist.DistError as error:
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        if "EADDRINUSE" in str(error):
            raise ValueError(
                f"port {port} is in use by another run; give the launcher another --master_port"
            ) from error
        text = str(error).strip().splitlines()[0]
        raise ValueError(
            f"rank 0 at {address}:{port} was not reached ({text}); check that it runs and that no firewall is between"
        ) from error
    # torchrun's own store outlives the ranks that it starts again.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt_{attempt}", store)  # type: ignore[attr-defined]
    register_rendezvous_handler("tempo", lambda url, **_: iter([(store, rank, world_size)]))
    return store

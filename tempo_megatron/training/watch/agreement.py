"""Lets the ranks meet in torch's store, exchange values, and raise errors together."""

from __future__ import annotations

import datetime
import os
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

_T = TypeVar("_T")


class AgreedError(ValueError):
    """An error that every rank raises at once, in the same words; only rank 0 prints it."""


def gather(value: _T) -> list[_T]:
    """Returns the values of all ranks, in order; every rank calls it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_on_all_ranks(sentence: str | None) -> None:
    """Raises AgreedError on every rank if some rank has a sentence, so that none waits for one that has ended.

    Every rank calls it, with None if nothing is wrong. The lowest rank's sentence counts.
    """
    if wrong := [text for text in gather(sentence) if text is not None]:
        raise AgreedError(wrong[0])


STORE = "tempo://"


def open_store(timeout_s: float) -> Any:
    """Opens the store that all ranks share; torch.distributed uses it with init_method=STORE.

    Raises ValueError if rank 0's port is in use or rank 0 cannot be reached.
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
    store = _name_attempt(store)
    register_rendezvous_handler("tempo", lambda url, **_: iter([(store, rank, world_size)]))
    return store


def connect_again(timeout_s: float) -> Any:
    """Opens another connection to the store, for a thread: a call that waits keeps its connection to itself."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    how: Any = {"is_master": False, "wait_for_workers": False, "timeout": datetime.timedelta(seconds=timeout_s)}
    return _name_attempt(dist.TCPStore(address, port, **how))  # type: ignore[attr-defined]


def _name_attempt(store: Any) -> Any:
    # torchrun's store outlives the ranks: it starts them again with the same one.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}", store)  # type: ignore[attr-defined]

"""torch's store, in which the ranks meet before there is a process group."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

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

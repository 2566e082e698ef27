"""Refuses the lock that a killed build of one of DeepSpeed's operations has left: torch would wait for it for ever."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

_STALE_SECONDS = 600.0  # no build takes that long


def refuse_stale_locks() -> None:
    """Raises ValueError if a lock of torch's extensions is too old for a build that still runs."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        try:
            age = time.time() - lock.stat().st_mtime
        except OSError:
            continue  # the build has just ended
        if age > _STALE_SECONDS:
            raise ValueError(
                f"{lock} has been there for {age / 60:.0f} minutes: a build that was killed has left it; remove it and "
                "start again"
            )

"""A lock that a killed build has left is named before a run waits for it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tempo_megatron.training.engine import refuse_stale_locks


@pytest.mark.parametrize("place", ["cpu_adam", "py311_cpu/cpu_adam"])
def test_an_old_lock_is_named_and_a_young_one_is_a_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    refuse_stale_locks()
    lock = tmp_path / place / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    refuse_stale_locks()
    os.utime(lock, (time.time() - 7200,) * 2)
    with pytest.raises(ValueError, match=f"{lock} has been there for 120 minutes: .* remove it"):
        refuse_stale_locks()

"""Whether a run that waits for a build waits for somebody."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from tempo_megatron.training.watch import build_locks
from tempo_megatron.training.watch.build_locks import StaleLockError, find_holders, refuse_stale_locks


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_locks, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(build_locks, "_PATIENCE_SECONDS", 0.0)


def make_lock(folder: Path, age: float) -> str:
    path = folder / "lock"
    path.touch()
    os.utime(path, (time.time() - age, time.time() - age))
    return str(path)


def test_a_lock_of_a_killed_build_is_named_whatever_deepspeed_makes_of_it(tmp_path: Path) -> None:
    path = make_lock(tmp_path, 7200)
    original = FileBaton.wait
    sentence = f"{path} has been there for 120 minutes and no process.*remove it and start again"
    with pytest.raises(StaleLockError, match=sentence), refuse_stale_locks():
        try:
            FileBaton(path).wait()
        except Exception as error:
            raise RuntimeError("requires the cpu_adam op, which failed to build/load") from error
    assert FileBaton.wait is original and os.path.exists(path)


def test_a_lock_that_a_process_holds_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_lock(tmp_path, 7200)
    with open(path) as held, refuse_stale_locks():
        assert find_holders(path) == [os.getpid()]
        threading.Timer(3.0, os.remove, [path]).start()
        FileBaton(path).wait()
        assert not held.closed
    assert capsys.readouterr().err.count(f"waiting until {path} is gone (process {os.getpid()} builds there)") == 1


def test_a_young_lock_may_be_another_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_lock(tmp_path, 60)
    threading.Timer(3.0, os.remove, [path]).start()
    with refuse_stale_locks():
        FileBaton(path).wait()
    assert "no process of this machine holds it" in capsys.readouterr().err


def test_a_young_lock_that_nobody_touches_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_locks, "_QUIET_SECONDS", 1.0)
    path = make_lock(tmp_path, 0)
    with refuse_stale_locks(), pytest.raises(StaleLockError, match=f"{path} has been there for 1 s and no process of"):
        FileBaton(path).wait()


def test_a_lock_that_is_touched_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_locks, "_QUIET_SECONDS", 0.3)
    times = itertools.count(time.time())
    monkeypatch.setattr(build_locks, "_find_time", lambda path: next(times))
    path = make_lock(tmp_path, 0)
    threading.Timer(1.0, os.remove, [path]).start()
    with refuse_stale_locks():
        FileBaton(path).wait()


def test_a_build_touches_its_lock_until_it_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_locks, "_TOUCH_SECONDS", 0.05)
    path, threads = tmp_path / "lock", threading.active_count()
    builder = FileBaton(str(path))
    with refuse_stale_locks():
        assert builder.try_acquire() and not FileBaton(str(path)).try_acquire()
    os.utime(path, (0, 0))
    wait_until(lambda: path.stat().st_mtime > 0)
    builder.release()
    wait_until(lambda: threading.active_count() == threads)
    assert not path.exists()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

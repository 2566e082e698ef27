"""Shows how far data preparation is: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Progress of `what`, some of `total_bytes` done at each update(); for a with block.

    The lines come from a thread of their own, so that they also come while one call takes minutes.
    """

    def __init__(self, prog: str, what: str, total_bytes: int):
        self._prog, self._what, self._total = prog, what, total_bytes
        self._done = 0
        self._phase = ""
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._bar: tqdm | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._bar = tqdm(total=self._total, unit="B", unit_scale=True, desc=self._what)
        self._thread = threading.Thread(target=self._report, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._bar is not None:
            self._bar.n = self._done
            self._bar.close()

    def update(self, num_bytes: int) -> None:
        self._done = min(self._done + num_bytes, self._total)

    def begin_unmeasured(self, phase: str) -> None:
        """All is read; what follows, `phase`, takes time that nobody can foretell."""
        self._phase = phase

    def format_line(self, seconds: float) -> str:
        """The line of a log, `seconds` after the beginning."""
        begin = f"{self._prog}: {self._what}: "
        if self._phase:
            return f"{begin}{self._phase}, {seconds:.0f} s so far"
        done = f"{self._done / 1e6:.1f} of {self._total / 1e6:.1f} MB"
        if self._done == 0:
            return f"{begin}{done}, {seconds:.0f} s so far"
        rate = self._done / seconds
        return f"{begin}{done}, {rate / 1e6:.2f} MB/s, {(self._total - self._done) / rate:.0f} s left"

    def _report(self) -> None:
        if self._bar is None:
            while not self._ended.wait(_SECONDS_BETWEEN_LINES):
                print(self.format_line(time.monotonic() - self._started), file=sys.stderr, flush=True)
            return
        while not self._ended.wait(0.2):
            self._bar.set_description(f"{self._what}, {self._phase}" if self._phase else self._what, refresh=False)
            self._bar.n = self._done
            self._bar.refresh()

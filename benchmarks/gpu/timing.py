"""Milliseconds on the device, microseconds on the host: implementations in turn, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

WARM_UP_MS, MEASURED_MS = 20.0, 100.0
MIN_SETS, MAX_SETS = 3, 7
MAX_WARM_UPS = 1000


class Pass(NamedTuple):
    """One call with each set of inputs, one after the other."""

    name: str
    run: Callable[[], object]
    calls: int


class HostClock:
    """For devices that compute while the host waits."""

    waits: frozenset[str] = frozenset()

    def ms(self, one: Pass) -> float:
        """Milliseconds per call."""
        start = time.perf_counter()
        one.run()
        return 1e3 * (time.perf_counter() - start) / one.calls


class CudaClock:
    """Times a pass that was queued whole before the GPU begins it, so that no launch is waited for."""

    SLEEP_CYCLES_PER_MS = 2e6
    MAX_LEAD_MS = 200.0

    def __init__(self) -> None:
        self.lead_ms = 1.0
        self.waits: set[str] = set()
        """Names of passes for which the host waits, so that their times hold some of its own."""

    def ms(self, one: Pass) -> float:
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(self.lead_ms * self.SLEEP_CYCLES_PER_MS))
            start.record()
            kept = one.run()
            end.record()
            is_queued = not start.query()
            end.synchronize()
            del kept
            if is_queued or one.name in self.waits:
                return start.elapsed_time(end) / one.calls
            if self.lead_ms * 2 > self.MAX_LEAD_MS:
                self.waits.add(one.name)
                self.lead_ms = 1.0
            else:
                self.lead_ms *= 2


class Measured(NamedTuple):
    ms: float
    """Median milliseconds per call."""
    spread: float
    """Half of the samples are this close together, relative to the median: smaller differences are noise."""


def measure(passes: Sequence[Pass], clock: Any) -> dict[str, Measured]:
    """Of each pass, in turn, until each was measured for MEASURED_MS."""
    for one in passes:
        spent = 0.0
        # The first passes compile, allocate and find out how far ahead the host has to be.
        for number in range(MAX_WARM_UPS):
            took = clock.ms(one) * one.calls
            spent += took if number >= 2 else 0.0
            if spent >= WARM_UP_MS:
                break
    samples: dict[str, list[float]] = {one.name: [] for one in passes}
    while any(sum(samples[one.name]) * one.calls < MEASURED_MS for one in passes):
        for one in passes:
            samples[one.name].append(clock.ms(one))
    return {name: _summary(found) for name, found in samples.items()}


def _summary(samples: Sequence[float]) -> Measured:
    median = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (median,) * 3
    return Measured(median, (high - low) / median)


def count_sets(num_bytes: int, device: str) -> int:
    """So many sets of inputs that none is in the L2 cache when its turn comes again."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 0
    return max(MIN_SETS, min(MAX_SETS, -(-4 * l2_bytes // max(1, num_bytes))))


def copy_pass(num_bytes: int, sets: int, device: torch.device | str, name: str = "copy") -> Pass:
    """The device's own copy, moving num_bytes: half of them read, half written."""
    sources = [torch.randint(256, (num_bytes // 2,), dtype=torch.uint8, device=device) for _ in range(sets)]
    targets = [torch.empty_like(source) for source in sources]

    def run() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    return Pass(name, run, sets)

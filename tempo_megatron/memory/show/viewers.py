"""Writes a step's memory in the formats of existing viewers: Perfetto's, and that of torch's memory snapshots."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from tempo_megatron.memory.rank.allocator import ROUNDING_BYTES, round_up
from tempo_megatron.memory.show.timeline import Timeline

_FIRST_ADDRESS = 0x7F0000000000


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a Chrome trace, which ui.perfetto.dev and chrome://tracing open: bytes alive by category, and the phases.

    A microsecond of the trace is an event of the timeline: there is no time in it.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": timeline.title}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "phase"}},
    ]
    ends = [*(event for event, _ in timeline.marks[1:]), len(timeline.on_host)]
    for (begin, name), end in zip(timeline.marks, ends, strict=False):
        events.append({"ph": "X", "name": name, "pid": 0, "tid": 0, "ts": begin, "dur": max(1, end - begin)})
    peak = {"ph": "i", "name": f"peak: {timeline.moment}", "pid": 0, "tid": 0, "ts": timeline.peak_event, "s": "p"}
    events.append(peak)
    before: dict[str, int] = {}
    for event, sizes in enumerate(zip(*map(np.ndarray.tolist, timeline.levels.values()), strict=True)):
        now = dict(zip(timeline.levels, sizes, strict=True))
        if now != before:
            events.append({"ph": "C", "name": "bytes alive", "pid": 0, "ts": event, "args": now})
            before = now
    if timeline.host_peak_bytes:
        events += [
            {"ph": "C", "name": "bytes on the host", "pid": 0, "ts": event, "args": {"on the host": num_bytes}}
            for event, num_bytes in enumerate(timeline.on_host.tolist())
        ]
    _write(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}).encode())


def write_snapshot(timeline: Timeline, path: str | Path) -> None:
    """Write a pickle in the format of torch.cuda.memory._snapshot, which pytorch.org/memory_viz opens.

    Each storage has a block, whose frame names its category and what made it, at an address that no other one has: the
    tape knows of no allocator. What was there before the step is in a segment without an event.
    """
    storages = sorted((each for each in timeline.storages if each.num_bytes), key=lambda each: each.start)
    sizes = (round_up(each.num_bytes, ROUNDING_BYTES) for each in storages)
    addresses = itertools.accumulate(sizes, initial=_FIRST_ADDRESS)
    events: list[tuple[int, int, dict[str, Any]]] = []
    segments = []
    for lived, address in zip(storages, addresses, strict=False):
        frames = [{"name": lived.made_by, "filename": lived.category, "line": 0}]
        found = {"addr": address, "size": lived.num_bytes, "stream": 0, "frames": frames}
        if lived.start >= 0:
            events.append((lived.start, 1, found | {"action": "alloc"}))
        if lived.end is None:
            segments.append(_make_segment(lived.num_bytes, address, frames))
        else:
            # What an operation frees is freed before the next one makes anything.
            events += [(lived.end, 0, found | {"action": action}) for action in ("free_requested", "free_completed")]
    events.sort(key=lambda each: each[:2])
    trace = [found | {"time_us": event} for event, _, found in events]
    content = {"segments": segments, "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}
    _write(path, pickle.dumps(content))


def _make_segment(num_bytes: int, address: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    size = round_up(num_bytes, ROUNDING_BYTES)
    block = {"address": address, "size": size, "requested_size": num_bytes, "state": "active_allocated"}
    return {
        "device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "allocated_size": size, "active_size": size,
        "requested_size": num_bytes, "blocks": [block | {"frames": frames}],
    }  # fmt: skip


def _write(path: str | Path, content: bytes) -> None:
    unfinished = Path(f"{path}.tmp")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_bytes(content)
    os.replace(unfinished, path)

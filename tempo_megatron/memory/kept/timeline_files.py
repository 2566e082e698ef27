"""Writes a step's memory in the formats of existing viewers: Perfetto's, and that of torch's memory snapshots."""

from __future__ import annotations

import bisect
import json
import os
import pickle
from pathlib import Path
from typing import Any

from tempo_megatron.memory.kept.timeline import LivedStorage, Timeline

_ALIGNMENT = 512  # of torch's caching allocator
_FIRST_ADDRESS = 0x7F0000000000


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a Chrome trace, which ui.perfetto.dev and chrome://tracing open: bytes alive by category, and the phases.

    A microsecond of the trace is an event of the timeline: there is no time in it.
    """
    levels = {name: level.tolist() for name, level in timeline.levels.items()}
    num_events = len(next(iter(levels.values()), []))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": timeline.title}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "phase"}},
    ]
    ends = [*(event for event, _ in timeline.marks[1:]), num_events]
    for (begin, name), end in zip(timeline.marks, ends, strict=False):
        events.append({"ph": "X", "name": name, "pid": 0, "tid": 0, "ts": begin, "dur": max(1, end - begin)})
    peak = {"ph": "i", "name": f"peak: {timeline.moment}", "pid": 0, "tid": 0, "ts": timeline.peak_event, "s": "p"}
    events.append(peak)
    before: dict[str, int] = {}
    for event in range(num_events):
        now = {name: level[event] for name, level in levels.items()}
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

    Each storage has a block, whose frame names its category and what made it. Addresses are those of a first fit, not
    of a GPU's allocator. What was there before the step is in the segment without an event.
    """
    events: list[tuple[int, int, LivedStorage]] = []
    for lived in timeline.storages:
        events.append((lived.start, 1, lived))
        if lived.end is not None:
            events.append((lived.end, 0, lived))
    # What a step's event frees is freed before the next one makes anything.
    events.sort(key=lambda each: each[:2])
    heap = _Heap()
    addresses: dict[int, int] = {}
    trace = []
    standing = [
        (heap.take(num_bytes), num_bytes, _describe_frames(kind, "there before the step"))
        for kind, num_bytes in timeline.standing.items()
        if num_bytes
    ]
    for event, is_made, lived in events:
        if is_made:
            addresses[id(lived)] = heap.take(lived.num_bytes)
        else:
            heap.give_back(addresses[id(lived)], lived.num_bytes)
        found = {
            "addr": addresses[id(lived)],
            "size": lived.num_bytes,
            "stream": 0,
            "time_us": event,
            "frames": _describe_frames(lived.category, lived.made_by),
        }
        trace += [
            found | {"action": action} for action in (("alloc",) if is_made else ("free_requested", "free_completed"))
        ]
    left = [
        (addresses[id(lived)], lived.num_bytes, _describe_frames(lived.category, lived.made_by))
        for lived in timeline.storages
        if lived.end is None
    ]
    blocks: list[dict[str, Any]] = []
    end = _FIRST_ADDRESS
    for address, num_bytes, frames in sorted([*standing, *left], key=lambda each: each[0]):
        if address > end:
            blocks.append(
                {"address": end, "size": address - end, "requested_size": 0, "state": "inactive", "frames": []}
            )
        size = _round_up(num_bytes)
        block = {"address": address, "size": size, "requested_size": num_bytes, "state": "active_allocated"}
        blocks.append(block | {"frames": frames})
        end = address + size
    if heap.highest > end:
        blocks.append(
            {"address": end, "size": heap.highest - end, "requested_size": 0, "state": "inactive", "frames": []}
        )
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    segment = {
        "device": 0, "address": _FIRST_ADDRESS, "total_size": heap.highest - _FIRST_ADDRESS, "stream": 0,
        "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
        "allocated_size": active, "active_size": active,
        "requested_size": sum(block["requested_size"] for block in blocks), "blocks": blocks,
    }  # fmt: skip
    content = {"segments": [segment], "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}
    _write(path, pickle.dumps(content))


class _Heap:
    """Addresses by first fit: the lowest free range that is large enough, else above all others."""

    def __init__(self) -> None:
        self.highest = _FIRST_ADDRESS
        self._free: list[tuple[int, int]] = []  # (address, bytes), by address, none beside another

    def take(self, num_bytes: int) -> int:
        size = _round_up(num_bytes)
        for place, (address, free) in enumerate(self._free):
            if free >= size:
                self._free[place : place + 1] = [(address + size, free - size)] if free > size else []
                return address
        address = self.highest
        self.highest += size
        return address

    def give_back(self, address: int, num_bytes: int) -> None:
        size = _round_up(num_bytes)
        place = bisect.bisect_left(self._free, (address, 0))
        if place < len(self._free) and self._free[place][0] == address + size:
            size += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == address:
            address, before = self._free.pop(place - 1)
            size, place = size + before, place - 1
        self._free.insert(place, (address, size))


def _round_up(num_bytes: int) -> int:
    return max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT


def _describe_frames(category: str, made_by: str) -> list[dict[str, Any]]:
    return [{"name": made_by or category, "filename": category, "line": 0}]


def _write(path: str | Path, content: bytes) -> None:
    """In one step."""
    unfinished = Path(f"{path}.tmp")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_bytes(content)
    os.replace(unfinished, path)

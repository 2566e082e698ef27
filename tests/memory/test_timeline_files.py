"""A step's memory in the formats of others' viewers says what the timeline says."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from torch.cuda import _memory_viz

from tempo_megatron import TempoConfig
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.show.timeline import Timeline, simulate_timeline
from tempo_megatron.memory.show.viewers import write_snapshot, write_trace
from tempo_megatron.models.shape import make_shape


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    sizes = {"family": "gpt", "num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
    shape = make_shape(**sizes, max_position_embeddings=32, vocab_size=512)
    return simulate_timeline(Run(model=shape, tempo=TempoConfig()), title="small")


def test_a_trace_has_every_level_and_the_phases(timeline: Timeline, tmp_path: Path) -> None:
    write_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counters = {event["ts"]: sum(event["args"].values()) for event in events if event["ph"] == "C"}
    total = np.sum(list(timeline.levels.values()), axis=0)
    assert all(total[event] == num_bytes for event, num_bytes in counters.items())
    assert max(counters.values()) == timeline.peak_bytes
    phases = [(event["name"], event["ts"]) for event in events if event["ph"] == "X"]
    assert phases == [(name, event) for event, name in timeline.marks] and phases


def test_torch_reads_the_snapshot_whose_blocks_never_overlap(timeline: Timeline, tmp_path: Path) -> None:
    """Played back, its events reach the timeline's peak, and end with the blocks that its segments have."""
    write_snapshot(timeline, tmp_path / "folder" / "step.pickle")
    snapshot = pickle.loads((tmp_path / "folder" / "step.pickle").read_bytes())
    assert _memory_viz.segsum(snapshot) and _memory_viz.trace(snapshot)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    [trace], there = snapshot["device_traces"], sum(each.num_bytes for each in timeline.storages if each.start < 0)
    assert there > 0
    alive: dict[int, int] = {}
    most = there
    for event in trace:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"]
            most = max(most, there + sum(alive.values()))
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"]) == event["size"]
    assert most == timeline.peak_bytes
    left = {block["address"]: block["requested_size"] for block in blocks}
    assert alive.items() < left.items() and sum(left.values()) == there + sum(alive.values())
    made = {event["addr"]: event["size"] for event in trace} | left
    assert all(low + made[low] <= high for low, high in itertools.pairwise(sorted(made)))
    assert {frame["filename"] for block in blocks for frame in block["frames"]} >= {"weights", "gradients"}

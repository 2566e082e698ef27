"""The timeline of a step against Follower, of a large model on fake tensors, and in the formats of others' viewers."""

from __future__ import annotations

import itertools
import json
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from peak_cases import AUTO, Step, build, find_loss
from torch.cuda import _memory_viz

from tempo_megatron import TempoConfig, use_cpu
from tempo_megatron.cli import main
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.show.timeline import LOSS_HEAD, OTHERS, WEIGHTS, Timeline, read_timeline, simulate_timeline
from tempo_megatron.memory.show.viewers import write_snapshot, write_trace
from tempo_megatron.memory.tape.follower import Follower, count_storage_bytes
from tempo_megatron.memory.tape.scopes import Scopes
from tempo_megatron.models.shape import make_shape
from tempo_megatron.slots import dropout_rng

FOLDER = Path(__file__).parents[2] / "configs" / "model"


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(("family", "recompute"), [("llama", ()), ("bert", ("full",))])
def test_the_peak_is_that_of_peak_bytes(family: str, recompute: tuple[str, ...]) -> None:
    use_cpu()
    with torch.compiler.set_stance("force_eager"), simulate_layout(1):
        model_parallel_cuda_manual_seed(1)
        model, make_batch = build(Step(family, False, AUTO, torch.float32, recompute=recompute))
        inputs, mask = make_batch()

        def step() -> None:
            dropout_rng.set_micro_batch(5, 0)
            model.zero_grad()
            find_loss(model, inputs, mask).backward()

        step()
        model.zero_grad()
        micro_batch = [t for t in (*inputs.values(), mask) if t is not None]
        with Follower(*model.parameters(), *model.buffers(), *micro_batch) as seen:
            step()
        model.zero_grad()
        with Follower(*model.parameters(), *model.buffers(), scopes=Scopes(model)) as followed:
            step()
    weights = count_storage_bytes(model.parameters())
    found = read_timeline(followed.tape, {WEIGHTS: weights}, activation="gelu", title="a step")
    assert 0 <= found.peak_bytes - weights - seen.peak <= count_storage_bytes(micro_batch)
    assert found.peak_bytes == max(map(sum, zip(*found.levels.values(), strict=True)))
    gradients = count_storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
    assert LOSS_HEAD in found.levels and found.levels["gradients"][-1] == gradients
    phases = {each.operation.partition(" of ")[0] for each in found.at_peak}
    assert "forward" in phases


def test_a_literals_tensor_is_made_in_the_step_and_what_is_only_viewed_was_there_before() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1)[:3] * torch.tensor([1.0, 2.0, 3.0])

    model, x = torch.nn.Sequential(Module()), torch.ones(2, 8)
    with Follower(scopes=Scopes(model)) as followed:
        y = model(x)
    assert y.tolist() == [1.0, 2.0, 3.0]
    viewed, literal, product = followed.tape.storages
    assert (viewed.born, viewed.phase, viewed.num_bytes) == (0, "", 64)
    assert (literal.phase, literal.operation, literal.num_bytes) == ("forward", "0", 12)
    # The product's factor goes with the forward; x and y stay.
    assert literal.born < product.born < literal.freed == followed.tape.num_steps + 1
    assert viewed.freed is product.freed is None
    lived = read_timeline(followed.tape, {}, activation="gelu", title="").storages
    assert [each.category == OTHERS for each in lived] == [True, False, False]


@pytest.mark.slow
def test_a_large_model_is_followed_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, png = time.process_time(), tmp_path / "timeline.png"
    assert main(["ledger", "--model", str(FOLDER / "gpt2_345m.json"), "--timeline", str(png)]) == 0
    assert png.stat().st_size > 20_000 and time.process_time() - start < 60
    text = capsys.readouterr().out
    assert "memory at the peak of one step (backward of" in text and "backward of linear_fc2" in text


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

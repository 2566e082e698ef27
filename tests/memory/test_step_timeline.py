"""The timeline of a step against PeakBytes, and of a large model on fake tensors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from covering import parametrize_covering
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from peak_cases import AUTO, Step, build, find_loss

from tempo_megatron import use_cpu
from tempo_megatron.cli import main
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.kept.timeline import LOSS_HEAD, WEIGHTS, StepTimeline
from tempo_megatron.memory.storages import PeakBytes, count_storage_bytes, find_storages
from tempo_megatron.slots import dropout_rng

FOLDER = Path(__file__).parents[2] / "configs" / "model"


@pytest.mark.usefixtures("without_compiler")
@parametrize_covering(each={"family": ["gpt", "llama", "bert"], "recompute": [(), ("full",)]})
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
        with PeakBytes(*model.parameters(), *model.buffers(), *micro_batch) as seen:
            step()
        model.zero_grad()
        with StepTimeline([model], {WEIGHTS: find_storages(model.parameters())}) as timeline:
            step()
    found = timeline.finish("a step")
    weights = count_storage_bytes(model.parameters())
    assert 0 <= found.peak_bytes - weights - seen.peak <= count_storage_bytes(micro_batch)
    assert found.peak_bytes == max(map(sum, zip(*found.levels.values(), strict=True)))
    gradients = count_storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
    assert LOSS_HEAD in found.levels and found.levels["gradients"][-1] == gradients
    phases = {each.operation.partition(" of ")[0] for each in found.at_peak}
    assert "forward" in phases


@pytest.mark.slow
def test_a_large_model_is_followed_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, png = time.process_time(), tmp_path / "timeline.png"
    argv = ["ledger", "--model", str(FOLDER / "gpt3_22b.json"), "--tp", "8", "--sequence-parallel"]
    assert main([*argv, "--timeline", str(png)]) == 0
    assert png.stat().st_size > 20_000 and time.process_time() - start < 120
    text = capsys.readouterr().out
    assert "memory at the peak of one step (backward of" in text and "backward of linear_fc2" in text

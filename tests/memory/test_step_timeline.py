"""The timeline of a step against PeakBytes, and of a large model on fake tensors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from peak_cases import BERT, LLAMA, TOKENS

from tempo_megatron import TempoConfig, use_cpu
from tempo_megatron.cli import main
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.kept.ledger import build_ledger_config
from tempo_megatron.memory.kept.timeline import LOSS_HEAD, WEIGHTS, StepTimeline
from tempo_megatron.memory.storages import PeakBytes, count_storage_bytes, find_storages
from tempo_megatron.models.build import build_model, choose_for_model, make_inputs
from tempo_megatron.models.shape import make_shape
from tempo_megatron.slots import dropout_rng

FOLDER = Path(__file__).parents[2] / "configs" / "model"
FAMILIES = {"gpt": {}, "llama": LLAMA, "bert": BERT}


@pytest.mark.parametrize("recompute", [(), ("full",)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_is_that_of_peak_bytes(
    family: str, recompute: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    use_cpu()
    shape = make_shape(**{**TOKENS, **FAMILIES[family]})
    with torch.compiler.set_stance("force_eager"), simulate_layout(1):
        model_parallel_cuda_manual_seed(1)
        dropout_rng.set_micro_batch(5, 0)
        config = build_ledger_config(shape, sequence_parallel=False, dtype=torch.float32, recompute=recompute)
        chosen = choose_for_model(shape, config, TempoConfig()).config
        model = build_model(shape, config, chosen, 1024).train()
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        batch = make_inputs(shape, 1024, 2, causal_mask=False)
        batch["loss_mask"] = torch.ones(2, shape.seq_length)

        def step() -> None:
            dropout_rng.set_micro_batch(5, 0)
            model.zero_grad()
            output = model(**batch)
            (output[0] if isinstance(output, tuple) else output).mean().backward()

        step()
        model.zero_grad()
        there = [t for t in (*model.parameters(), *model.buffers(), *batch.values()) if t is not None]
        with PeakBytes(*there) as seen:
            step()
        model.zero_grad()
        with StepTimeline([model], {WEIGHTS: find_storages(model.parameters())}) as timeline:
            step()
    found = timeline.finish("a step")
    weights = count_storage_bytes(model.parameters())
    given = count_storage_bytes(t for t in batch.values() if t is not None)
    assert 0 <= found.peak_bytes - weights - seen.peak <= given
    assert found.peak_bytes == max(map(sum, zip(*found.levels.values(), strict=True)))
    gradients = count_storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
    assert LOSS_HEAD in found.levels and found.levels["gradients"][-1] == gradients
    phases = {each.operation.partition(" of ")[0] for each in found.at_peak}
    assert "forward" in phases


@pytest.mark.slow
def test_a_large_model_is_followed_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, png = time.process_time(), tmp_path / "timeline.png"
    argv = ["ledger", "--model", str(FOLDER / "gpt3_175b.json"), "--tp", "8", "--sequence-parallel"]
    assert main([*argv, "--timeline", str(png)]) == 0
    assert png.stat().st_size > 20_000 and time.process_time() - start < 120
    text = capsys.readouterr().out
    assert "memory at the peak of one step (backward of" in text and "backward of linear_fc2" in text

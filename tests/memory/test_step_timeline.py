"""The timeline of a step against Follower, and of a large model on fake tensors."""

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
from tempo_megatron.memory.show.timeline import LOSS_HEAD, OTHERS, WEIGHTS, read_timeline
from tempo_megatron.memory.tape.follower import Follower, count_storage_bytes
from tempo_megatron.memory.tape.scopes import Scopes
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
    argv = ["ledger", "--model", str(FOLDER / "gpt3_22b.json"), "--tp", "8", "--sequence-parallel"]
    assert main([*argv, "--timeline", str(png)]) == 0
    assert png.stat().st_size > 20_000 and time.process_time() - start < 120
    text = capsys.readouterr().out
    assert "memory at the peak of one step (backward of" in text and "backward of linear_fc2" in text

"""The trainer with offload of everything: the losses of a run without it, and no more on the device than planned."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_links import SlowLink
from training_job import Data, Run, run, successful

from tempo_megatron import TempoConfig
from tempo_megatron.memory import run as memory_run
from tempo_megatron.memory.show.ledger import measure_run
from tempo_megatron.models.shape import make_shape

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
WORDS = [
    *(word for name, size in SIZES.items() for word in ("--" + name.replace("_", "-"), str(size))),
    *("--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", "6"),
]
STOCK = dict.fromkeys(("activation", "norm", "dropout", "attention", "loss"), "off")
CONFIG: dict[str, Any] = {"zero_optimization": {"stage": 1}}


def follow_offload() -> None:
    """Let a rank's copies take as long as a seed says, and print at the end what its engine counted."""
    from tempo_kernels.offload import engine as offload_engine
    from tempo_megatron.training import loop

    offload_engine.ThreadDevice = SlowLink  # type: ignore[misc]
    train = loop.run_job

    def train_and_tell(job: Any) -> None:
        engine = job.offloading.engine
        train(job)
        counted = {
            "peak": engine.peak_device_bytes,
            "left": engine.device_bytes + engine.pool.num_bytes_in_use,
            "moved": engine.moved_bytes,
            "stalls": engine.num_stalls,
        }
        Path(f"{job.run.metrics_file}.{os.environ['RANK']}").write_text(json.dumps(counted))

    loop.run_job = train_and_tell


def train(data: Data, folder: Path, tempo: dict[str, Any], *words: str, world_size: int = 1) -> tuple[Run, list[Any]]:
    """(The run, what the engine of each rank counted)."""
    config = {**CONFIG, "tempo": tempo}
    found = successful(run(data, folder, *WORDS, *words, world_size=world_size, config=config, before=follow_offload))
    counted = [json.loads((folder / f"metrics.jsonl.{rank}").read_text()) for rank in range(world_size)]
    return found, counted


def count_layer_bytes(tempo: TempoConfig) -> int:
    shape = make_shape(**SIZES, vocab_size=512)
    return measure_run(
        memory_run.Run(model=shape, tempo=tempo, micro_batch_size=4, dtype=torch.float32, stock="cpu")
    ).layer_bytes


@pytest.mark.slow
@pytest.mark.parametrize("tempo", [STOCK, {}], ids=["stock", "tempo"])
def test_losses_are_those_without_and_the_device_has_no_more_than_two_layers(
    data: Data, tmp_path: Path, tempo: dict[str, Any]
) -> None:
    plain, _ = train(data, tmp_path / "plain", {"enabled": tempo != STOCK})
    offloaded, (counted,) = train(data, tmp_path / "offloaded", {**tempo, "offload": "all"})
    assert offloaded.losses_hex == plain.losses_hex and len(plain.losses) == 6
    planned = 2 * count_layer_bytes(TempoConfig(**tempo))
    assert planned * 0.99 <= counted["peak"] <= planned
    assert counted["left"] == counted["stalls"] == 0
    assert "offload    4 layers of this rank move what they keep to host memory" in offloaded.output
    assert "no more than" in offloaded.output


def refuse_to_pin() -> None:
    """Let a rank's system refuse to pin pages, as CUDA says it."""
    from tempo_kernels.offload import CudaDevice, ThreadDevice

    class Cudart:
        def cudaHostRegister(self, *_: int) -> int:
            return 2

    torch.cuda.cudart = Cudart
    ThreadDevice.allocate_host = CudaDevice.allocate_host  # type: ignore[method-assign, assignment]


@pytest.mark.slow
def test_a_host_that_refuses_is_one_sentence_and_the_checkpoint_goes_on(data: Data, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "save"), "--save-interval", "2"]
    whole = successful(run(data, tmp_path / "whole", *WORDS, *save, config={**CONFIG, "tempo": {}}))
    (tmp_path / "save" / "latest").write_text("iter_0000002")
    load = ["--load", str(tmp_path / "save"), *save]
    config = {**CONFIG, "tempo": {"offload": "all"}}
    failed = run(data, tmp_path / "failed", *WORDS, *load, config=config, before=refuse_to_pin)
    (line,) = [line for line in failed.output.splitlines() if line.startswith("error")]
    assert failed.exit_codes == [1] and "Traceback" not in failed.output and not failed.losses
    assert re.fullmatch(r"error: CUDA refuses to pin 0\.00 GiB of host memory .*\(error 2\).*; raise the limit.*", line)
    again = successful(run(data, tmp_path / "again", *WORDS, *load, config={**CONFIG, "tempo": {}}))
    assert again.losses_hex == whole.losses_hex[2:]


@pytest.mark.exhaustive
def test_losses_are_those_without_on_two_stages_of_two_ranks(data: Data, tmp_path: Path) -> None:
    layout = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2"]
    plain, _ = train(data, tmp_path / "plain", {}, *layout, world_size=4)
    block = {"layers": {"0-2": {"offload": "all"}, "3": {"offload": "pre_mlp_layernorm+mlp"}}}
    offloaded, counted = train(data, tmp_path / "offloaded", block, *layout, world_size=4)
    assert offloaded.losses_hex == plain.losses_hex
    assert all(each["moved"] > 0 and each["left"] == 0 for each in counted)

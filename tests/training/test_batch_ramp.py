"""Steps whose batch grows: their sizes are Megatron-core's, and each trains as a step of a run of that size does."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator
from run_configs import NEEDED, SIZES, complete, decide
from training_job import BF16, Data, Run, describe_anew, run, successful, zero

from tempo_megatron.training.engine import build_scheduler
from tempo_megatron.training.run.run_config import BatchSizes


@pytest.mark.parametrize(
    ("full", "ramp"),
    [(8, (2, 2, 1)), (12, (4, 1, 97)), (64, (16, 16, 1000)), (70, (7, 7, 4321)), (1536, (32, 32, 9999))],
)
def test_every_step_has_the_size_that_megatron_core_gives_it(full: int, ramp: tuple[int, int, int]) -> None:
    start, increment, samples = ramp
    theirs = RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 1, start, increment, samples)
    sizes, consumed, steps = BatchSizes(full, ramp), 0, 0
    while consumed <= samples + 3 * full:
        assert sizes.count_samples(steps) == consumed
        theirs.update(consumed, consistency_check=True)
        assert sizes.find(consumed) == theirs.current_running_global_batch_size
        consumed, steps = consumed + sizes.find(consumed), steps + 1
    assert sizes.find(consumed) == full and sizes.find(0) == start
    assert sizes.count_samples(10**12) == consumed + (10**12 - steps) * full
    assert BatchSizes(full, None).count_samples(3) == 3 * full


def test_stages_that_interleave_need_sizes_that_they_divide(tmp_path: Path) -> None:
    words = "--num-layers 4 --global-batch-size 8 --pipeline-model-parallel-size 2 --rampup-batch-size 2 2 40".split()
    decide(tmp_path, *SIZES, *NEEDED, *words, config=zero(1), world_size=2)
    with pytest.raises(ValueError, match="first size 2 is not a multiple of 4 = .* x 2 stages that interleave"):
        words += ["--num-layers-per-virtual-pipeline-stage", "1"]
        decide(tmp_path, *SIZES, *NEEDED, *words, config=zero(1), world_size=2)


def test_the_schedule_counts_the_samples_of_its_steps() -> None:
    words = "--global-batch-size 6 --rampup-batch-size 2 2 12 --lr-warmup-iters 2 --lr-decay-style WSD".split()
    words += "--lr-wsd-decay-iters 3 --lr-wsd-decay-style linear --min-lr 1e-4".split()
    settings = complete(*SIZES, *NEEDED, *words)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(optimizer, settings)
    rates, consumed = [], 0
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        samples = settings.batch_sizes.find(consumed)
        scheduler.step(samples)
        consumed += samples
    # 2 2 2 4 4 6 6 | 6 6 6 samples: two steps of warm-up, and three of decay after the eighth rate.
    assert rates == pytest.approx([0.0, 5e-4, *[1e-3] * 6, 7e-4, 4e-4])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4) and consumed == scheduler.num_steps == 44


RAMP = "--global-batch-size 6 --rampup-batch-size 2 2 12"
SIZES_OF_STEPS = [2, 2, 2, 4, 4, 6, 6]
# A rate that decays would depend on the samples of all the steps that a run plans.
CONSTANT_RATE = "--lr-decay-style constant --hidden-dropout 0.1 --log-interval 2"


def go_on_by_hand(data: Data, folder: Path, words: list[str], **how: Any) -> list[str]:
    """The losses of runs with 2, 4 and 6 samples a step, each of which goes on from the checkpoint before it."""
    losses: list[str] = []
    saved = ["--save", str(folder / "save"), "--load", str(folder / "save")]
    # The first is planned for 26 samples, so that it has the same order as the run with the ramp.
    for size, until, planned in ((2, 3, 13), (4, 5, 6), (6, 7, 7)):
        if losses:
            checkpoint = folder / "save" / f"iter_{len(losses):07d}"
            settings = json.loads((checkpoint / "run.json").read_text())["settings"] | {"global_batch_size": size}
            describe_anew(checkpoint, global_batch_size=size, settings=settings)
        sizes = ["--global-batch-size", str(size), "--train-iters", str(planned), "--exit-interval", str(until)]
        losses += successful(run(data, folder / str(size), *words, *sizes, *saved, **how)).losses_hex
    return losses


LAYOUTS: dict[str, tuple[dict[str, Any], str, int]] = {
    "ZeRO 1": (zero(1), "", 1),
    "ZeRO 0, two stages": (zero(0), "--pipeline-model-parallel-size 2", 2),
    "ZeRO 1 in bf16, two stages": ({**zero(1), **BF16}, "--pipeline-model-parallel-size 2", 2),
    "ZeRO 0, two ranks": (zero(0), "--micro-batch-size 1", 2),
    "ZeRO 2, two ranks": (zero(2), "--micro-batch-size 1", 2),
    "ZeRO 3, two ranks": (zero(3), "--micro-batch-size 1", 2),
    "ZeRO 2 in bf16, offloaded": ({**zero(2, offload_optimizer={"device": "cpu"}), **BF16}, "", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [name if name == "ZeRO 1" else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS],
)
def test_a_ramp_trains_as_runs_that_go_on_by_hand(data: Data, tmp_path: Path, layout: str) -> None:
    config, more, world_size = LAYOUTS[layout]
    words, how = f"{CONSTANT_RATE} {more}".split(), {"config": config, "world_size": world_size}
    # DeepSpeed's Adam on the CPU rounds powers of beta in another way in the first step after a resume.
    cuts = (3, 5, 7) if "offloaded" in layout else (4, 7)
    save = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save"), "--train-iters", "7"]
    parts: list[Run] = []
    for until in cuts:
        first = [] if parts else RAMP.split()
        words_of_part = [*words, *first, *save, "--exit-interval", str(until)]
        parts.append(successful(run(data, tmp_path / str(until), *words_of_part, **how)))
        assert "2 at first, 2 more at a time over 12 samples" in parts[-1].output
    steps = [record for part in parts for record in part.of_kind("train")]
    assert [step["batch_size"] for step in steps] == SIZES_OF_STEPS
    assert [step["consumed_samples"] for step in steps] == list(itertools.accumulate(SIZES_OF_STEPS))
    assert "| batch 2 |" in parts[0].output and "batch" not in re.findall(r"step 6/7 .*", parts[-1].output)[0]
    losses = [loss for part in parts for loss in part.losses_hex]
    assert losses == go_on_by_hand(data, tmp_path / "by hand", words, **how)

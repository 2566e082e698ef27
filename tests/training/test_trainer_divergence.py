"""A model that has diverged ends the run with one sentence and is never saved, and so does what would never end."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training_job import BF16, Data, Run, run, zero

from tempo_megatron.training.engine import refuse_stale_locks, take_scale
from tempo_megatron.training.loop import Trainer

SAVED = ["--save-interval", "2", "--log-interval", "10", "--train-iters", "60"]
HALF = {"bf16": {"enabled": True}}


def diverge(data: Data, folder: Path, *extra: str, config: dict[str, Any], world_size: int = 1) -> Run:
    save = ["--save", str(folder / "save"), *SAVED, *extra]
    return run(data, folder, *save, config=config, world_size=world_size, timeout_s=120)


CASES = {
    "fp32, ZeRO 1": (1, ["--clip-grad", "0"], zero(1)),
    "fp32, ZeRO 0": (1, ["--clip-grad", "0"], zero(0)),
    "bf16, ZeRO 1": (1, ["--clip-grad", "0"], {**zero(1), **HALF}),
    "bf16, fp32 gradients": (1, [], {**zero(1), **BF16}),
    "bf16, ZeRO 3, DP 2": (2, [], {**zero(3), **HALF}),
    "fp32, TP 2": (2, ["--tensor-model-parallel-size", "2"], zero(2)),
}
QUICK = ("fp32, ZeRO 0", "bf16, ZeRO 1", "fp32, TP 2")


@pytest.mark.parametrize(
    ("world_size", "extra", "config", "interval"),
    [
        *(
            pytest.param(*case, "1", id=name, marks=() if name in QUICK else pytest.mark.slow)
            for name, case in CASES.items()
        ),
        *(pytest.param(*CASES[name], "2", id=f"{name}, every second step") for name in QUICK[:2]),
    ],
)
def test_a_diverged_model_is_not_saved(
    data: Data, tmp_path: Path, world_size: int, extra: list[str], config: dict[str, Any], interval: str
) -> None:
    options = ["--lr", "1e38", *extra, "--save-interval", interval]
    result = diverge(data, tmp_path, *options, config=config, world_size=world_size)
    assert result.exit_codes == [1] * world_size
    assert "is not a finite number; lower --lr" in result.output
    assert "Traceback" not in result.output
    assert not list((tmp_path / "save").glob("iter_*"))


def test_the_last_good_checkpoint_stays_the_latest(data: Data, tmp_path: Path) -> None:
    config = zero(1)
    # The first step of a warm-up has a learning rate of 0.
    warm = ["--lr", "1e30", "--lr-warmup-iters", "50"]
    assert diverge(data, tmp_path, *warm, "--save-interval", "1", config=config).exit_codes == [1]
    save = tmp_path / "save"
    assert (save / "latest").read_text().strip() == "iter_0000001"
    again = run(data, tmp_path / "again", "--load", str(save), *warm, "--train-iters", "60", config=config)
    assert "going on after step 1" in again.output


def test_a_loss_that_is_not_finite_ends_a_run_that_saves_nothing(data: Data, tmp_path: Path) -> None:
    result = run(data, tmp_path, "--lr", "1e30", "--log-interval", "10")
    assert result.exit_codes == [1]
    assert "the loss of step 2 or its gradient is not a finite number" in result.output
    assert result.of_kind("train")[-1]["loss"] is None


def test_a_last_step_that_was_too_much_shows_in_the_validation_loss(data: Data, tmp_path: Path) -> None:
    result = run(data, tmp_path, "--lr", "1e38", "--train-iters", "1", "--eval-iters", "1")
    assert result.exit_codes == [1]
    assert "after step 1 the loss is not a finite number; lower --lr" in result.output


def test_only_the_search_for_a_loss_scale_excuses_a_skipped_step() -> None:
    skipped = {"loss": math.nan, "grad_norm": math.inf, "skipped": 1}
    overflow_unnoticed = {"loss": 1.0, "grad_norm": math.inf, "skipped": 0}
    trainer = Trainer.__new__(Trainer)
    for searches in (True, False):
        trainer.engine = type("Engine", (), {"scales_dynamically": searches})()  # type: ignore[assignment]
        assert trainer._has_diverged(skipped) is not searches
        assert trainer._has_diverged(overflow_unnoticed)
        assert not trainer._has_diverged({"loss": 1.0, "grad_norm": None, "skipped": 0})


def test_a_resumed_search_goes_on_where_it_was_with_the_settings_of_the_json() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    def dynamic(scale: float, window: int, shift: int) -> DynamicLossScaler:
        return DynamicLossScaler(scale, window, 1.0, shift, False, dtype=torch.half)

    own, saved = dynamic(2.0**16, 500, 1), dynamic(2.0**9, 1000, 4)
    saved.cur_iter, saved.last_overflow_iter = 70, 60
    take_scale(own, saved)
    assert (own.cur_scale, own.cur_iter, own.last_overflow_iter) == (2.0**9, 70, 60)
    assert (own.scale_window, own.delayed_shift, own.cur_hysteresis) == (500, 1, 1)
    fixed = LossScaler(128.0)
    take_scale(fixed, saved)
    assert fixed.loss_scale == 128.0


@pytest.mark.parametrize("place", ["cpu_adam", "py311_cpu/cpu_adam"])
def test_an_old_lock_is_named_and_a_young_one_is_a_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    refuse_stale_locks()
    lock = tmp_path / place / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    refuse_stale_locks()
    os.utime(lock, (time.time() - 7200,) * 2)
    with pytest.raises(ValueError, match=f"{lock} has been there for 120 minutes: .* remove it"):
        refuse_stale_locks()

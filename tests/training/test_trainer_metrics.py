"""The metrics file and the loss curves drawn from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from distributed import run_ranks

from tempo_megatron.training.comparison import plot_losses
from tempo_megatron.training.metrics import (
    MetricsFile,
    StepTimer,
    average_over,
    read_clocks,
    read_metrics,
)


def written(path: Path, losses: list[float]) -> Path:
    file = MetricsFile(str(path), resume_after=None)
    for step, loss in enumerate(losses, start=1):
        file.write({"kind": "train", "iteration": step, "loss": loss})
    file.write({"kind": "validation", "iteration": len(losses), "loss": losses[-1]})
    file.close()
    return path


def test_each_record_is_in_the_file_as_soon_as_it_is_written_and_bit_for_bit(tmp_path: Path) -> None:
    file = MetricsFile(str(tmp_path / "m.jsonl"), resume_after=None)
    file.write({"kind": "train", "iteration": 1, "loss": 0.1})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"kind": "train", "iteration": 1, "loss": 0.1}
    file.close()
    losses = torch.rand(100, generator=torch.Generator().manual_seed(3), dtype=torch.float64).tolist()
    records = read_metrics(written(tmp_path / "m.jsonl", [*losses, float("nan"), float("inf")]))
    assert [record["loss"] for record in records] == [*losses, None, None, None]


def test_a_resumed_run_drops_what_came_after_its_checkpoint_and_a_cut_off_line(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", [3.0, 2.0, 1.0])
    with open(path, "a", encoding="utf-8") as stream:
        stream.write('{"kind": "train", "itera')
    file = MetricsFile(str(path), resume_after=2)
    file.write({"kind": "train", "iteration": 3, "loss": 1.5})
    file.close()
    assert [record["loss"] for record in read_metrics(path)] == [3.0, 2.0, 1.5]


def test_a_new_run_starts_a_new_file_and_the_old_one_stays(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", [3.0, 2.0])
    before = path.read_text()
    for number in (1, 2):
        path.write_text(before)
        file = MetricsFile(str(path), resume_after=None)
        file.close()
        assert file.set_aside == f"{path}.{number}"
        assert path.read_text() == "" and Path(f"{path}.{number}").read_text() == before
    file = MetricsFile(str(path), resume_after=None)
    file.close()
    assert file.set_aside is None  # nothing was in it


def test_a_file_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for resume_after in (None, 3):
        with pytest.raises(ValueError, match="exists and does not hold metrics of a run"):
            MetricsFile(str(tmp_path / "notes"), resume_after)
    assert (tmp_path / "notes").read_text() == "mine"


def averages() -> list[dict[str, float]]:
    rank = torch.distributed.get_rank()
    steps = [{"loss": torch.tensor(0.1 + rank + step), "lm_loss": torch.tensor(5.0)} for step in range(2)]
    return average_over(steps, None, torch.device("cpu"))


def test_losses_are_averaged_over_the_ranks() -> None:
    for found in run_ranks(averages, 2):
        assert [list(step) for step in found] == [["loss", "lm_loss"]] * 2
        assert [step["loss"] for step in found] == pytest.approx([0.6, 1.6])
        assert [step["lm_loss"] for step in found] == [5.0, 5.0]


def test_a_figure_without_steps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no training step"):
        plot_losses({"none": tmp_path / "missing.jsonl"}, tmp_path / "loss.png")


def test_a_steps_time_leaves_out_what_is_excluded() -> None:
    timer, start = StepTimer(), read_clocks()
    while read_clocks().since(start).processor < 0.2:
        pass
    timer.exclude_since(start)
    passed = timer.end_interval()
    assert passed.processor < 0.1 and passed.wall < read_clocks().since(start).wall - 0.15
    while read_clocks().since(start).processor < 0.4:
        pass
    assert timer.end_interval().processor > 0.15

"""The metrics file and the loss curves drawn from it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_ranks

from tempo_megatron.training.comparison import plot_losses
from tempo_megatron.training.metrics import (
    MetricsFile,
    MonitorBuffer,
    RunLog,
    StepTimer,
    average_over,
    measure_peak,
    read_clocks,
    read_metrics,
)
from tempo_megatron.training.run.run_config import BatchSizes


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


def test_the_memory_of_a_process_is_not_called_that_of_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run: Any = SimpleNamespace(
        metrics_file=str(tmp_path / "m.jsonl"),
        tensorboard_dir=None,
        train_iters=1,
        eval_only=False,
        batch_sizes=BatchSizes(1, None),
    )
    log = RunLog(run, MonitorBuffer(None), is_first_rank=True, first_iteration=0, resumes=False)
    on_cpu = measure_peak(torch.device("cpu"))
    step = {"iteration": 1, "consumed_samples": 1, "batch_size": 1}
    step |= {"loss": 2.0, "learning_rate": 0.1, "grad_norm": None}
    for peak in (on_cpu, {"peak_memory_bytes": 2**30}):
        log.log_steps([step], {"tokens_per_s": 1.0, "step_ms": 1.0, **peak})
    log.close()
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert f"| peak RSS of the process {on_cpu['peak_rss_bytes'] / 2**20:,.0f} MiB" in first
    assert second.endswith("| peak 1,024 MiB")
    assert ["peak_memory_bytes" in record for record in read_metrics(tmp_path / "m.jsonl")] == [False, True]


def averages() -> list[dict[str, float]]:
    rank = torch.distributed.get_rank()
    steps = [{"loss": torch.tensor(0.1 + rank + step), "lm_loss": torch.tensor(5.0)} for step in range(2)]
    return average_over(steps, None, torch.device("cpu"))


def test_losses_are_averaged_over_the_ranks() -> None:
    for found in run_ranks(averages, 2):
        assert [list(step) for step in found] == [["loss", "lm_loss"]] * 2
        assert [step["loss"] for step in found] == pytest.approx([0.6, 1.6])
        assert [step["lm_loss"] for step in found] == [5.0, 5.0]


def test_equal_validation_losses_of_two_runs_both_show(tmp_path: Path) -> None:
    import matplotlib.image
    from matplotlib.colors import to_rgb

    runs = {name: written(tmp_path / f"{name}.jsonl", [3.0, 2.0, 1.0]) for name in ("stock", "tempo")}
    for file in runs.values():  # one step, so that no line is drawn: the colours are those of the dots
        file.write_text(
            '{"kind": "train", "iteration": 1, "loss": 2.0}\n{"kind": "validation", "iteration": 1, "loss": 2.0}'
        )
    plot_losses(runs, tmp_path / "loss.png")
    assert not list(tmp_path.glob("*.tmp"))
    pixels = matplotlib.image.imread(tmp_path / "loss.png")[:, :, :3]
    middle = pixels[:, : pixels.shape[1] * 7 // 10]  # without the legend
    for colour in ("#0072B2", "#D55E00"):
        assert (abs(middle - to_rgb(colour)).max(axis=2) < 0.01).sum() > 20, colour


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

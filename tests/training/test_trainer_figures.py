"""A run beside its losses: DeepSpeed's monitors, a profile, an evaluation, a save by signal, a decay at the end."""

from __future__ import annotations

import csv
import functools
import json
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_job import Data, Run, run, successful

from tempo_megatron.models.shape import make_shape
from tempo_megatron.training.metrics import MonitorBuffer, RunLog, Throughput, measure_peak, read_metrics
from tempo_megatron.training.run.run_config import BatchSizes

STEPS, WARMUP, DECAY, LR = 8, 2, 4, 1e-3
OF_SCHEDULE = f"--lr-decay-style WSD --lr-warmup-iters {WARMUP} --lr-wsd-decay-iters {DECAY}"
OF_EVALUATION = "--split 8,2,2 --eval-iters 2 --test-iters 1"


def signal_after(step: int, file: str) -> None:
    """Sends this process SIGUSR1 as soon as its metrics file has the step."""

    def send() -> None:
        while not any(record.get("iteration") == step for record in read_metrics(file)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(Path(file).parent)}
    threading.Thread(target=send, daemon=True).start()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="module")
def trained(data: Data, folder: Path) -> Run:
    config = {
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"},
        "tensorboard": {"enabled": True, "output_path": str(folder), "job_name": "board"},
        "wandb": {"enabled": True, "project": "tests"},
    }
    schedule = f"--train-iters {STEPS} {OF_SCHEDULE} --lr-wsd-decay-style linear {OF_EVALUATION}"
    words = f"{schedule} --log-interval 2 --profile 3-4 --save {folder / 'save'}"
    before = functools.partial(signal_after, 2, str(folder / "metrics.jsonl"))
    return successful(run(data, folder, *words.split(), config=config, before=before))


def expected_events(trained: Run) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (samples, value) of each event that the monitors should have, from the metrics file."""
    events: dict[str, list[tuple[int, float]]] = {}
    tags = {"loss": "train_loss", "learning_rate": "lr"}
    for record in trained.of_kind("train"):
        for name in ("loss", "learning_rate", "grad_norm", "tokens_per_s", "tflops_per_s_per_rank", "peak_rss_bytes"):
            events.setdefault(f"Train/Samples/{tags.get(name, name)}", []).append(
                (record["consumed_samples"], record[name])
            )
    for kind in ("validation", "test"):
        for record in trained.of_kind(kind):
            for name in ("loss", "perplexity"):
                events.setdefault(f"{kind.title()}/Samples/{name}", []).append(
                    (record["consumed_samples"], record[name])
                )
    return events


def test_csv_and_tensorboard_have_the_figures_of_the_metrics_file(trained: Run, folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    for tag, wanted in expected_events(trained).items():
        with open(folder / "csv" / f"{tag.replace('/', '_')}.csv", encoding="utf-8") as stream:
            _, *rows = csv.reader(stream)
        assert [(int(samples), float(value)) for samples, value in rows] == wanted, tag
        found = [(event.step, event.value) for event in board.Scalars(tag)]
        assert found == [(samples, pytest.approx(value, rel=1e-6)) for samples, value in wanted], tag


def read_wandb_records(file: Path) -> Iterator[bytes]:
    """Yields the records of an offline run: LevelDB's log format behind a header of seven bytes."""
    content, place, block, record = file.read_bytes(), 7, 1 << 15, b""
    while place + 7 <= len(content):
        if block - place % block < 7:  # no header begins this close to the end of a block
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def test_wandb_offline_has_them_in_the_order_of_steps(trained: Run, folder: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found: dict[str, list[tuple[int, float]]] = {}
    for content in read_wandb_records(file):
        history = wandb_internal_pb2.Record.FromString(content).history
        for item in history.item:
            tag = "/".join(item.nested_key) or item.key
            found.setdefault(tag, []).append((history.step.num, json.loads(item.value_json)))
    wanted = expected_events(trained)
    assert {tag: found.get(tag) for tag in wanted} == wanted


def test_the_trace_has_the_steps_that_were_asked_for(trained: Run, folder: Path) -> None:
    trace = json.loads((folder / "save" / "profile" / "trace_rank0.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {name for name in names if name.startswith("step ")} == {"step 3", "step 4"}
    assert "[memory]" in names
    assert "recorded the steps up to 4: " in trained.output


def test_the_learning_rate_rises_stays_and_decays_at_the_end(trained: Run) -> None:
    rates = [record["learning_rate"] for record in trained.of_kind("train")]
    stable = STEPS - DECAY
    wanted = [
        LR * (step / WARMUP if step < WARMUP else 1.0 if step <= stable else 1.0 - (step - stable) / DECAY)
        for step in range(STEPS)
    ]
    assert rates == pytest.approx(wanted)


def test_a_signal_saves_and_the_run_goes_on(trained: Run, folder: Path) -> None:
    saved = sorted(path.name for path in (folder / "save").glob("iter_*"))
    assert len(saved) == 2 and saved[-1] == f"iter_{STEPS:07}", saved
    assert trained.of_kind("train")[-1]["iteration"] == STEPS
    assert "finished after step 8" in trained.output


def test_an_evaluation_has_the_losses_of_the_run_and_trains_nothing(
    trained: Run, data: Data, folder: Path, tmp_path: Path
) -> None:
    words = f"--load {folder / 'save'} --eval-only {OF_EVALUATION} --train-iters {STEPS}"
    found = successful(run(data, tmp_path, *words.split()))
    assert not found.of_kind("train")
    for kind in ("validation", "test"):
        (ours,), theirs = found.of_kind(kind), trained.of_kind(kind)[-1]
        assert ours["loss_hex"] == theirs["loss_hex"], kind
    assert found.of_kind("test")[0]["loss"] != found.of_kind("validation")[0]["loss"]
    assert "evaluated after step 8" in found.output


def test_the_share_of_the_peak_is_that_of_the_flops_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-3 175B on 64 A100: 51.4 % MFU, table 5 of arXiv 2205.05198."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    sizes = {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "seq_length": 2048}
    settings: Any = SimpleNamespace(
        model=make_shape(**sizes), global_batch_size=64, world_size=64, precision="bf16", train_iters=100
    )
    on_gpu = Throughput(settings, 51200, torch.device("cuda", 0)).compute(13.75, 64)
    assert on_gpu["mfu"] == pytest.approx(0.514, abs=5e-4)
    assert on_gpu["tflops_per_s_per_rank"] == pytest.approx(on_gpu["mfu"] * 312)
    half = Throughput(settings, 51200, torch.device("cuda", 0)).compute(13.75, 32)  # while --rampup-batch-size is small
    assert half == {name: value / 2 for name, value in on_gpu.items()} | {"step_ms": on_gpu["step_ms"]}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card without a file")
    assert "mfu" not in Throughput(settings, 51200, torch.device("cuda", 0)).compute(13.75, 64)


def test_a_line_says_the_share_of_the_peak_the_time_left_and_whose_memory_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings: Any = SimpleNamespace(
        metrics_file=str(tmp_path / "m.jsonl"), tensorboard_dir=None, train_iters=100, eval_only=False,
        batch_sizes=BatchSizes(4, (2, 2, 20)),
    )  # fmt: skip
    log = RunLog(settings, MonitorBuffer(None), is_first_rank=True, first_iteration=0, resumes=False)
    # The first 10 steps have 2 samples, the other 90 have 4.
    step = {"iteration": 10, "consumed_samples": 20, "batch_size": 2}
    step |= {"loss": 2.0, "learning_rate": 0.1, "grad_norm": None}
    log.log_steps([step], {"tokens_per_s": 1.0, "step_ms": 60_000.0, "mfu": 0.514, "peak_memory_bytes": 2**30})
    end = {"iteration": 100, "consumed_samples": 380, "batch_size": 4}
    on_cpu = measure_peak(torch.device("cpu"))
    log.log_steps([step | end], {"tokens_per_s": 1.0, "step_ms": 60_000.0, **on_cpu})
    log.close()
    first, last = (line for line in capsys.readouterr().out.splitlines() if line.startswith("step"))
    assert "| batch 2 |" in first and first.endswith("| MFU 51.4% | peak 1,024 MiB | 3:00:00 left")
    assert f"| peak RSS of the process {on_cpu['peak_rss_bytes'] / 2**20:,.0f} MiB" in last
    assert ["peak_memory_bytes" in record for record in read_metrics(tmp_path / "m.jsonl")] == [True, False]
    assert not any(word in last for word in ("batch", "left", "MFU"))

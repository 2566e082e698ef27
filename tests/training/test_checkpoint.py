"""Saving and resuming: bit for bit the run it was, and never without a whole checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_job import SCRIPT, Data, Run, arguments, kill, launch, run, successful

from tempo_megatron.disk import flush_all_to_disk
from tempo_megatron.training.checkpoint_files.folder import CheckpointFolder, name_checkpoint

SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--global-batch-size", "4"]


def stage(number: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number}, **more}


# Tensor parallelism with ZeRO 1 and 3 and Tempo is resumed bit for bit in test_trainer_models.py.
CASES = {
    "one process, ZeRO 0": (1, [], stage(0)),
    "DP 2, ZeRO 2": (2, [], stage(2)),
    "DP 2, ZeRO 3": (2, [], stage(3)),
    "TP 2, full recomputation": (
        2, [*SP[:2], "--recompute-granularity", "full", "--recompute-method", "block"], stage(0),
    ),
    "TP 2 + SP, ZeRO 1, bf16": (2, SP, stage(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})),
}  # fmt: skip
QUICK = ("one process, ZeRO 0",)


@pytest.mark.parametrize(
    ("world_size", "extra", "config"),
    [pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in CASES.items()],
)
def test_a_resumed_run_continues_bit_for_bit(
    data: Data, tmp_path: Path, world_size: int, extra: list[str], config: dict[str, Any]
) -> None:
    def go(folder: str, *more: str) -> Run:
        options = [*DROPOUT, "--train-iters", "4", *extra, *more]
        return successful(run(data, tmp_path / folder, *options, world_size=world_size, config=config))

    save = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    whole = go("whole", *save, "--save-interval", "2")
    assert "holds no checkpoint yet; starting anew" in whole.output
    if world_size == 1:
        shutil.rmtree(tmp_path / "save")
        first = go("parts", *save, "--exit-interval", "2")
        assert first.losses_hex == whole.losses_hex[:2]
        # The dropout is on.
        assert go("other", "--hidden-dropout", "0").losses_hex != whole.losses_hex
    else:
        (tmp_path / "save" / "latest").write_text(name_checkpoint(2))
    second = go("parts", *save)
    assert "going on after step 2" in second.output
    assert second.losses_hex == (whole.losses_hex if world_size == 1 else whole.losses_hex[2:])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_killed_run_resumes_bit_for_bit(data: Data, tmp_path: Path) -> None:
    """With its launcher. test_kills.py kills ranks; test_trainer_launchers.py ends launchers."""
    common = [*DROPOUT, *SP, "--train-iters", "40"]
    uninterrupted = successful(run(data, tmp_path / "whole", *common, world_size=2, config=stage(1)))
    save = tmp_path / "save"
    options = [*common, "--save", str(save), "--load", str(save), "--save-interval", "4"]
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
    folder = tmp_path / "killed"
    folder.mkdir()
    process = launch([*torchrun, *arguments(data, folder, *options, config=stage(1))], folder)
    wait_until(lambda: (save / "latest").exists(), process)
    kill(process)
    killed_after = int((save / "latest").read_text().strip().removeprefix("iter_"))
    assert 4 <= killed_after < 40
    resumed = successful(run(data, folder, *options, world_size=2, config=stage(1)))
    assert f"going on after step {killed_after} of" in resumed.output
    assert resumed.losses_hex == uninterrupted.losses_hex
    assert not list(save.glob("*.tmp"))


def wait_until(condition: Callable[[], bool], process: Any, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Crashed(BaseException):
    """Stands for kill -9: nothing in between catches it."""


def write_checkpoint(folder: CheckpointFolder, iteration: int) -> None:
    unfinished = folder.path / folder.begin(iteration)
    (unfinished / "weights").write_text(f"weights of {iteration}")
    flush_all_to_disk(unfinished)
    folder.commit(iteration)


def count_file_operations(monkeypatch: pytest.MonkeyPatch, crash_at: int | None) -> list[str]:
    """Every change of the file system that a save makes; the one numbered crash_at does not happen."""
    done: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if len(done) == crash_at:
                raise Crashed
            done.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in [(Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (Path, "replace"), (Path, "unlink")]:
        watch(owner, name)
    for owner, name in [(os, "fsync"), (shutil, "rmtree")]:
        watch(owner, name)
    return done


@pytest.mark.parametrize("leftover", [False, True], ids=["", "over the leftover of an earlier crash"])
def test_a_crash_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leftover: bool
) -> None:
    def prepare(name: str) -> CheckpointFolder:
        folder = CheckpointFolder(tmp_path / name)
        write_checkpoint(folder, 5)
        if leftover:  # iter_0000010 is there, but `latest` does not name it
            shutil.copytree(folder.path / name_checkpoint(5), folder.path / name_checkpoint(10))
        return folder

    folder = prepare("counted")
    with monkeypatch.context() as patch:
        operations = count_file_operations(patch, None)
        write_checkpoint(folder, 10)
    assert len(operations) > 8 and "rename" in operations
    for crash_at in range(len(operations)):
        folder = prepare(f"crash{crash_at}")
        with monkeypatch.context() as patch, pytest.raises(Crashed):
            count_file_operations(patch, crash_at)
            write_checkpoint(folder, 10)
        name = folder.find_latest()
        assert name in (name_checkpoint(5), name_checkpoint(10))
        iteration = 5 if name == name_checkpoint(5) else 10
        assert (folder.path / name / "weights").read_text() == f"weights of {iteration}"
        write_checkpoint(folder, 15)
        assert folder.find_latest() == name_checkpoint(15)
        assert not list(folder.path.glob("*.tmp"))


@pytest.fixture(scope="module")
def saved(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after step 2 of one process with ZeRO 1."""
    folder = tmp_path_factory.mktemp("saved")
    successful(run(data, folder, "--save", str(folder / "save"), "--exit-interval", "2", config=stage(1)))
    return folder / "save"


MISMATCHES = {
    "--num-layers": (["--num-layers", "1"], 1, stage(1), "its num_layers is 2, this run's is 1"),
    "--vocab-size": (["--vocab-size", "600"], 1, stage(1), "its padded_vocab_size is 512, this run's is 640"),
    "more ranks than a batch has samples": (
        [], 2, stage(1), "--global-batch-size 2 is not a multiple of micro batch size 2 x data parallel size 2",
    ),
    "precision": (["--bf16"], 1, stage(1), "its precision is fp32, this run's is bf16"),
    "batch": (["--global-batch-size", "6"], 1, stage(1), "its global_batch_size is 2, this run's is 6, so the order"),
    "seed": (["--seed", "1"], 1, stage(1), "change --seed"),
}  # fmt: skip


@pytest.mark.parametrize(("extra", "world_size", "config", "words"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_checkpoint_of_another_run_is_refused(
    data: Data, saved: Path, tmp_path: Path, extra: list[str], world_size: int, config: dict[str, Any], words: str
) -> None:
    result = run(data, tmp_path, "--load", str(saved), *extra, world_size=world_size, config=config)
    assert result.exit_codes == [1] * world_size
    assert words in result.output
    assert "Traceback" not in result.output


def test_the_schedule_can_be_changed_on_purpose(data: Data, saved: Path, tmp_path: Path) -> None:
    extra = ["--load", str(saved), "--lr", "2e-3", "--override-opt-param-scheduler", "--lr-decay-style", "constant"]
    result = successful(run(data, tmp_path, *extra, config=stage(1)))
    assert [record["learning_rate"] for record in result.of_kind("train")] == [2e-3] * 8


def test_saving_over_the_checkpoints_of_another_run_is_refused(data: Data, saved: Path, tmp_path: Path) -> None:
    result = run(data, tmp_path, "--save", str(saved), config=stage(1))
    assert result.exit_codes == [1]
    assert f"already holds checkpoints up to iter_0000002; add --load {saved}" in result.output


def test_two_runs_cannot_save_to_one_folder(tmp_path: Path) -> None:
    first, second = CheckpointFolder(tmp_path / "save"), CheckpointFolder(tmp_path / "save")
    first.lock()
    with pytest.raises(ValueError, match="is being written by another run; wait for it or end it"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_loading_from_an_empty_folder_is_refused_unless_it_is_where_the_run_saves(data: Data, tmp_path: Path) -> None:
    result = run(data, tmp_path, "--load", str(tmp_path / "nothing"))
    assert result.exit_codes == [1]
    assert "holds no checkpoint; give a folder with one, or leave --load out" in result.output


def test_latest_that_names_a_missing_checkpoint_is_an_error(data: Data, saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "latest").write_text("iter_0000009")
    with pytest.raises(ValueError, match="names 'iter_0000009', which is not a checkpoint there; remove it"):
        CheckpointFolder(copy).find_latest()
    shutil.copytree(saved / "iter_0000002", copy / "iter_0000002")
    with pytest.raises(ValueError, match="write one of iter_0000002 into it"):
        CheckpointFolder(copy).find_latest()


def test_a_checkpoint_says_what_it_belongs_to(saved: Path) -> None:
    described = json.loads((saved / "iter_0000002" / "run.json").read_text())
    assert described["iteration"] == 2 and described["consumed_samples"] == 4
    assert described["zero_stage"] == 1 and described["precision"] == "fp32"

"""Saving and resuming: bit for bit the run it was, and never without a whole checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from training_job import Data, Run, run, successful

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
    "TP 2 + SP, ZeRO 1, bf16": (2, SP, stage(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})),
}
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


def test_two_runs_cannot_save_to_one_folder(tmp_path: Path) -> None:
    first, second = CheckpointFolder(tmp_path / "save"), CheckpointFolder(tmp_path / "save")
    first.lock()
    with pytest.raises(ValueError, match="is being written by another run; wait for it or end it"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_latest_that_names_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    (tmp_path / "latest").write_text("iter_0000009")
    with pytest.raises(ValueError, match="names 'iter_0000009', which is not a checkpoint there; remove it"):
        folder.find_latest()
    write_checkpoint(folder, 2)
    (tmp_path / "latest").write_text("iter_0000009")
    with pytest.raises(ValueError, match="write one of iter_0000002 into it"):
        folder.find_latest()


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path)
    for iteration in (1, 2, 3):
        write_checkpoint(folder, iteration)
    with monkeypatch.context() as patch:  # kill -9 where the files would go
        patch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            folder.remove_older_than_newest(1)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [
        "iter_0000001.old.tmp", "iter_0000002", "iter_0000003",
    ]  # fmt: skip
    write_checkpoint(folder, 4)
    assert not list(tmp_path.glob("*.tmp"))


def test_what_came_after_the_latest_checkpoint_does_not_count(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for iteration in (5, 10, 15):
        write_checkpoint(folder, iteration)
    (tmp_path / "latest").write_text("iter_0000010")  # a user goes on from there
    write_checkpoint(folder, 11)
    folder.remove_older_than_newest(2)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [name_checkpoint(n) for n in (10, 11, 15)]

"""The files of a checkpoint: a crash leaves a whole one, reading executes nothing, and every bit counts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from distributed import run_ranks
from training_job import Call

from tempo_megatron.disk import flush_all_to_disk
from tempo_megatron.training.checkpoint_files.files import find_fault, read_tensors
from tempo_megatron.training.checkpoint_files.folder import (
    CheckpointFolder,
    describe_files,
    find_damage,
    find_missing,
    name_checkpoint,
    read_description,
    write_description,
)
from tempo_megatron.training.settle import check_all_ranks_load, check_all_ranks_share


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


def test_the_reader_executes_nothing_and_says_what_is_wrong(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "intruder": Call(os.mknod, str(tmp_path / "executed"))}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="bad.pt holds posix.mknod where a checkpoint has only tensors"):
        read_tensors(tmp_path / "bad.pt")
    files = describe_files(tmp_path, [tmp_path / "bad.pt"])  # as who has put it there describes it
    assert find_missing(tmp_path, files) is None
    assert "bad.pt holds posix.mknod where" in (find_damage(tmp_path, files, 0, 1) or "")
    assert not (tmp_path / "executed").exists()
    (tmp_path / "bad.pt").write_bytes((tmp_path / "bad.pt").read_bytes()[:-1000])
    assert "is damaged" in (find_fault(tmp_path / "bad.pt") or "")
    with pytest.raises(ValueError, match="cannot be read"):
        read_tensors(tmp_path / "bad.pt")


def test_a_member_of_deepspeeds_enum_may_be_written_by_its_name_and_nothing_else(tmp_path: Path) -> None:
    """As Python 3.11.0 to 3.11.3 writes it."""
    torch.save({"zero_stage": Call(getattr, ZeroStageEnum, "gradients")}, tmp_path / "state.pt")
    assert find_fault(tmp_path / "state.pt") is None
    assert read_tensors(tmp_path / "state.pt") == {"zero_stage": ZeroStageEnum.gradients}
    for cls, name in ((ZeroStageEnum, "__class__"), (ZeroStageEnum, "mro"), (LossScaler, "__init__")):
        torch.save({"state": Call(getattr, cls, name)}, tmp_path / "state.pt")
        with pytest.raises(ValueError, match="state.pt .*give another"):
            read_tensors(tmp_path / "state.pt")


def test_the_loss_scalers_of_fp16_are_read(tmp_path: Path) -> None:
    scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 2, False, dtype=torch.half)
    torch.save({"loss_scaler": scaler}, tmp_path / "optim_states.pt")
    assert find_fault(tmp_path / "optim_states.pt") is None
    assert vars(read_tensors(tmp_path / "optim_states.pt")["loss_scaler"]) == vars(scaler)


def share(root: str) -> str:
    folder = Path(root) / f"node{os.environ['RANK']}" / "save"
    try:
        check_all_ranks_share(folder)
    except ValueError as error:
        return str(error)
    return ""


def test_a_save_folder_of_its_own_on_every_node_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "node0" / "save").mkdir(parents=True)
    (tmp_path / "node1" / "save").mkdir(parents=True)
    said = run_ranks(share, 2, str(tmp_path))
    assert said[0] == said[1]
    assert "is not the same folder on every node: rank 1 does not see what rank 0 wrote" in said[0]
    (tmp_path / "node1" / "save").rmdir()
    (tmp_path / "node1" / "save").symlink_to(tmp_path / "node0" / "save")
    assert run_ranks(share, 2, str(tmp_path)) == ["", ""]
    (tmp_path / "node1" / "save").unlink()
    assert "cannot be written by rank 1" in run_ranks(share, 2, str(tmp_path))[0]
    assert not list(tmp_path.rglob("*.tmp"))


def load(root: str) -> str:
    check_all_ranks_load({"checkpoint": "iter_1"}, root, "--load")
    check_all_ranks_load(None, root, "--load")
    try:
        check_all_ranks_load({"checkpoint": f"iter_{os.environ['RANK']}"}, root, "--load")
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_found_different_checkpoints_are_told_so(tmp_path: Path) -> None:
    for said in run_ranks(load, 2, str(tmp_path)):
        assert "does not name one checkpoint to every rank" in said


def make_checkpoint(folder: Path) -> Path:
    checkpoint = folder / "iter_0000001"
    (checkpoint / "inner").mkdir(parents=True)
    for name in ("a.bin", "inner/b.bin"):
        (checkpoint / name).write_bytes(bytes(range(256)))
    return checkpoint


def test_every_bit_of_a_description_counts(tmp_path: Path) -> None:
    """A description that was changed is refused, or says the same."""
    checkpoint = make_checkpoint(tmp_path)
    files = describe_files(checkpoint, [checkpoint / "a.bin", checkpoint / "inner" / "b.bin"])
    write_description(checkpoint, {"iteration": 1, "lr": 1e-3, "parts": (1, 2)}, files)
    written = read_description(checkpoint)
    assert written["files"] == {name: list(entry) for name, entry in files.items()} and written["parts"] == [1, 2]
    path = checkpoint / "run.json"
    original = path.read_bytes()
    refused = 0
    for position in range(len(original)):
        changed = bytearray(original)
        changed[position] ^= 1
        path.write_bytes(changed)
        try:
            found = read_description(checkpoint)
        except ValueError as error:
            assert "is not" in str(error)
            refused += 1
        else:
            assert found == written  # white space
    assert refused > 0.7 * len(original)


def test_sizes_and_contents_are_compared_by_share(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    files = describe_files(checkpoint, [checkpoint / "a.bin", checkpoint / "inner" / "b.bin"])
    assert find_missing(checkpoint, files) is None
    assert find_damage(checkpoint, files, 0, 1) is None
    (checkpoint / "inner" / "b.bin").write_bytes(bytes(range(255, -1, -1)))
    assert find_missing(checkpoint, files) is None
    assert find_damage(checkpoint, files, 0, 2) is None
    assert "b.bin is damaged" in (find_damage(checkpoint, files, 1, 2) or "")
    (checkpoint / "a.bin").write_bytes(b"")
    assert "a.bin has 0 bytes, and 256 were saved" in (find_missing(checkpoint, files) or "")
    assert json.loads(json.dumps(files))["a.bin"][0] == 256

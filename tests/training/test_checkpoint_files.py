"""A checkpoint is data: nothing in it is executed, what is not wanted any more goes, what failed leaves nothing."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from distributed import run_ranks
from training_job import Data, Run, run, successful

from tempo_megatron.training.checkpoint import check_all_ranks_load, check_all_ranks_share
from tempo_megatron.training.checkpoint_files.files import find_fault, read_tensors
from tempo_megatron.training.checkpoint_files.folder import CheckpointFolder, name_checkpoint
from tempo_megatron.training.checkpoint_files.integrity import find_damage, read_description

SIZES = ["--train-iters", "2", "--global-batch-size", "4"]


class Intruder:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.path),)


def config(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


@pytest.fixture(scope="module")
def saved(data: Data, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoints of two data-parallel ranks, by ZeRO stage."""
    folders = {}
    for stage in (0, 1, 2, 3):
        folder = tmp_path_factory.mktemp(f"stage{stage}")
        successful(run(data, folder, *SIZES, "--save", str(folder / "save"), world_size=2, config=config(stage)))
        folders[stage] = folder / "save"
    return folders


FILES = [
    (0, "mp_rank_00_model_states.pt"),
    (1, "mp_rank_00_model_states.pt"),
    (1, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    (2, "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    (3, "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    (3, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    (1, "rank_00001.pt"),
]


def resume(data: Data, folder: Path, stage: int) -> Run:
    options = [*SIZES, "--train-iters", "4", "--lr-decay-iters", "2", "--load", str(folder / "save")]
    return run(data, folder, *options, world_size=2, config=config(stage))


def intrude(path: Path, trace: Path) -> None:
    content = torch.load(path, weights_only=False)
    torch.save({**content, "intruder": Intruder(trace)}, path)


@pytest.mark.slow
def test_every_file_is_looked_at(saved: dict[int, Path], tmp_path: Path) -> None:
    """By the reading that comes before every --load."""
    trace = tmp_path / "executed"
    for stage, name in FILES:
        folder = tmp_path / f"{stage} {name}"
        shutil.copytree(saved[stage] / "iter_0000002", folder)
        files = read_description(folder)["files"]
        assert find_damage(folder, files, 0, 1) is None
        intrude(folder / name, trace)
        said = find_damage(folder, files, 0, 1) or ""
        assert f"{name} holds posix.mknod where a checkpoint has only tensors and numbers" in said
    assert not trace.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "name"), [FILES[-2], FILES[-1]], ids=["ZeRO 3", "ZeRO 1"])
def test_nothing_in_a_checkpoint_is_executed(
    data: Data, saved: dict[int, Path], tmp_path: Path, stage: int, name: str
) -> None:
    shutil.copytree(saved[stage], tmp_path / "save")
    trace = tmp_path / "executed"
    intrude(tmp_path / "save" / "iter_0000002" / name, trace)
    result = resume(data, tmp_path, stage)
    assert result.exit_codes == [1, 1]
    assert not trace.exists()
    assert f"{name} holds posix.mknod where a checkpoint has only tensors and numbers" in result.output
    for rank in (0, 1):
        assert "Traceback" not in (tmp_path / f"rank{rank}.log").read_text()


def test_the_reader_itself_executes_nothing(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "intruder": Intruder(tmp_path / "executed")}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="bad.pt holds posix.mknod where a checkpoint has only tensors"):
        read_tensors(tmp_path / "bad.pt")
    assert not (tmp_path / "executed").exists()


class ByName:
    """What a Python from 3.11.0 to 3.11.3 writes for a member of an enum."""

    def __init__(self, cls: Any, name: str) -> None:
        self.call = getattr, (cls, name)

    def __reduce__(self) -> Any:
        return self.call


def test_a_member_of_deepspeeds_enum_may_be_written_by_its_name(tmp_path: Path) -> None:
    torch.save({"zero_stage": ByName(ZeroStageEnum, "gradients")}, tmp_path / "state.pt")
    assert find_fault(tmp_path / "state.pt") is None
    assert read_tensors(tmp_path / "state.pt") == {"zero_stage": ZeroStageEnum.gradients}


@pytest.mark.parametrize(
    ("cls", "name"), [(ZeroStageEnum, "__class__"), (ZeroStageEnum, "mro"), (LossScaler, "__init__")]
)
def test_nothing_else_is_reached_by_its_name(tmp_path: Path, cls: Any, name: str) -> None:
    torch.save({"state": ByName(cls, name)}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="state.pt .*give another"):
        read_tensors(tmp_path / "state.pt")


@pytest.mark.slow
def test_a_damaged_or_missing_file_is_one_sentence(data: Data, saved: dict[int, Path], tmp_path: Path) -> None:
    shutil.copytree(saved[1], tmp_path / "save")
    path = tmp_path / "save" / "iter_0000002" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "is damaged" in (find_fault(path) or "")
    with pytest.raises(ValueError, match="cannot be read"):
        read_tensors(path)
    cut = resume(data, tmp_path, 1)
    assert cut.exit_codes == [1, 1] and "is damaged or not a file of torch.save" in cut.output
    assert f"--load {tmp_path / 'save'} holds no checkpoint that is whole" in cut.output
    path.unlink()
    gone = resume(data, tmp_path, 1)
    assert gone.exit_codes == [1, 1] and f"lacks {path.name}; give another folder" in gone.output
    assert "Traceback" not in cut.output + gone.output


@pytest.mark.slow
def test_only_the_newest_checkpoints_stay(data: Data, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save"), "--save-interval", "1"]
    successful(run(data, tmp_path, *save, "--keep-checkpoints", "2", "--exit-interval", "4"))
    names = sorted(path.name for path in (tmp_path / "save").glob("iter_*"))
    assert names == ["iter_0000003", "iter_0000004"]
    successful(run(data, tmp_path, *save, "--keep-checkpoints", "1", "--exit-interval", "5"))
    assert [path.name for path in (tmp_path / "save").glob("iter_*")] == ["iter_0000005"]


def make(folder: CheckpointFolder, iteration: int) -> None:
    (folder.path / folder.begin(iteration) / "weights").write_text(str(iteration))
    folder.commit(iteration)


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path)
    for iteration in (1, 2, 3):
        make(folder, iteration)
    with monkeypatch.context() as patch:  # kill -9 where the files would go
        patch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            folder.remove_older_than_newest(1)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [
        "iter_0000001.old.tmp", "iter_0000002", "iter_0000003",
    ]  # fmt: skip
    make(folder, 4)
    assert not list(tmp_path.glob("*.tmp"))


def test_what_came_after_the_latest_checkpoint_does_not_count(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for iteration in (5, 10, 15):
        make(folder, iteration)
    (tmp_path / "latest").write_text("iter_0000010")  # a user goes on from there
    make(folder, 11)
    folder.remove_older_than_newest(2)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [name_checkpoint(n) for n in (10, 11, 15)]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_save_leaves_nothing_and_the_checkpoint_before(data: Data, tmp_path: Path, rank: int) -> None:
    """Rank `rank` cannot write its optimizer states: a folder stands where the file has to go."""
    save = tmp_path / "save"
    options = [*SIZES, "--train-iters", "4", "--save", str(save), "--load", str(save)]
    successful(run(data, tmp_path, *options, "--exit-interval", "2", world_size=2, config=config(1)))
    blocked = functools.partial(block_the_file, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    failed = run(data, tmp_path, *options, world_size=2, config=config(1), before=blocked)
    assert failed.exit_codes == [1, 1]
    assert "the checkpoint of step 4 cannot be written" in failed.output
    assert "Traceback" not in failed.output
    assert not list(save.glob("*.tmp")) and (save / "latest").read_text().strip() == "iter_0000002"
    assert "going on after step 2" in successful(run(data, tmp_path, *options, world_size=2, config=config(1))).output


def block_the_file(name: str) -> None:
    """In a rank: put a folder where the checkpoint's file `name` goes."""
    begin = CheckpointFolder.begin

    def blocked(self: CheckpointFolder, iteration: int) -> str:
        folder = begin(self, iteration)
        (self.path / folder / name).mkdir()
        return folder

    CheckpointFolder.begin = blocked  # type: ignore[method-assign]


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
    check_all_ranks_load({"checkpoint": "iter_1"}, root)
    check_all_ranks_load(None, root)
    try:
        check_all_ranks_load({"checkpoint": f"iter_{os.environ['RANK']}"}, root)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_found_different_checkpoints_are_told_so(tmp_path: Path) -> None:
    for said in run_ranks(load, 2, str(tmp_path)):
        assert "does not name one checkpoint to every rank" in said


def test_the_loss_scalers_of_fp16_are_read(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 2, False, dtype=torch.half)
    torch.save({"loss_scaler": scaler}, tmp_path / "optim_states.pt")
    assert find_fault(tmp_path / "optim_states.pt") is None
    assert vars(read_tensors(tmp_path / "optim_states.pt")["loss_scaler"]) == vars(scaler)


def test_a_folder_without_latest_goes_on_from_its_newest_checkpoint(
    data: Data, saved: dict[int, Path], tmp_path: Path
) -> None:
    shutil.copytree(saved[1], tmp_path / "save")
    (tmp_path / "save" / "latest").unlink()
    save = tmp_path / "save"
    anew = run(data, tmp_path, *SIZES, "--save", str(save), world_size=2, config=config(1))
    assert anew.exit_codes == [1, 1]
    assert f"--save {save} already holds checkpoints up to iter_0000002; add --load {save}" in anew.output
    result = successful(resume(data, tmp_path, 1))
    assert "going on after step 2" in result.output and "the newest checkpoint there: no file latest" in result.output

"""A checkpoint is data: nothing in it is executed, what is not wanted any more goes, what failed leaves nothing."""

from __future__ import annotations

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
from tempo_megatron.training.checkpoint_files.folder import CheckpointFolder
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
    for stage in (0, 1, 3):
        folder = tmp_path_factory.mktemp(f"stage{stage}")
        successful(run(data, folder, *SIZES, "--save", str(folder / "save"), world_size=2, config=config(stage)))
        folders[stage] = folder / "save"
    return folders


FILES = [
    (0, "mp_rank_00_model_states.pt"),
    (1, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    (3, "zero_pp_rank_1_mp_rank_00_model_states.pt"),
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
def test_nothing_in_a_checkpoint_is_executed(data: Data, saved: dict[int, Path], tmp_path: Path) -> None:
    shutil.copytree(saved[3], tmp_path / "save")
    trace, name = tmp_path / "executed", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    intrude(tmp_path / "save" / "iter_0000002" / name, trace)
    result = resume(data, tmp_path, 3)
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
    (tmp_path / "bad.pt").write_bytes((tmp_path / "bad.pt").read_bytes()[:-1000])
    assert "is damaged" in (find_fault(tmp_path / "bad.pt") or "")
    with pytest.raises(ValueError, match="cannot be read"):
        read_tensors(tmp_path / "bad.pt")


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
def test_only_the_newest_checkpoints_stay(data: Data, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "save"), "--save-interval", "1", "--keep-checkpoints", "2"]
    successful(run(data, tmp_path, *save, "--exit-interval", "4"))
    names = sorted(path.name for path in (tmp_path / "save").glob("iter_*"))
    assert names == ["iter_0000003", "iter_0000004"]


@pytest.mark.slow
def test_a_failed_save_leaves_nothing_and_the_checkpoint_before(data: Data, tmp_path: Path) -> None:
    """Rank 0 cannot write its optimizer states: a folder stands where the file has to go. In test_kills.py rank 1's
    disk is full."""
    save = tmp_path / "save"
    options = [*SIZES, "--train-iters", "4", "--save", str(save), "--load", str(save)]
    successful(run(data, tmp_path, *options, "--exit-interval", "2", world_size=2, config=config(1)))
    failed = run(data, tmp_path, *options, world_size=2, config=config(1), before=block_a_file)
    assert failed.exit_codes == [1, 1]
    assert "the checkpoint of step 4 cannot be written" in failed.output
    assert "Traceback" not in failed.output
    assert not list(save.glob("*.tmp")) and (save / "latest").read_text().strip() == "iter_0000002"


def block_a_file() -> None:
    """In a rank: put a folder where a file of the checkpoint goes."""
    begin = CheckpointFolder.begin

    def blocked(self: CheckpointFolder, iteration: int) -> str:
        folder = begin(self, iteration)
        (self.path / folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").mkdir()
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

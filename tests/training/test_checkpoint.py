"""Saving and resuming: bit for bit the run it was, from the newest whole checkpoint, of which nothing is executed."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_job import BF16, Call, Data, Run, run, successful, zero

from tempo_megatron.training.checkpoint_files.folder import name_checkpoint
from tempo_megatron.training.team import Team

SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--global-batch-size", "4"]


# ZeRO 1 is resumed bit for bit below too, tensor parallelism with ZeRO 3 and Tempo in test_trainer_models.py, and every
# stage in test_batch_ramp.py.
@pytest.mark.parametrize(
    ("world_size", "extra", "config"),
    [
        pytest.param(1, [], zero(0), id="one process, ZeRO 0"),
        pytest.param(2, SP, {**zero(1), **BF16}, id="TP 2 + SP, ZeRO 1, bf16", marks=pytest.mark.slow),
    ],
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


SIZES = ["--train-iters", "6", "--global-batch-size", "4"]
SAVING = ["--save-interval", "2"]


@pytest.fixture(scope="module")
def whole(data: Data, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A finished run of two ranks with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    finished = successful(
        run(data, folder, *SIZES, *SAVING, "--save", str(folder / "save"), world_size=2, config=zero(1))
    )
    return folder / "save", finished


def resume(data: Data, folder: Path, *more: str, world_size: int = 2, **options: Any) -> Run:
    load = ["--load", str(folder / "save")]
    return run(data, folder, *SIZES, *load, *more, world_size=world_size, config=zero(1), **options)


def flip_bit(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 4
    path.write_bytes(content)


def intrude(path: Path) -> None:
    """Let a file of a checkpoint run code when it is unpickled, whose trace lies beside the folder of checkpoints."""
    content = torch.load(path, weights_only=False)
    torch.save({**content, "intruder": Call(os.mknod, str(path.parents[2] / "executed"))}, path)


INTRUDED = "holds posix.mknod where a checkpoint has only tensors and numbers"
# What is wrong with the newest checkpoint and with the one before it, what is said of each: before the ranks meet, and
# when each has read its share of the files.
FAULTS: list[list[tuple[str, Callable[[Path], object], str]]] = [
    [
        ("run.json", lambda path: flip_bit(path, 0.5), " is not "),
        ("rank_00001.pt", lambda path: path.write_bytes(path.read_bytes()[:-100]), "or not a file of torch.save"),
    ],
    [
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda path: flip_bit(path, 0.5), "is damaged"),
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", intrude, INTRUDED),
    ],
]


@pytest.mark.slow
@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: " and ".join(name for name, _, _ in faults))
def test_the_checkpoint_before_damaged_ones_is_taken(
    data: Data, whole: tuple[Path, Run], tmp_path: Path, faults: list[tuple[str, Callable[[Path], object], str]]
) -> None:
    saved, finished = whole
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    for step, (name, damage, _) in zip((6, 4), faults, strict=False):
        damage(save / f"iter_{step:07d}" / name)
    resumed = successful(resume(data, tmp_path, *SAVING, "--save", str(save)))
    for step, (_, _, words) in zip((6, 4), faults, strict=False):
        assert words in resumed.output and f"it is called iter_{step:07d}.damaged now" in resumed.output
        assert (save / f"iter_{step:07d}.damaged").is_dir()
    assert "going on after step 2" in resumed.output and "Traceback" not in resumed.output
    assert resumed.losses_hex == finished.losses_hex[2:]
    assert (save / "latest").read_text() == "iter_0000006\n" and not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_a_folder_of_another_run_is_left_as_it_is(data: Data, whole: tuple[Path, Run], tmp_path: Path) -> None:
    """Two damaged ones, in another layout, with nothing to save."""
    shutil.copytree(whole[0], tmp_path / "save")
    flip_bit(tmp_path / "save" / "iter_0000006" / "mp_rank_00_model_states.pt", 0.9)
    flip_bit(tmp_path / "save" / "iter_0000004" / "rank_00000.pt", 0.3)
    resumed = successful(resume(data, tmp_path, world_size=1))
    assert resumed.output.count("the checkpoint before it is taken") == 2
    assert "going on after step 2" in resumed.output
    names = {path.name for path in (tmp_path / "save").glob("iter_*")}
    assert names == {"iter_0000002", "iter_0000004", "iter_0000006"}
    assert (tmp_path / "save" / "latest").read_text() == "iter_0000006\n"


def delay_failure(rank: int) -> None:
    """Let `rank` hear of the other's failure after it has said its own, and before it passes that on."""
    if int(os.environ["RANK"]) == rank:
        fail = Team.fail

        def fail_later(*arguments: Any, **options: Any) -> Any:
            time.sleep(2)
            return fail(*arguments, **options)

        Team.fail = fail_later  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("later", [0, 1])
def test_without_a_whole_one_every_fault_is_named(
    data: Data, whole: tuple[Path, Run], tmp_path: Path, later: int
) -> None:
    shutil.copytree(whole[0], tmp_path / "save")
    for step in (2, 4, 6):
        flip_bit(tmp_path / "save" / f"iter_{step:07d}" / "rank_00000.pt", 0.5)
    failed = resume(data, tmp_path, before=functools.partial(delay_failure, later))
    assert failed.exit_codes == [1, 1] and "Traceback" not in failed.output
    assert "holds no checkpoint that is whole" in failed.output and failed.output.count("rank_00000.pt is damaged") == 3


@pytest.mark.slow
def test_only_the_newest_checkpoints_stay(data: Data, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "save"), "--save-interval", "1", "--keep-checkpoints", "2"]
    successful(run(data, tmp_path, *save, "--exit-interval", "4"))
    names = sorted(path.name for path in (tmp_path / "save").glob("iter_*"))
    assert names == ["iter_0000003", "iter_0000004"]


LONGER = ["--train-iters", "8", "--lr-decay-iters", "6"]


def test_a_folder_without_latest_goes_on_from_its_newest_checkpoint(
    data: Data, whole: tuple[Path, Run], tmp_path: Path
) -> None:
    save = tmp_path / "save"
    shutil.copytree(whole[0], save)
    (save / "latest").unlink()
    anew = run(data, tmp_path, *SIZES, "--save", str(save), world_size=2, config=zero(1))
    assert anew.exit_codes == [1, 1]
    assert f"--save {save} already holds checkpoints up to iter_0000006; add --load {save}" in anew.output
    result = successful(resume(data, tmp_path, *LONGER))
    assert "going on after step 6" in result.output and "the newest checkpoint there: no file latest" in result.output

"""A damaged checkpoint is named, and the one before it taken: any bit of any file, and nothing is lost."""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_job import Data, Run, run, successful

from tempo_megatron.training.checkpoint_files.integrity import (
    describe_files,
    find_damage,
    find_missing,
    read_description,
    write_description,
)
from tempo_megatron.training.watch.team import Team

SIZES = ["--train-iters", "6", "--global-batch-size", "4"]
SAVING = ["--save-interval", "2"]
ZERO1: dict[str, Any] = {"zero_optimization": {"stage": 1}}


@pytest.fixture(scope="module")
def whole(data: Data, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A finished run of two ranks with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    finished = successful(
        run(data, folder, *SIZES, *SAVING, "--save", str(folder / "save"), world_size=2, config=ZERO1)
    )
    return folder / "save", finished


def resume(data: Data, folder: Path, *more: str, world_size: int = 2, **options: Any) -> Run:
    load = ["--load", str(folder / "save")]
    return run(data, folder, *SIZES, *load, *more, world_size=world_size, config=ZERO1, **options)


def flip_bit(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 4
    path.write_bytes(content)


# What is wrong with the newest checkpoint, and with the one before it if anything is; what is said of each.
FAULTS: list[list[tuple[str, Callable[[Path], object], str]]] = [
    [("run.json", lambda path: flip_bit(path, 0.5), " is not ")],
    [
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda path: flip_bit(path, 0.5), "is damaged"),
        ("run.json", lambda path: path.write_text(""), "is not a checkpoint of Tempo's trainer"),
    ],
    [
        ("rank_00001.pt", lambda path: path.write_bytes(path.read_bytes()[:-100]), "or not a file of torch.save"),
        ("mp_rank_00_model_states.pt", Path.unlink, "lacks mp_rank_00_model_states.pt"),
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
    step = 6 - 2 * len(faults)
    assert f"going on after step {step}" in resumed.output and "Traceback" not in resumed.output
    assert resumed.losses_hex == finished.losses_hex[step:]
    assert (save / "latest").read_text() == "iter_0000006\n"


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
            # White space, the name or format of an earlier version that had no checksum.
            assert {**found, "format": 0} == {**written, "format": 0} or found["format"] == 2
    assert refused > 0.7 * len(original)


def test_sizes_and_contents_are_compared_by_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path)
    files = describe_files(checkpoint, [checkpoint / "a.bin", checkpoint / "inner" / "b.bin"])
    assert find_missing(checkpoint, files) is None
    monkeypatch.setattr("tempo_megatron.training.checkpoint_files.files.find_fault", lambda path: None)
    assert find_damage(checkpoint, files, 0, 1) is None
    flip_bit(checkpoint / "inner" / "b.bin", 0.5)
    assert find_missing(checkpoint, files) is None
    assert find_damage(checkpoint, files, 0, 2) is None
    assert "b.bin is damaged" in (find_damage(checkpoint, files, 1, 2) or "")
    (checkpoint / "a.bin").write_bytes(b"")
    assert "a.bin has 0 bytes, and 256 were saved" in (find_missing(checkpoint, files) or "")
    assert json.loads(json.dumps(files))["a.bin"][0] == 256

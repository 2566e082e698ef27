"""kill -9 of one rank or another, between steps, inside a save, while a copy is written: nothing is lost or differs."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from training_job import Data, FullDisk, Run, run, successful, zero

from tempo_megatron.training.checkpoint_files import files
from tempo_megatron.training.checkpoint_files.files import copy_to_host
from tempo_megatron.training.metrics import read_metrics

STEPS = 20


@pytest.fixture(scope="module")
def whole(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("whole")
    return successful(run(data, folder, "--train-iters", str(STEPS), world_size=2, config=zero(1)))


@dataclasses.dataclass
class Kill:
    """Kills one rank, or sends it another signal, a moment after a save has begun, or after one has ended."""

    rank: int
    save: Path
    inside_a_save: bool
    delay_s: float
    signal_number: int = signal.SIGKILL

    def __call__(self) -> None:
        if int(os.environ["RANK"]) == self.rank:
            threading.Thread(target=self._wait_and_kill, args=(set(self._list()),), daemon=True).start()

    def _list(self) -> list[str]:
        names = os.listdir(self.save) if self.save.exists() else []
        return [name for name in names if name.startswith("iter_") and name.endswith(".tmp") == self.inside_a_save]

    def _wait_and_kill(self, before: set[str]) -> None:
        while not set(self._list()) - before:
            time.sleep(0.001)
        time.sleep(self.delay_s)
        os.kill(os.getpid(), self.signal_number)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_a_run_that_is_killed_again_and_again_goes_on_as_if_it_never_was(
    data: Data, whole: Run, tmp_path: Path, kills: int
) -> None:
    draw = random.Random(7)
    sizes = ["--train-iters", str(STEPS), "--save-interval", "1", "--fault-timeout", "10"]
    save = tmp_path / "save"
    options = [*sizes, "--save", str(save), "--load", str(save), "--metrics-file", str(tmp_path / "m.jsonl")]
    inside, reached = 0, [0]
    for number in range(kills):
        kill = Kill(draw.randrange(2), save, number % 2 == 0, draw.random() * (0.1 if number % 2 == 0 else 0.3))
        start = time.monotonic()
        killed = run(data, tmp_path / "killed", *options, world_size=2, config=zero(1), before=kill, timeout_s=400)
        if set(killed.exit_codes) == {0}:
            break
        assert killed.exit_codes[kill.rank] == -9 and killed.exit_codes[1 - kill.rank] == 1, killed.output
        assert "Traceback" not in killed.output and time.monotonic() - start < 400
        inside += bool(list(save.glob("iter_*.tmp")))
        latest = save / "latest"
        reached.append(int(latest.read_text().strip().removeprefix("iter_")) if latest.exists() else 0)
    assert reached == sorted(reached)  # no checkpoint was lost
    resumed = successful(run(data, tmp_path / "killed", *options, world_size=2, config=zero(1), timeout_s=400))
    print(f"{len(reached) - 1} kills, {inside} of them inside a save; steps reached: {reached[1:]}")
    assert "no checkpoint that is whole" not in resumed.output and "is damaged" not in resumed.output
    assert Run([0], "", read_metrics(tmp_path / "m.jsonl")).losses_hex == whole.losses_hex


@pytest.mark.slow
def test_a_full_disk_keeps_the_checkpoint_before(data: Data, whole: Run, tmp_path: Path) -> None:
    """Without --async-save the same thread writes, and the rank waits for it."""
    sizes, save = ["--train-iters", str(STEPS), "--save-interval", "2", "--async-save"], tmp_path / "save"
    options = [*sizes, "--save", str(save), "--load", str(save)]
    successful(run(data, tmp_path, *options, "--exit-interval", "2", world_size=2, config=zero(1)))
    failed = run(data, tmp_path, *options, world_size=2, config=zero(1), before=FullDisk(1, 100_000))
    assert failed.exit_codes == [1, 1] and "Traceback" not in failed.output
    assert "the checkpoint of step 4 cannot be written" in failed.output
    assert sorted(path.name for path in save.glob("iter_*")) == ["iter_0000002"]
    resumed = successful(run(data, tmp_path, *options, "--save-interval", str(STEPS), world_size=2, config=zero(1)))
    assert resumed.losses_hex == whole.losses_hex


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_on_one_rank_or_a_launchers_end_saves_on_all(
    data: Data, whole: Run, tmp_path: Path, number: int
) -> None:
    save = tmp_path / "save"
    stop = Kill(1, save, inside_a_save=False, delay_s=0.05, signal_number=number)
    options = ["--train-iters", str(STEPS), "--save-interval", "3", "--save", str(save)]
    stopped = successful(run(data, tmp_path, *options, world_size=2, config=zero(1), before=stop))
    reached = int((save / "latest").read_text().strip().removeprefix("iter_"))
    assert f"stopped by a signal to another rank after step {reached}" in stopped.output and 3 <= reached < STEPS
    assert stopped.losses_hex == whole.losses_hex[:reached]


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_first_save_is_one_sentence(data: Data, tmp_path: Path) -> None:
    """What DeepSpeed copies to a checkpoint does not fit either: zero_to_fp32.py has 30 kB."""
    few_samples = ["--seq-length", "512", "--micro-batch-size", "1"]  # whose indices are small files
    options = ["--train-iters", "4", "--save-interval", "2", "--save", str(tmp_path / "save"), *few_samples]
    failed = run(data, tmp_path, *options, config=zero(1), before=FullDisk(0, 20_000))
    assert failed.exit_codes == [1] and "Traceback" not in failed.output
    assert "the checkpoint of step 2 cannot be written" in failed.output, failed.output
    assert list((tmp_path / "save").glob("iter_*")) == []


IN_BACKGROUND = f"--train-iters {STEPS} --save-interval 4 --async-save --fault-timeout 10".split()


def write_slowly() -> None:
    """Every file of a checkpoint takes a while, as on a slow disk, so that steps are taken meanwhile."""
    save = torch.save

    def save_slowly(*args: object) -> None:
        time.sleep(0.3)
        save(*args)

    files.torch.save = save_slowly  # type: ignore[attr-defined]


def kill_rank_1_in_the_second_save(folder: Path) -> None:
    write_slowly()
    if os.environ["RANK"] == "1":
        threading.Thread(target=wait_and_kill, args=(folder,), daemon=True).start()


def wait_and_kill(folder: Path) -> None:
    while not (folder / "iter_0000008.tmp").exists():
        time.sleep(0.001)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_while_a_copy_is_written_loses_nothing(data: Data, whole: Run, tmp_path: Path) -> None:
    save = tmp_path / "save"
    options = [*IN_BACKGROUND, "--save", str(save), "--load", str(save)]
    before = functools.partial(kill_rank_1_in_the_second_save, save)
    killed = run(data, tmp_path, *options, world_size=2, config=zero(1), before=before)
    assert killed.exit_codes == [1, -9] and killed.output.count("error on rank 1 (") == 1
    lines = killed.output.splitlines()
    copied, saved = (
        next(number for number, line in enumerate(lines) if line.startswith(f"{what} the checkpoint of step 4"))
        for what in ("copied", "saved")
    )
    assert any(line.startswith(f"step  5/{STEPS}") for line in lines[copied:saved])
    assert (save / "latest").read_text() == "iter_0000004\n" and (save / "iter_0000008.tmp").exists()
    resumed = successful(run(data, tmp_path, *options, world_size=2, config=zero(1)))
    assert "going on after step 4" in resumed.output
    assert resumed.losses_hex == whole.losses_hex


def test_a_copy_shares_storages_and_stays_as_it_was() -> None:
    flat = torch.arange(1000, dtype=torch.float32)
    state = {"flat": flat, "parts": [flat[:10], flat[10:].view(99, 10).t()], "step": 3, "empty": torch.empty(0)}
    written, copied = io.BytesIO(), copy_to_host(state)
    torch.save(state, written)
    flat.zero_()
    again = io.BytesIO()
    torch.save(copied, again)
    assert len(again.getvalue()) == len(written.getvalue())
    for buffer in (written, again):
        buffer.seek(0)
        loaded = torch.load(buffer)
        assert torch.equal(loaded["parts"][1].t().reshape(-1), torch.arange(10, 1000, dtype=torch.float32))
    assert copied["parts"][0].untyped_storage().data_ptr() == copied["flat"].untyped_storage().data_ptr()

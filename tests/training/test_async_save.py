"""--async-save: a copy is written while the training goes on; a kill meanwhile loses nothing."""

from __future__ import annotations

import functools
import io
import os
import signal
import threading
import time
from pathlib import Path

import torch
from training_job import Data, run, successful, zero

from tempo_megatron.training.checkpoint_files import files
from tempo_megatron.training.checkpoint_files.files import copy_to_host

OPTIONS = ["--train-iters", "12", "--save-interval", "4", "--async-save", "--fault-timeout", "10"]


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
        threading.Thread(target=_wait_and_kill, args=(folder,), daemon=True).start()


def _wait_and_kill(folder: Path) -> None:
    while not (folder / "iter_0000008.tmp").exists():
        time.sleep(0.001)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_while_a_copy_is_written_loses_nothing(data: Data, tmp_path: Path) -> None:
    save = tmp_path / "save"
    options = [*OPTIONS, "--save", str(save), "--load", str(save)]
    before = functools.partial(kill_rank_1_in_the_second_save, save)
    killed = run(data, tmp_path, *options, world_size=2, config=zero(1), before=before)
    assert killed.exit_codes == [1, -9] and killed.output.count("error on rank 1 (") == 1
    lines = killed.output.splitlines()
    copied, saved = (
        next(number for number, line in enumerate(lines) if line.startswith(f"{what} the checkpoint of step 4"))
        for what in ("copied", "saved")
    )
    assert any(line.startswith("step  5/12") for line in lines[copied:saved])
    assert (save / "latest").read_text() == "iter_0000004\n" and (save / "iter_0000008.tmp").exists()
    resumed = successful(run(data, tmp_path, *options, world_size=2, config=zero(1)))
    assert "going on after step 4" in resumed.output
    whole = successful(run(data, tmp_path / "whole", "--train-iters", "12", world_size=2, config=zero(1)))
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

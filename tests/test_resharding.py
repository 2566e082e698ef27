"""A run goes on in another layout: the same weights and moments bit for bit, the same samples, the same masks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import BF16, Layout, join, keep_states
from training_job import Data, Run, make_data, run, successful

STEPS, SAVED = 6, 3
# A vocabulary of 512 tokens and 540 rows, which another TP would pad to another number.
COMMON = [
    "--global-batch-size", "8", "--micro-batch-size", "1", "--train-iters", str(STEPS),
    "--make-vocab-size-divisible-by", "60", "--seq-length", "32",
]  # fmt: skip
TEMPO = ["--use-tempo", "--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
WITHOUT_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data"))


class Sources:
    """Runs of STEPS steps with a checkpoint after SAVED, made when they are asked for."""

    def __init__(self, data: Data, folder: Path) -> None:
        self.data, self.folder = data, folder
        self.get = functools.cache(self._make)

    def _make(self, layout: Layout, options: tuple[str, ...], bf16: bool = False) -> tuple[Path, Run]:
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        whole = go(self.data, folder, layout, *options, "--save", str(folder / "save"), "--save-interval", str(SAVED),
                   bf16=bf16)  # fmt: skip
        (folder / "save" / "latest").write_text(f"iter_{SAVED:07d}\n")
        return folder, whole


@pytest.fixture(scope="module")
def sources(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(data, tmp_path_factory.mktemp("sources"))


def go(data: Data, folder: Path, layout: Layout, *options: str, bf16: bool = False, **more: Any) -> Run:
    config = layout.config(**(BF16 if bf16 else {}), **more)
    arguments = [*COMMON, *layout.arguments(), *options]
    return successful(run(data, folder, *arguments, world_size=layout.world_size, config=config, before=keep_states))


def assert_same_states(first: Path, second: Path, is_gated: bool = False) -> None:
    ours, theirs = join(first, is_gated), join(second, is_gated)
    assert ours.keys() == theirs.keys() and len(ours) > 60
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different


L = Layout
PAIRS = [
    (L(1, 1, 0), L(2, 2, 1, sp=True)),
    (L(2, 2, 1, sp=True), L(1, 1, 0)),
    (L(1, 2, 2), L(4, 1, 3)),
    (L(4, 1, 1), L(1, 2, 3)),
    (L(2, 2, 3, sp=True), L(4, 1, 0, sp=True)),
]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda layout: str(layout))
@pytest.mark.parametrize("options", [WITHOUT_DROPOUT, TEMPO], ids=["stock p 0", "Tempo p 0.1"])
def test_a_run_goes_on(
    data: Data, sources: Sources, tmp_path: Path, source: Layout, target: Layout, options: list[str]
) -> None:
    folder, whole = sources.get(source, tuple(options))
    resumed = go(data, tmp_path, target, *options, "--load", str(folder / "save"))
    print([float(f"{abs(a - b) / a:.2e}") for a, b in zip(resumed.losses, whole.losses[SAVED:], strict=True)])
    assert_same_states(tmp_path / "loaded", folder / f"saved{SAVED}")
    assert f"going on after step {SAVED}" in resumed.output
    assert resumed.losses == pytest.approx(whole.losses[SAVED:], rel=1e-5)

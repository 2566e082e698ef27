"""Runs of pretrain_gpt.py that are stopped and go on from Megatron's own checkpoints, with Tempo and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_runs import Run, list_names, run_all_sizes, with_sample

pytestmark = pytest.mark.slow

# TP 2 reads what one process wrote; how one process goes on itself is for --exhaustive.
_LAYOUTS = with_sample(("torch", "torch_dist", "TP 2"), ("TP 2",))
_STEPS = "--train-iters 4 --optimizer adam --lr 0.001"
_USES = {"stock": "", "tempo": "--use-tempo", "dropout": "--attention-dropout 0.1 --hidden-dropout 0.1 --use-tempo"}
# What goes on -> (what it was saved by, as what it goes on).
_DIRECTIONS = {
    "stock to tempo": ("stock", "tempo"),
    "tempo to stock": ("tempo", "stock"),
    "dropout": ("dropout", "dropout"),
}


def name_kind(layout: str) -> str:
    """The format of the checkpoint that a layout reads."""
    return "torch_dist" if layout == "TP 2" else layout


@pytest.fixture(scope="module")
def losses(
    request: pytest.FixtureRequest, megatron_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[int, float]]:
    """Of the last rank of each run, by step."""
    folder = tmp_path_factory.mktemp("resume")
    runs: dict[str, tuple[int, str]] = {}
    for layout in list_names(request, megatron_root):
        kind, (size, parallel) = (
            name_kind(layout),
            (2, "--tensor-model-parallel-size 2") if layout == "TP 2" else (1, ""),
        )
        for side, use in _USES.items():
            save = f"--ckpt-format {kind} --save {folder}/{side}-{kind} --save-interval 2"
            runs[f"{side}, {kind}"] = (1, f"{_STEPS} {use} {save}")
        for name, (saved, goes_on) in _DIRECTIONS.items():
            load = f"--ckpt-format {kind} --load {folder}/{saved}-{kind} --ckpt-step 2"
            runs[f"{name} in {layout}"] = (size, f"{_STEPS} {parallel} {_USES[goes_on]} {load}")
    results = run_all_sizes(
        megatron_root, ((size, Run(name, arguments)) for name, (size, arguments) in runs.items()), folder
    )
    assert not [rank["error"] for ranks in results.values() for rank in ranks if rank["error"]]
    return {name: ranks[-1]["losses"] for name, ranks in results.items()}


@pytest.mark.parametrize("name", _LAYOUTS)
@pytest.mark.parametrize("direction", _DIRECTIONS)
def test_losses_and_masks_go_on_as_uninterrupted(
    losses: dict[str, dict[int, float]], direction: str, name: str
) -> None:
    expected = losses[f"{_DIRECTIONS[direction][0]}, {name_kind(name)}"]
    stock = losses[f"stock, {name_kind(name)}"]
    assert sorted(expected) == [1, 2, 3, 4]
    if direction == "dropout":
        assert expected[3] != pytest.approx(stock[3], rel=1e-4)
    else:
        assert expected == pytest.approx(stock, rel=2.5e-7)
    # A resumed Megatron starts its mean of losses anew after its second step only.
    resumed = {3: expected[3], 4: (expected[3] + expected[4]) / 2}
    assert losses[f"{direction} in {name}"] == pytest.approx(resumed, rel=2.5e-7)

"""Runs of pretrain_gpt.py that are stopped and go on from Megatron's own checkpoints, with Tempo and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_runs import Run, list_names, run_all_sizes, with_sample

pytestmark = pytest.mark.slow

# TP 2 reads what one process wrote; how one process goes on itself is for --exhaustive.
_LAYOUTS = with_sample(("torch", "torch_dist", "TP 2"), ("TP 2",))
_STEPS = "--train-iters 5 --optimizer adam --lr 0.001"
_USES = {"stock": "", "tempo": "--use-tempo", "dropout": "--attention-dropout 0.1 --hidden-dropout 0.1 --use-tempo"}
# What goes on -> (what it was saved by, as what it goes on).
_DIRECTIONS = {"stock to tempo": ("stock", "tempo"), "tempo to stock": ("tempo", "stock")}


@pytest.fixture(scope="module")
def losses(
    request: pytest.FixtureRequest, megatron_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[int, float]]:
    """Of the last rank of each run, by step."""
    folder = tmp_path_factory.mktemp("resume")
    runs = {"uninterrupted": (1, _STEPS), "uninterrupted, dropout": (1, f"{_STEPS} {_USES['dropout']}")}
    for layout in list_names(request, megatron_root):
        kind = "torch_dist" if layout == "TP 2" else layout
        size, parallel = (2, "--tensor-model-parallel-size 2") if layout == "TP 2" else (1, "")
        for side, use in _USES.items():
            save = f"--ckpt-format {kind} --save {folder}/{side}-{kind} --save-interval 2 --exit-interval 2"
            runs[f"first {side}, {kind}"] = (1, f"{_STEPS} {use} {save}")
        for name, (saved, goes_on) in {**_DIRECTIONS, "dropout": ("dropout", "dropout")}.items():
            load = f"--ckpt-format {kind} --load {folder}/{saved}-{kind}"
            runs[f"{name}, {layout}"] = (size, f"{_STEPS} {parallel} {_USES[goes_on]} {load}")
    results = run_all_sizes(
        megatron_root, ((size, Run(name, arguments)) for name, (size, arguments) in runs.items()), folder
    )
    assert not [rank["error"] for ranks in results.values() for rank in ranks if rank["error"]]
    return {name: ranks[-1]["losses"] for name, ranks in results.items()}


def as_printed_after_resuming(expected: dict[int, float]) -> dict[int, float]:
    """Steps 3 to 5. A resumed Megatron starts its mean of losses anew after its second step only."""
    return {3: expected[3], 4: (expected[3] + expected[4]) / 2, 5: expected[5]}


@pytest.mark.parametrize("name", _LAYOUTS)
@pytest.mark.parametrize("direction", _DIRECTIONS)
def test_losses_go_on_as_uninterrupted(losses: dict[str, dict[int, float]], direction: str, name: str) -> None:
    expected = losses["uninterrupted"]
    assert sorted(expected) == [1, 2, 3, 4, 5]
    kind = "torch_dist" if name == "TP 2" else name
    first = losses[f"first {_DIRECTIONS[direction][0]}, {kind}"]
    assert first == pytest.approx({step: expected[step] for step in (1, 2)}, rel=2.5e-7)
    assert losses[f"{direction}, {name}"] == pytest.approx(as_printed_after_resuming(expected), rel=2.5e-7)


@pytest.mark.parametrize("name", _LAYOUTS)
def test_masks_go_on_where_the_samples_do(losses: dict[str, dict[int, float]], name: str) -> None:
    expected = losses["uninterrupted, dropout"]
    assert losses[f"dropout, {name}"] == pytest.approx(as_printed_after_resuming(expected), rel=2.5e-7)
    assert expected[3] != pytest.approx(losses["uninterrupted"][3], rel=1e-4)

"""Runs of pretrain_gpt.py that are stopped and go on from Megatron's own checkpoints, with Tempo and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_runs import Run, list_items, run_all, with_sample

pytestmark = pytest.mark.slow

_FORMATS = ("torch", "torch_dist")
# TP 2 reads what one process wrote.
_LAYOUTS = with_sample((*_FORMATS, "TP 2"), ("torch_dist", "TP 2"))
_STEPS = "--train-iters 5 --optimizer adam --lr 0.001"
_DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 --use-tempo"
_SIDES = {"stock": "", "tempo": "--use-tempo"}


@pytest.fixture(scope="module")
def losses(
    request: pytest.FixtureRequest, megatron_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[int, float]]:
    """Of the last rank of each run, by step."""
    folder = tmp_path_factory.mktemp("resume")
    chosen = {item.callspec.params["layout"] for item in list_items(request, megatron_root)}
    formats = [kind for kind in _FORMATS if kind in chosen or (kind == "torch_dist" and "TP 2" in chosen)]

    def save(side: str, kind: str) -> str:
        return f"--ckpt-format {kind} --save {folder}/{side}-{kind} --save-interval 2 --exit-interval 2"

    def load(side: str, kind: str) -> str:
        return f"--ckpt-format {kind} --load {folder}/{side}-{kind}"

    one = [Run("uninterrupted", _STEPS), Run("uninterrupted, dropout", f"{_STEPS} {_DROPOUT}")]
    for kind in formats:
        one += [Run(f"first {side}, {kind}", f"{_STEPS} {use} {save(side, kind)}") for side, use in _SIDES.items()]
        one.append(Run(f"stock to tempo, {kind}", f"{_STEPS} --use-tempo {load('stock', kind)}"))
        one.append(Run(f"tempo to stock, {kind}", f"{_STEPS} {load('tempo', kind)}"))
        one.append(Run(f"first dropout, {kind}", f"{_STEPS} {_DROPOUT} {save('dropout', kind)}"))
        one.append(Run(f"dropout, {kind}", f"{_STEPS} {_DROPOUT} {load('dropout', kind)}"))
    tp_2 = f"{_STEPS} --tensor-model-parallel-size 2"
    two = [
        Run("stock to tempo, TP 2", f"{tp_2} --use-tempo {load('stock', 'torch_dist')}"),
        Run("tempo to stock, TP 2", f"{tp_2} {load('tempo', 'torch_dist')}"),
        Run("dropout, TP 2", f"{tp_2} {_DROPOUT} {load('dropout', 'torch_dist')}"),
    ]
    found: dict[str, dict[int, float]] = {}
    for world_size, runs in ((1, one), (2, two)):
        results: dict[str, dict[str, Any]] = run_all(megatron_root, world_size, runs, folder / f"world-{world_size}")[
            -1
        ]
        assert not [result["error"] for result in results.values() if result["error"]]
        found |= {name: result["losses"] for name, result in results.items()}
    return found


def as_printed_after_resuming(expected: dict[int, float]) -> dict[int, float]:
    """Steps 3 to 5. A resumed Megatron starts its mean of losses anew after its second step only."""
    return {3: expected[3], 4: (expected[3] + expected[4]) / 2, 5: expected[5]}


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("direction", ["stock to tempo", "tempo to stock"])
def test_losses_go_on_as_uninterrupted(losses: dict[str, dict[int, float]], direction: str, layout: str) -> None:
    expected = losses["uninterrupted"]
    assert sorted(expected) == [1, 2, 3, 4, 5]
    kind = layout if layout in _FORMATS else "torch_dist"
    first = losses[f"first {direction.split()[0]}, {kind}"]
    assert first == pytest.approx({step: expected[step] for step in (1, 2)}, rel=2.5e-7)
    assert losses[f"{direction}, {layout}"] == pytest.approx(as_printed_after_resuming(expected), rel=2.5e-7)


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_masks_go_on_where_the_samples_do(losses: dict[str, dict[int, float]], layout: str) -> None:
    expected = losses["uninterrupted, dropout"]
    assert losses[f"dropout, {layout}"] == pytest.approx(as_printed_after_resuming(expected), rel=2.5e-7)
    assert expected[3] != pytest.approx(losses["uninterrupted"][3], rel=1e-4)

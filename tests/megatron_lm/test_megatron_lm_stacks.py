"""Megatron-LM's unmodified pretrain_bert.py and pretrain_t5.py, stock beside --use-tempo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_runs import Run, run_all
from megatron_text import write_text

pytestmark = pytest.mark.slow

_SCRIPTS = {
    "BERT": ("pretrain_bert.py", "--spec local"),
    "T5": (
        "pretrain_t5.py",
        "--encoder-seq-length 32 --decoder-seq-length 16 --encoder-num-layers 2 --decoder-num-layers 2 "
        "--vocab-extra-ids 20 --kv-channels 12",
    ),
}
_DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 --lr 0.01 --use-tempo"


@pytest.fixture(scope="module")
def results(megatron_checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By run and rank."""
    folder = tmp_path_factory.mktemp("text")
    data = write_text(folder)
    one, two = [], []
    for name, (script, arguments) in _SCRIPTS.items():
        settings: dict[str, Any] = {"script": script, "data": data, "leaves_out": _LEFT_OUT[name]}
        one += [
            Run(f"{name}: stock", arguments, **settings),
            Run(f"{name}: Tempo", f"{arguments} --use-tempo", **settings),
            Run(f"{name}: dropout", f"{arguments} {_DROPOUT}", changes=("record_masks",), **settings),
            Run(
                f"{name}: micro batch 4",
                f"{arguments} {_DROPOUT} --micro-batch-size 4",
                changes=("record_masks",),
                **settings,
            ),
        ]
        two.append(Run(f"{name}: DP 2", f"{arguments} {_DROPOUT}", changes=("record_masks",), **settings))
    found: dict[str, list[dict[str, Any]]] = {}
    for world_size, runs in ((1, one), (2, two)):
        ranks = run_all(megatron_checkout, world_size, runs, folder / f"world-{world_size}")
        found |= {run.name: [rank[run.name] for rank in ranks] for run in runs}
    return found


_LEFT_OUT: dict[str, tuple[str, ...]] = {"BERT": (), "T5": ("num-layers", "seq-length")}


@pytest.mark.parametrize("name", _SCRIPTS)
def test_losses_and_every_gradient_equal_stock(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    (stock,), (tempo,) = results[f"{name}: stock"], results[f"{name}: Tempo"]
    assert not stock["error"] and not tempo["error"]
    assert "slots replaced" in tempo["printed"]
    assert sorted(stock["losses"]) == [1, 2, 3]
    assert tempo["losses"] == pytest.approx(stock["losses"], rel=2.5e-7)
    for found, expected in zip(tempo["gradients"], stock["gradients"], strict=True):
        assert found.keys() == expected.keys()
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        for name in expected:
            assert (found[name] - expected[name]).abs().max().item() <= 3e-5 * largest


@pytest.mark.parametrize("layout", ["micro batch 4", "DP 2"])
@pytest.mark.parametrize("name", _SCRIPTS)
def test_masks_are_those_of_another_layout(results: dict[str, list[dict[str, Any]]], name: str, layout: str) -> None:
    (one,), other = results[f"{name}: dropout"], results[f"{name}: {layout}"]
    assert not one["error"] and not other[0]["error"]
    masks: dict[Any, int] = {}
    for rank in other:
        masks |= rank["masks"]
    assert len(masks) > 1000
    assert masks == one["masks"]
    # BERT's and T5's losses are means of micro batches' means over tokens, which their sizes change; the first step's
    # weights are the same, so that nothing else does.
    if layout == "DP 2":
        assert other[-1]["losses"][1] == pytest.approx(one["losses"][1], rel=2.5e-7)

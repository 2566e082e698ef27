"""Megatron-LM's unmodified pretrain_gpt.py, stock beside --use-tempo, in the configurations of megatron_matrix.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron_matrix import CASES, SAMPLE
from megatron_runs import Run, list_items, run_all, with_sample

pytestmark = pytest.mark.slow


def runs_of(name: str) -> Iterator[Run]:
    case = CASES[name]
    changes = ("use_torch_norms",) if case.stock_norms == "torch's" else ()
    yield Run(f"{name}: stock", case.arguments, changes=changes)
    yield Run(f"{name}: Tempo", f"{case.arguments} --use-tempo {case.tempo}")


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, megatron_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """By run and rank. The runs of one world size share their processes, which take seconds to start."""
    chosen = [item.callspec.params["name"] for item in list_items(request, megatron_root)]
    found: dict[str, list[dict[str, Any]]] = {}
    for world_size in sorted({CASES[name].world_size for name in chosen}):
        runs = [run for name in chosen if CASES[name].world_size == world_size for run in runs_of(name)]
        ranks = run_all(megatron_root, world_size, runs, tmp_path_factory.mktemp(f"world-{world_size}"))
        found |= {run.name: [rank[run.name] for rank in ranks] for run in runs}
    return found


@pytest.mark.parametrize("name", with_sample(CASES, SAMPLE))
def test_losses_and_every_gradient_equal_stock(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    stock, tempo = results[f"{name}: stock"], results[f"{name}: Tempo"]
    assert not stock[0]["error"] and not tempo[0]["error"]
    # Megatron prints losses on the last rank.
    assert sorted(stock[-1]["losses"]) == [1, 2, 3]
    if CASES[name].limit < 1e-3:
        assert tempo[-1]["losses"] == pytest.approx(stock[-1]["losses"], rel=2.5e-7)
    else:
        assert tempo[-1]["losses"] == pytest.approx(stock[-1]["losses"], rel=CASES[name].limit)
    assert "slots replaced" in tempo[0]["printed"] and "slots replaced" not in stock[0]["printed"]
    for ours, theirs in zip(tempo, stock, strict=True):
        assert len(theirs["gradients"]) == 3
        for found, expected in zip(ours["gradients"], theirs["gradients"], strict=True):
            assert found.keys() == expected.keys()
            largest = max(gradient.abs().max().item() for gradient in expected.values())
            assert largest > 0
            errors = {name: (found[name] - expected[name]).abs().max().item() / largest for name in expected}
            worst = max(errors, key=errors.__getitem__)
            assert errors[worst] <= CASES[name].limit, f"{worst}: {errors[worst]}"

"""At dropout 0.1 a run of pretrain_gpt.py draws the same masks and has the same losses in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_runs import Run, list_items, run_all, with_sample

pytestmark = pytest.mark.slow

_DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 --lr 0.01 --use-tempo --tempo-norm inplace"
_FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1"
_NO_MASK = "--no-create-attention-mask-in-dataloader"
# Across the border of two stages, and of each of four.
_LAYERS = '--tempo-layers {"0":{"activation":"recompute"},"1-2":{"norm":"recompute","attention":"softmax"}}'
# name -> (world size, arguments)
LAYOUTS = {
    "micro batch 4": (1, "--micro-batch-size 4"),
    "micro batch 1": (1, "--micro-batch-size 1"),
    "full, uniform": (1, f"{_FULL} uniform"),
    "core_attn": (1, "--recompute-granularity selective --recompute-modules core_attn"),
    "with evaluation": (1, "--eval-interval 1 --eval-iters 1"),
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
    "PP 2, interleaved": (2, f"--pipeline-model-parallel-size 2 {_VIRTUAL}"),
    "PP 2, full, block": (2, f"--pipeline-model-parallel-size 2 {_FULL} block"),
    "TP 2": (2, "--tensor-model-parallel-size 2"),
    "TP 2 + SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "CP 2": (2, f"--context-parallel-size 2 {_NO_MASK}"),
    "CP 2, TP 2 + SP, all_gather": (
        4,
        "--context-parallel-size 2 --cp-comm-type all_gather --tensor-model-parallel-size 2 --sequence-parallel "
        f"{_NO_MASK}",
    ),
    "DP 2": (2, ""),
    "DP 2, micro batch 4": (2, "--micro-batch-size 4"),
    "single layers": (1, _LAYERS),
    "PP 2, single layers": (2, f"--pipeline-model-parallel-size 2 {_LAYERS}"),
    "PP 2, interleaved, single layers": (2, f"--pipeline-model-parallel-size 2 {_VIRTUAL} {_LAYERS}"),
    "PP 4": (4, "--pipeline-model-parallel-size 4"),
    "PP 2, DP 2, interleaved": (4, f"--pipeline-model-parallel-size 2 {_VIRTUAL} --micro-batch-size 1"),
}
# A wrong sample index must show in both.
BROKEN = ("micro batch 4", "DP 2")
# Of every run: other micro batches, recomputed layers, samples on two ranks, rows and heads on two ranks, chunks of the
# sequence on two ranks, and layers on two stages out of their order, with values of their own. The others are for
# --exhaustive.
SAMPLE = (*BROKEN, "full, uniform", "TP 2 + SP", "CP 2", "PP 2, interleaved, single layers")


def run_of(name: str, checkpoint: Path, *changes: str) -> Run:
    layout = LAYOUTS[name.removeprefix("broken ")][1] if name != "one process" else ""
    load = f"--load {checkpoint} --finetune --no-load-optim --no-load-rng --ckpt-format torch_dist"
    return Run(name, f"{_DROPOUT} {load} {layout}", changes=("record_masks", *changes))


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, megatron_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """By run and rank, each from the weights of one stock checkpoint at TP 1."""
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    save = Run("save", f"--train-iters 1 --save {checkpoint} --save-interval 1 --ckpt-format torch_dist")
    items = list_items(request, megatron_root)
    chosen = [item.callspec.params["name"] for item in items]
    broken = [item.callspec.params["name"] for item in items if "wrong" in item.name]
    found: dict[str, list[dict[str, Any]]] = {}
    for world_size in (1, 2, 4):
        runs = [save, run_of("one process", checkpoint)] if world_size == 1 else []
        names = [name for name in dict.fromkeys(chosen) if LAYOUTS[name][0] == world_size]
        runs += [run_of(name, checkpoint) for name in names]
        runs += [run_of(f"broken {name}", checkpoint, "forget_the_rank") for name in names if name in broken]
        if runs:
            ranks = run_all(megatron_root, world_size, runs, tmp_path_factory.mktemp(f"world-{world_size}"))
            found |= {run.name: [rank[run.name] for rank in ranks] for run in runs}
    assert not found["save"][0]["error"]
    return found


def masks_of(ranks: list[dict[str, Any]]) -> dict[tuple[Any, ...], int]:
    """Those of all ranks; two that draw at the same place must draw the same."""
    found: dict[tuple[Any, ...], int] = {}
    for rank in ranks:
        for place, bits in rank["masks"].items():
            assert found.setdefault(place, bits) == bits
    return found


@pytest.mark.parametrize("name", with_sample(LAYOUTS, SAMPLE))
def test_masks_and_losses_are_those_of_one_process(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    one, other = results["one process"], results[name]
    assert not one[0]["error"] and not other[0]["error"]
    masks = masks_of(one)
    # 3 steps of 8 samples: 32 rows at the embedding and two places in 4 layers, and 4 heads in each of these.
    assert len(masks) == 24 * (32 * 9 + 4 * 4)
    assert masks_of(other) == masks
    assert sorted(one[0]["losses"]) == [1, 2, 3]
    assert other[-1]["losses"] == pytest.approx(one[0]["losses"], rel=2.5e-7)


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_sample_index_shows(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    one, broken = results["one process"], results[f"broken {name}"]
    assert set().union(*(rank["masks"] for rank in broken)) != set(masks_of(one))
    assert broken[-1]["losses"] != pytest.approx(one[0]["losses"], rel=1e-5)

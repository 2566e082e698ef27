"""At dropout 0.1 a run of pretrain_gpt.py draws the same masks and has the same losses in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_runs import EXPERTS, LATENT_ATTENTION, Run, list_names, run_all_sizes, with_sample

pytestmark = pytest.mark.slow

_DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 --lr 0.01 --use-tempo --tempo-norm inplace"
_LOAD = "--finetune --no-load-optim --no-load-rng --ckpt-format torch_dist"
_FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1"
_NO_MASK = "--no-create-attention-mask-in-dataloader"
# Across the border of two stages, and of each of four.
_LAYERS = '--tempo-layers {"0":{"activation":"recompute"},"1-2":{"norm":"recompute","attention":"softmax"}}'
_TP_2_EP_2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
MODELS = {"GPT": "", "experts": f"{LATENT_ATTENTION} {EXPERTS}"}
# name -> (world size, arguments)
LAYOUTS = {
    "micro batch 4": (1, "--micro-batch-size 4"),
    "micro batch 1": (1, "--micro-batch-size 1"),
    "full, uniform": (1, f"{_FULL} uniform"),
    "core_attn": (1, "--recompute-granularity selective --recompute-modules core_attn"),
    "with evaluation": (1, "--eval-interval 1 --eval-iters 1"),
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
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
    "PP 2, single layers": (2, f"--pipeline-model-parallel-size 2 {_LAYERS}"),
    "PP 2, interleaved, single layers": (2, f"--pipeline-model-parallel-size 2 {_VIRTUAL} {_LAYERS}"),
    "PP 4": (4, "--pipeline-model-parallel-size 4"),
    "PP 2, DP 2, interleaved": (4, f"--pipeline-model-parallel-size 2 {_VIRTUAL} --micro-batch-size 1"),
    "experts, EP 2": (2, "--expert-model-parallel-size 2"),
    "experts, TP 2 + SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "experts, PP 2": (2, "--pipeline-model-parallel-size 2"),
    "experts, TP 2 + SP, EP 2": (2, f"{_TP_2_EP_2} --expert-tensor-parallel-size 1"),
    "experts, EP 2, PP 2": (4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
# Of every run: other micro batches, recomputed layers, samples on two ranks, rows and heads on two ranks, chunks of the
# sequence on two ranks, and layers on two stages out of their order, with values of their own. The others are for
# --exhaustive.
SAMPLE = ("micro batch 4", "DP 2", "full, uniform", "TP 2 + SP", "CP 2", "PP 2, interleaved, single layers")


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, megatron_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """By run and rank, each from the weights of one stock checkpoint of its model at TP 1."""
    names, runs = list_names(request, megatron_root, "test_masks"), []
    broken = list_names(request, megatron_root, "test_a_wrong")
    for model, more in MODELS.items():
        changes = () if model == "GPT" else ("take_latent_sizes",)
        checkpoint = tmp_path_factory.mktemp("checkpoint")
        save = f"{more} --train-iters 1 --save {checkpoint} --save-interval 1 --ckpt-format torch_dist"
        load = f"{_DROPOUT} {more} --load {checkpoint} {_LOAD}"
        layouts = {name: LAYOUTS[name] for name in names if model_of(name) == model}
        if not layouts:
            continue
        runs.append((1, Run(f"save {model}", save, changes=changes)))
        for name, (world_size, arguments) in {f"one process of {model}": (1, ""), **layouts}.items():
            runs.append((world_size, Run(name, f"{load} {arguments}", changes=("record_masks", *changes))))
        for name in broken if model == "GPT" else ():
            world_size, arguments = LAYOUTS[name]
            forgets = ("record_masks", "forget_the_rank")
            runs.append((world_size, Run(f"broken {name}", f"{load} {arguments}", changes=forgets)))
    found = run_all_sizes(megatron_root, runs, tmp_path_factory.mktemp("layouts"))
    assert not any(found[name][0]["error"] for name in found if name.startswith("save "))
    return found


def model_of(name: str) -> str:
    return "experts" if name.startswith("experts") else "GPT"


def masks_of(ranks: list[dict[str, Any]]) -> dict[tuple[Any, ...], int]:
    """Those of all ranks; two that draw at the same place must draw the same."""
    found: dict[tuple[Any, ...], int] = {}
    for rank in ranks:
        for place, bits in rank["masks"].items():
            assert found.setdefault(place, bits) == bits
    return found


@pytest.mark.parametrize("name", with_sample(LAYOUTS, SAMPLE))
def test_masks_and_losses_are_those_of_one_process(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    one, other = results[f"one process of {model_of(name)}"], results[name]
    assert not one[0]["error"] and not other[0]["error"]
    masks = masks_of(one)
    # 2 steps of 8 samples: 32 rows at the embedding and two places in 4 layers, and 4 heads in each of these.
    assert len(masks) == 16 * (32 * 9 + 4 * 4)
    assert masks_of(other) == masks
    assert sorted(one[0]["losses"]) == [1, 2]
    assert other[-1]["losses"] == pytest.approx(one[0]["losses"], rel=2.5e-7)


# Neither the rank nor the size of a micro batch counts there.
@pytest.mark.parametrize("name", with_sample(("micro batch 4", "DP 2"), ("DP 2",)))
def test_a_wrong_sample_index_shows(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    one, broken = results["one process of GPT"], results[f"broken {name}"]
    assert set().union(*(rank["masks"] for rank in broken)) != set(masks_of(one))
    assert broken[-1]["losses"] != pytest.approx(one[0]["losses"], rel=1e-5)

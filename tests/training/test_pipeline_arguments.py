"""Pipeline stages on the command line: how processes and layers are divided, and one sentence for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tempo_megatron.training.planning import read_run
from tempo_megatron.training.run import checks
from tempo_megatron.training.run.arguments import parse_arguments
from tempo_megatron.training.run.checks import check_run, check_weights_fit
from tempo_megatron.training.run.deepspeed_config import read_deepspeed_config
from tempo_megatron.training.run.run_config import RunConfig, complete_run

SIZES = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 100"
REST = "--micro-batch-size 2 --global-batch-size 16 --train-iters 10 --lr 1e-3 --data-path text"
TWO, CHUNK = "--pipeline-model-parallel-size 2 ", "--num-layers-per-virtual-pipeline-stage "
LAYOUT = "--pipeline-model-parallel-layout"


def prepared(folder: Path, words: str, config: dict[str, Any], world_size: int) -> RunConfig:
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(config))
    args = parse_arguments(["--deepspeed_config", str(path), *SIZES.split(), *REST.split(), *words.split()])
    run = complete_run(args, read_deepspeed_config(str(path)), None, world_size=world_size, on_gpu=False)
    check_run(run)
    return run


def test_stages_chunks_and_data_parallel_ranks_are_divided(tmp_path: Path) -> None:
    words = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 " + CHUNK + "2"
    run = prepared(tmp_path, words, {"zero_optimization": {"stage": 1}}, world_size=8)
    assert (run.data_parallel_size, run.num_chunks, run.num_micro_batches) == (2, 2, 4)
    estimated = read_run(run, 128)
    assert estimated.world_size == 8 and estimated.list_chunks(1) == [range(2, 4), range(6, 8)]
    eight_layers = 8 * 64 * (4 * 64 + 2 * 256) * 4  # float32 bytes of their linears
    check_weights_fit(run, node_bytes=eight_layers // 4, node_ranks=1)
    with pytest.raises(ValueError, match="the linears of 8 layers"):
        check_weights_fit(run, node_bytes=eight_layers // 4 - 1, node_ranks=1)


def test_a_layout_says_which_layers_a_stage_has(tmp_path: Path) -> None:
    uneven = prepared(tmp_path, f"{TWO} {LAYOUT} Ett,t|t*5L", {}, world_size=2)
    assert uneven.num_chunks == 1 and read_run(uneven, 128).list_chunks(1) == [range(3, 8)]
    chunks = prepared(tmp_path, f"{TWO} {LAYOUT} E(t|t)*2t*3|tL", {}, world_size=2)
    assert chunks.num_chunks == 2 and read_run(chunks, 128).list_chunks(0) == [range(0, 1), range(3, 7)]


REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "processes": (
        TWO,
        {},
        3,
        "--tensor-model-parallel-size 1 times --pipeline-model-parallel-size 2 does not divide the 3",
    ),
    "layers": (
        "--pipeline-model-parallel-size 3 --global-batch-size 18",
        {},
        3,
        "--num-layers 8 is not a multiple of --pipeline-model-parallel-size 3; change one of them",
    ),
    "a layout of another model": (
        f"{TWO} {LAYOUT} Ettt|tL",
        {},
        2,
        "--pipeline-model-parallel-layout Ettt|tL is not E, 8 times t and L, in chunks with | between; correct it",
    ),
    "a layout of other stages": (
        f"{TWO} {LAYOUT} Et*2|t*3|t*3L",
        {},
        2,
        "has 3 chunks, which are not a multiple of --pipeline-model-parallel-size 2; change one of them",
    ),
    "a stage without layers": (f"{TWO} {LAYOUT} E|t*8L", {}, 2, "E|t*8L gives stage 0 no layer; give it at"),
    "a layout of one stage": (f"{LAYOUT} Et*8L", {}, 1, "Et*8L needs --pipeline-model-parallel-size of at least 2"),
    "a layout and chunks": (
        f"{TWO} {LAYOUT} Et*4|t*4L {CHUNK} 2",
        {},
        2,
        "Et*4|t*4L are both given; leave one of them",
    ),
    "a layout and a budget": (
        f"{TWO} {LAYOUT} Et*4|t*4L --use-tempo --tempo-memory-budget 1GB",
        {},
        2,
        "with --pipeline-model-parallel-layout Et*4|t*4L, whose chunks the planner does not know",
    ),
    "chunks of one stage": (CHUNK + "2", {}, 1, "needs --pipeline-model-parallel-size of at least 2"),
    "one chunk": (
        TWO + CHUNK + "4",
        {},
        2,
        "4 does not divide the 4 layers of a pipeline stage into at least 2 chunks",
    ),
    "uneven chunks": (TWO + CHUNK + "3", {}, 2, "3 does not divide the 4 layers of a pipeline stage"),
    "micro batches": (
        TWO + CHUNK + "2 --global-batch-size 6",
        {},
        2,
        "a step has 3 micro batches, which are not a multiple of --pipeline-model-parallel-size 2, as",
    ),
    "budget": (TWO + CHUNK + "2 --use-tempo --tempo-memory-budget 1GB", {}, 2, "chunks the planner does not know"),
    "recomputed layers": (
        TWO + CHUNK + "2 --recompute-granularity full --recompute-method block --recompute-num-layers 3",
        {},
        2,
        "--recompute-num-layers 3 is more than a chunk's 2 layers",
    ),
    "recomputed layers of a stage": (
        TWO + "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
        {},
        2,
        "--recompute-num-layers 5 is more than a pipeline stage's 4 layers",
    ),
    "ZeRO 2": (TWO, {"zero_optimization": {"stage": 2}}, 2, "ZeRO 2, which reduces gradients in each of the backward"),
    "ZeRO 3": (TWO, {"zero_optimization": {"stage": 3}}, 2, "set zero_optimization.stage to 0 or 1"),
    "overlap": (TWO, {"zero_optimization": {"stage": 1, "overlap_comm": True}}, 2, "zero_optimization.overlap_comm"),
    "bf16 sums": (
        TWO,
        {"bf16": {"enabled": True, "immediate_grad_update": False}, "zero_optimization": {"stage": 1}},
        2,
        "would add up micro batches in bf16",
    ),
    "profiler": (TWO, {"flops_profiler": {"enabled": True}}, 2, 'with "flops_profiler", but DeepSpeed sees no micro'),
    "timers": (TWO, {"wall_clock_breakdown": True}, 2, 'with "wall_clock_breakdown", but DeepSpeed sees no micro'),
}


@pytest.mark.parametrize(("words", "config", "world_size", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_one_sentence(
    tmp_path: Path, words: str, config: dict[str, Any], world_size: int, sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:
        prepared(tmp_path, words, config, world_size)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_an_older_deepspeed_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_version", lambda package: "0.18.9")
    with pytest.raises(ValueError, match=r"needs DeepSpeed 0.19, and 0.18.9 is installed"):
        prepared(tmp_path, TWO, {}, 2)
    assert prepared(tmp_path, "", {}, 1).pipeline_model_parallel_size == 1

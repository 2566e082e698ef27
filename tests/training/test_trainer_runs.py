"""The same training on every layout and ZeRO stage that DeepSpeed and Megatron can do together, compared by losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from training_job import Data, Run, run, successful

STEPS = 6
NO_DROPOUT = [
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--clip-grad", "0.5", "--global-batch-size", "4"),
    *("--train-iters", str(STEPS)),
]
TP2 = ["--tensor-model-parallel-size", "2"]
SP = [*TP2, "--sequence-parallel"]
# fp32 sums in another order: about 1e-7 at each of the few hundred additions behind a loss.
RELATIVE = 2e-6


@pytest.fixture(scope="module")
def reference(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, ZeRO 0, two accumulated micro batches."""
    return successful(run(data, tmp_path_factory.mktemp("reference"), *NO_DROPOUT, "--eval-iters", "2"))


def stage(number: int, **options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number, **options}}


def norms(result: Run) -> list[float]:
    return [record["grad_norm"] for record in result.of_kind("train")]


def test_the_reference_learns(reference: Run) -> None:
    losses = reference.losses
    assert len(losses) == STEPS
    assert abs(losses[0] - math.log(512)) < 0.1  # a fresh model knows nothing of 512 tokens
    assert losses[-1] < losses[0] - 0.1


CASES = {
    "TP 1 with ZeRO 1": (1, [], stage(1)),
    "TP 1, micro batch 4": (1, ["--micro-batch-size", "4"], stage(0)),
    "TP 1, micro batch 1": (1, ["--micro-batch-size", "1"], stage(0)),
    "DP 2 with ZeRO 0": (2, [], stage(0)),
    "DP 2 with ZeRO 1": (2, [], stage(1)),
    "DP 2 with ZeRO 2": (2, [], stage(2)),
    "DP 2 with ZeRO 3": (2, [], stage(3)),
    "DP 2 with ZeRO 3, nothing kept whole": (2, [], stage(3, stage3_param_persistence_threshold=0)),
    "TP 2 with ZeRO 0": (2, TP2, stage(0)),
    "TP 2 with ZeRO 1": (2, TP2, stage(1)),
    "TP 2 + SP with ZeRO 0": (2, SP, stage(0)),
    "TP 2 + SP with ZeRO 1": (2, SP, stage(1)),
    "TP 2 + SP with ZeRO 2": (2, SP, stage(2)),
    "TP 2 + SP with ZeRO 3": (2, SP, stage(3)),
    "TP 2 + SP, full recomputation": (
        2, [*SP, "--recompute-granularity", "full", "--recompute-method", "uniform"], stage(0),
    ),
    "TP 2 + SP, core_attn recomputed": (
        2, [*SP, "--recompute-granularity", "selective", "--recompute-modules", "core_attn"], stage(0),
    ),
}  # fmt: skip
QUICK = "TP 2 + SP with ZeRO 1"
# Each stage divides by two, and each kind of tensor parallelism and of recomputation is there, in other rows.
SELDOM = ("TP 1 with ZeRO 1", "TP 2 with ZeRO 1", *(f"TP 2 + SP with ZeRO {number}" for number in (0, 2, 3)))


def find_marks(name: str) -> list[pytest.MarkDecorator]:
    often = [pytest.mark.slow] if name != QUICK else []
    return [pytest.mark.slow, pytest.mark.exhaustive] if name in SELDOM else often


@pytest.mark.parametrize(
    ("world_size", "extra", "config"),
    [pytest.param(*case, id=name, marks=find_marks(name)) for name, case in CASES.items()],
)
def test_every_layout_gives_the_losses_and_norms_of_one_process(
    data: Data, reference: Run, tmp_path: Path, world_size: int, extra: list[str], config: dict[str, Any]
) -> None:
    result = successful(run(data, tmp_path, *NO_DROPOUT, *extra, world_size=world_size, config=config))
    assert result.losses == pytest.approx(reference.losses, rel=RELATIVE)
    assert norms(result) == pytest.approx(norms(reference), rel=50 * RELATIVE)


@pytest.mark.slow
def test_tp2_dp2_with_sequence_parallelism_and_zero3(data: Data, reference: Run, tmp_path: Path) -> None:
    result = successful(run(data, tmp_path, *NO_DROPOUT, *SP, world_size=4, config=stage(3)))
    assert result.losses == pytest.approx(reference.losses, rel=RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_bf16_stays_near_fp32(data: Data, reference: Run, tmp_path: Path, number: int) -> None:
    config = {**stage(number), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    result = successful(run(data, tmp_path, *NO_DROPOUT, *SP, world_size=2, config=config))
    assert result.losses == pytest.approx(reference.losses, rel=1e-3)
    assert result.losses != pytest.approx(reference.losses, rel=RELATIVE)  # it really was bf16


@pytest.mark.slow
def test_untied_output_weights_have_gradients_of_their_own(data: Data, tmp_path: Path) -> None:
    untied = [*NO_DROPOUT, "--untie-embeddings-and-output-weights", "--train-iters", "3"]
    one = successful(run(data, tmp_path / "one", *untied))
    two = successful(run(data, tmp_path / "two", *untied, *SP, world_size=2, config=stage(1)))
    assert two.losses == pytest.approx(one.losses, rel=RELATIVE)
    parameters = [result.of_kind("run")[0]["parameters"] for result in (one, two)]
    assert parameters == [136_960 + 512 * 64] * 2


def test_validation_reports_loss_and_perplexity_and_a_curve_is_drawn(reference: Run) -> None:
    (last,) = reference.of_kind("validation")
    assert last["iteration"] == STEPS
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert last["loss"] == pytest.approx(reference.losses[-1], abs=0.3)
    assert "perplexity" in reference.output


@pytest.mark.slow
def test_loader_processes_read_what_the_rank_itself_would(data: Data, tmp_path: Path) -> None:
    alone, workers = (
        successful(run(data, tmp_path / number, "--num-workers", number, "--train-iters", "3")) for number in "01"
    )
    assert workers.losses_hex == alone.losses_hex


def test_tensorboard_and_loss_plot_are_written(data: Data, tmp_path: Path) -> None:
    board, plot = tmp_path / "board", tmp_path / "loss.png"
    short = ["--train-iters", "2", "--tensorboard-dir", str(board), "--loss-plot", str(plot)]
    successful(run(data, tmp_path, *short))
    assert plot.read_bytes().startswith(b"\x89PNG")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]


@pytest.mark.slow
def test_the_banner_says_which_attention_runs(data: Data, tmp_path: Path) -> None:
    result = successful(run(data, tmp_path, "--train-iters", "1", "--use-tempo"))
    assert "attention  plain torch" in result.output
    # All of them "auto", with nothing in the way of the first choice.
    values = "activation=inplace norm=inplace dropout=recompute attention=flash loss=fused"
    assert f"{values} (arguments: --use-tempo; block: none)" in result.output
    replaced = "activation 2 of 2, norm 5 of 5, dropout 5 of 5, attention 2 of 2, loss 1 of 1"
    assert f"replaced   {replaced}\n" in result.output and "left       nothing\n" in result.output
    (described,) = [record for record in result.records if record["kind"] == "run"]
    assert described["tempo"].pop("layers") == {}
    assert described["slots"]["dropout"] == {"tempo": 5, "all": 5}
    assert {described["tempo"].pop(name) for name in ("linear_fc1", "linear_qkv", "moe_permute")} == {"off"}
    assert " ".join(f"{name}={value}" for name, value in described["tempo"].items()) == values


def test_the_banner_says_what_runs(data: Data, tmp_path: Path) -> None:
    config = {**stage(1), "my_note": 1, "tempo": {"enabled": False, "activation": "off"}}
    result = successful(run(data, tmp_path, "--train-iters", "1", "--no-use-tempo", config=config))
    said = "TP 1, DP 1|136,960 parameters|ZeRO 1, fp32|off (stock)|--no-use-tempo|activation=off|my_note".split("|")
    assert [words for words in said if words not in result.output] == []

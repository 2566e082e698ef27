"""The trainer compares its layers with Megatron's own in the first step, and trains as it does without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_job import BF16, Data, Run, run, successful, zero

DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--num-layers", "4", "--train-iters", "3")
CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1", "--global-batch-size", "4")
PIPELINE = ("--pipeline-model-parallel-size", "2", *CHUNKS)


def train(data: Data, folder: Path, check: str, *words: str, **options: Any) -> Run:
    return run(data, folder / check, *DROPOUT, "--use-tempo", "--tempo-check", check, *words, **options)


def find_lines(result: Run) -> list[str]:
    return [line for line in result.output.splitlines() if "checked: " in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "world_size", "config"),
    [(("--tensor-model-parallel-size", "2", "--sequence-parallel"), 2, {**BF16, **zero(1)}), (PIPELINE, 2, zero(1))],
    ids=["TP 2 + SP, bf16", "PP 2, interleaved"],
)
def test_losses_are_bit_for_bit_those_without_the_check(
    data: Data, tmp_path: Path, words: tuple[str, ...], world_size: int, config: dict[str, Any]
) -> None:
    checked, plain = (
        successful(train(data, tmp_path, check, *words, world_size=world_size, config=config))
        for check in ("auto", "off")
    )
    (line,) = find_lines(checked)
    assert line.startswith("checked: output and 13 gradients of decoder.layers.0 ") and not find_lines(plain)
    assert checked.losses_hex == plain.losses_hex


@pytest.mark.slow
def test_weights_that_zero_3_partitions_are_not_checked(data: Data, tmp_path: Path) -> None:
    result = successful(train(data, tmp_path, "auto", config=zero(3)))
    assert find_lines(result) == ["not checked: decoder.layers.0: ZeRO-3 partitions the weights"]


def plant_a_fault() -> None:
    from tempo_megatron.slots import attention

    compute = attention.attention
    attention.attention = lambda *args, **given: compute(*args, **given).flip(2)


@pytest.mark.slow
def test_a_layer_that_differs_ends_the_run_before_its_first_step(data: Data, tmp_path: Path) -> None:
    result = train(data, tmp_path, "auto", config={}, before=plant_a_fault)
    assert result.exit_codes == [1] and not result.losses
    assert "error: at dropout 0 the " in result.output and "train with --tempo-attention off\n" in result.output

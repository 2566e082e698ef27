"""Training of models beyond GPT-2: what their parts are comes from the arguments, and Tempo changes no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_job import Data, Run, run, successful, zero

NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]
SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
ROPE = ["--position-embedding-type", "rope"]
GROUPS = ["--group-query-attention", "--num-query-groups", "2"]
NO_BIAS = ["--disable-bias-linear", "--untie-embeddings-and-output-weights"]
LLAMA = [*ROPE, *GROUPS, *NO_BIAS, "--swiglu", "--normalization", "RMSNorm", "--norm-epsilon", "1e-6"]
QWEN3 = [*LLAMA, "--qk-layernorm", "--kv-channels", "32", "--rotary-base", "1000000"]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.1".split()
MODELS = {
    "Qwen 2, biases of q, k and v": [*LLAMA, "--add-qkv-bias"],
    "geglu": [*ROPE, "--geglu", "--rotary-percent", "0.5"],
    "squared relu": ["--squared-relu", "--position-embedding-type", "none", "--normalization", "RMSNorm"],
    "one group": ["--group-query-attention", "--swiglu"],
}


def train(data: Data, folder: Path, *words: str, **settings: Any) -> Run:
    words = ("--train-iters", "4", "--micro-batch-size", "2", "--global-batch-size", "4", *words)
    return successful(run(data, folder, *words, **settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=name, marks=() if name == "geglu" else pytest.mark.exhaustive)
        for name, words in MODELS.items()
    ],
)
def test_stock_and_tempo_have_the_same_losses(data: Data, tmp_path: Path, words: list[str]) -> None:
    """test_trainer_gradients.py has the models of configs/model, on several processes too."""
    stock = train(data, tmp_path / "stock", *words, *NO_DROPOUT, config=zero(1))
    assert stock.losses[-1] < stock.losses[0] and "off (stock)" in stock.output
    tempo = train(data, tmp_path / "tempo", *words, *NO_DROPOUT, "--use-tempo", config=zero(1))
    assert tempo.losses == pytest.approx(stock.losses, rel=1e-4) and "off (stock)" not in tempo.output


@pytest.mark.slow
def test_masks_of_a_llama_are_the_same_on_two_processes_and_it_resumes_bit_for_bit(data: Data, tmp_path: Path) -> None:
    words = [*QWEN3, "--use-tempo", "--window-size", "16,0"]
    one = train(data, tmp_path / "one", *words)
    folder = tmp_path / "two"
    layout: dict[str, Any] = {"world_size": 2, "config": zero(3)}
    save = ["--save", str(folder / "save")]
    two = train(data, folder, *words, *save, "--save-interval", "2", **layout)
    assert two.losses == pytest.approx(one.losses, rel=1e-4)
    (folder / "save" / "latest").write_text("iter_0000002")
    again = train(data, tmp_path / "again", *words, "--load", str(folder / "save"), **layout)
    assert again.losses_hex == two.losses_hex[2:]


@pytest.mark.slow
def test_experts_train_as_stock_on_two_ranks_and_resume_on_one(data: Data, tmp_path: Path) -> None:
    words = [*QWEN3, *EXPERTS, *NO_DROPOUT]
    stock = train(data, tmp_path / "stock", *words, config=zero(1))
    # Without the routers' losses other weights come out.
    alone = train(data, tmp_path / "alone", *words, "--moe-aux-loss-coeff", "1e-9", config=zero(1))
    assert abs(alone.losses[-1] - stock.losses[-1]) > 1e-6 * stock.losses[-1]
    folder = tmp_path / "two"
    save = ["--save", str(folder / "save"), "--save-interval", "2"]
    divided = train(data, folder, *words, *SP, *save, "--use-tempo", world_size=2, config=zero(1))
    assert divided.losses == pytest.approx(stock.losses, rel=1e-6)
    (folder / "save" / "latest").write_text("iter_0000002")
    load = ["--load", str(folder / "save")]
    one = train(data, tmp_path / "one", *load, "--tensor-model-parallel-size", "1", config=zero(2))
    assert one.losses == pytest.approx(divided.losses[2:], rel=1e-6)

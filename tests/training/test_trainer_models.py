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
MODELS = {
    "Llama": LLAMA,
    "Llama 3.1's rope": [*LLAMA, "--rotary-base", "500000", "--use-rope-scaling"],
    "Qwen 2, biases of q, k and v": [*LLAMA, "--add-qkv-bias"],
    "Qwen 3, norms of q and k": QWEN3,
    "Mistral, a window": [*LLAMA, "--window-size", "16,0"],
    "geglu": [*ROPE, "--geglu", "--rotary-percent", "0.5"],
    "squared relu": ["--squared-relu", "--position-embedding-type", "none", "--normalization", "RMSNorm"],
    "one group": ["--group-query-attention", "--swiglu"],
}
OFTEN = ("Qwen 3, norms of q and k", "Mistral, a window", "geglu", "one group")


def train(data: Data, folder: Path, *words: str, **settings: Any) -> Run:
    words = ("--train-iters", "4", "--micro-batch-size", "2", "--global-batch-size", "4", *words)
    return successful(run(data, folder, *words, **settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=name, marks=() if name in OFTEN else pytest.mark.exhaustive)
        for name, words in MODELS.items()
    ],
)
def test_stock_and_tempo_have_the_same_losses_on_one_process_and_on_two(
    data: Data, tmp_path: Path, words: list[str]
) -> None:
    stock = train(data, tmp_path / "stock", *words, *NO_DROPOUT, config=zero(1))
    assert stock.losses[-1] < stock.losses[0]
    # Qwen's norms of q and k have gradients to sum, with stock's modules too.
    for switch in ("--use-tempo", "--no-use-tempo") if words == QWEN3 else ("--use-tempo",):
        found = train(data, tmp_path / switch, *words, *SP, *NO_DROPOUT, switch, world_size=2, config=zero(1))
        assert found.losses == pytest.approx(stock.losses, rel=1e-4), switch
        assert ("off (stock)" in found.output) == (switch == "--no-use-tempo")


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_masks_of_a_llama_are_the_same_on_two_processes_and_it_resumes_bit_for_bit(
    data: Data, tmp_path: Path, number: int
) -> None:
    words = [*QWEN3, "--use-tempo", "--window-size", "16,0"]
    one = train(data, tmp_path / "one", *words)
    folder = tmp_path / "two"
    layout: dict[str, Any] = {"world_size": 2, "config": zero(number)}
    save = ["--save", str(folder / "save")]
    two = train(data, folder, *words, *save, "--save-interval", "2", **layout)
    assert two.losses == pytest.approx(one.losses, rel=1e-4)
    (folder / "save" / "latest").write_text("iter_0000002")
    again = train(data, tmp_path / "again", *words, "--load", str(folder / "save"), **layout)
    assert again.losses_hex == two.losses_hex[2:]

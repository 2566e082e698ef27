"""Training of models beyond GPT-2: what their parts are comes from the arguments, and Tempo changes no loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from training_job import Data, Run, run, successful, write_unsealed

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
STAGES = {"ZeRO 1": 1, "ZeRO 3": 3}


def stage(number: int, precision: str = "fp32") -> dict[str, Any]:
    return {"zero_optimization": {"stage": number}, "bf16": {"enabled": precision == "bf16"}}


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
    stock = train(data, tmp_path / "stock", *words, *NO_DROPOUT, config=stage(1))
    assert stock.losses[-1] < stock.losses[0]
    cases = [("tempo", [], 1, True), ("tempo on two", SP, 2, True)]
    if words == QWEN3:  # whose norms of q and k have gradients to sum
        cases.append(("stock on two", SP, 2, False))
    for name, layout, world_size, tempo in cases:
        switch = "--use-tempo" if tempo else "--no-use-tempo"
        found = train(
            data, tmp_path / name, *words, *layout, *NO_DROPOUT, switch, world_size=world_size, config=stage(1)
        )
        assert found.losses == pytest.approx(stock.losses, rel=1e-4), name
        assert ("off (stock)" in found.output) is not tempo, name


@pytest.mark.slow
@pytest.mark.parametrize("number", STAGES.values(), ids=STAGES)
def test_masks_of_a_llama_are_the_same_on_two_processes_and_it_resumes_bit_for_bit(
    data: Data, tmp_path: Path, number: int
) -> None:
    words = [*QWEN3, "--use-tempo", "--window-size", "16,0"]
    one = train(data, tmp_path / "one", *words)
    folder = tmp_path / "two"
    layout: dict[str, Any] = {"world_size": 2, "config": stage(number)}
    save = ["--save", str(folder / "save")]
    two = train(data, folder, *words, *save, "--save-interval", "2", **layout)
    assert two.losses == pytest.approx(one.losses, rel=1e-4)
    (folder / "save" / "latest").write_text("iter_0000002")
    again = train(data, tmp_path / "again", *words, "--load", str(folder / "save"), **layout)
    assert again.losses_hex == two.losses_hex[2:]


@pytest.mark.slow
def test_a_checkpoint_from_before_models_were_described_still_loads(data: Data, tmp_path: Path) -> None:
    words = ["--save", str(tmp_path / "save")]
    train(data, tmp_path / "first", *words, "--use-tempo", "--exit-interval", "2", config=stage(1))
    checkpoint = tmp_path / "save" / "iter_0000002"
    saved = json.loads((checkpoint / "run.json").read_text())
    older = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_position_embeddings")
    newer = {"family", "num_query_groups", "kv_channels", "activation", "normalization", "norm_epsilon", "qk_layernorm",
             "add_bias_linear", "add_qkv_bias", "position_embedding_type", "rotary_base", "rotary_percent",
             "use_rope_scaling", "rope_scaling_factor", "window_size", "num_tokentypes", "add_binary_head",
             "decoder_seq_length"}  # fmt: skip
    assert newer <= saved.keys() and saved.keys() >= set(older)
    write_unsealed(checkpoint, **dict.fromkeys(newer))
    load = ["--load", str(tmp_path / "save"), "--use-tempo"]
    assert len(train(data, tmp_path / "second", *load, config=stage(1)).losses) == 2
    refused = run(data, tmp_path / "third", "--train-iters", "4", *load, "--swiglu", "--ffn-hidden-size", "256")
    assert "its activation is gelu, this run's is swiglu" in refused.output

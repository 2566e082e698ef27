"""The ledger of every family of models: fake tensors give what real ones give, and large models are cheap."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import parametrize_covering

from tempo_megatron import TempoConfig, cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.kept.ledger import Ledger, build_ledger_config, measure
from tempo_megatron.models.shape import make_shape, read_shape_file

FOLDER = Path(__file__).parents[2] / "configs" / "model"
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 96}
LLAMA = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "Llama": {**LLAMA, "num_query_groups": 2, "untie_embeddings_and_output_weights": True},
    "norms of q and k, a window": {**LLAMA, "qk_layernorm": True, "window_size": (16, 0)},
    "geglu": {"activation": "geglu", "hidden_dropout": 0.0},
    "squared relu": {"activation": "squared_relu"},
    "BERT": {"family": "bert", "num_tokentypes": 2, "add_binary_head": True},
    "T5": {"family": "t5"},
}
TEMPO = {"stock": TempoConfig.off(), "tempo": TempoConfig()}


def ledgers(
    values: dict[str, Any], tempo_config: TempoConfig, tp: int, recompute: tuple[str, ...] = ()
) -> list[Ledger]:
    """Measured on real tensors, and on fake ones."""
    cpu.use_cpu()
    shape = make_shape(**{**SIZES, **values})
    with simulate_layout(tp):
        config = build_ledger_config(shape, sequence_parallel=tp > 1, dtype=torch.bfloat16, recompute=recompute)
        sizes: dict[str, Any] = {"shape": shape, "seq_length": 96, "vocab_size": 512, "micro_batch_size": 2}
        return [measure(config, tempo_config, on_fake_tensors=is_fake, **sizes) for is_fake in (False, True)]


# Megatron compiles its squared relu, on a CPU too, and Dynamo looks at what autograd warns of.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@parametrize_covering(values=MODELS, tp=[1, 2], tempo_config=TEMPO)
def test_fake_tensors_give_every_row_of_real_ones(values: dict[str, Any], tp: int, tempo_config: TempoConfig) -> None:
    real, fake = ledgers(values, tempo_config, tp)
    assert fake.rows == real.rows and fake.layer_bytes == real.layer_bytes > 0


def test_tempo_keeps_no_scores_and_less_in_each_stack_of_a_t5() -> None:
    stock, tempo = (ledgers(MODELS["T5"], config, 2)[0] for config in TEMPO.values())
    assert tempo.scores_bytes == 0 < stock.scores_bytes
    for stack in ("encoder", "decoder"):
        kept = [
            sum(row.num_bytes for row in ledger.layer_rows if row.operation.startswith(stack) and not row.is_scores)
            for ledger in (stock, tempo)
        ]
        assert kept[1] < 0.65 * kept[0]
    assert {"decoder cross core_attention", "decoder cross linear_kv"} <= {row.operation for row in stock.rows}


def test_norms_of_q_and_k_have_rows_of_their_own() -> None:
    tempo = ledgers(MODELS["norms of q and k, a window"], TempoConfig(), 1)[0]
    assert {"q_layernorm", "k_layernorm"} <= {row.operation for row in tempo.layer_rows}


def test_the_mask_that_bert_makes_counts_once_and_not_in_each_layer() -> None:
    for config in TEMPO.values():
        ledger = ledgers(MODELS["BERT"], config, 1)[0]
        (mask,) = [row for row in ledger.outside_rows if row.operation == "attention mask"]
        assert mask.num_bytes == 2 * 96 * 96


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_every_model_has_a_ledger_in_seconds_and_without_its_memory(file: Path) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    cpu.use_cpu()
    shape = make_shape(**read_shape_file(file))
    tp = 8 if shape.num_attention_heads % 8 == 0 else 1
    with simulate_layout(tp):
        config = build_ledger_config(shape, sequence_parallel=tp > 1, dtype=torch.bfloat16, recompute=())
        stock, tempo = (
            measure(config, choice, shape=shape, vocab_size=51200, micro_batch_size=4, on_fake_tensors=True)
            for choice in TEMPO.values()
        )
    assert 0 < tempo.layer_bytes < 0.35 * stock.layer_bytes
    assert tempo.mean_layer_bytes == tempo.layer_bytes and tempo.num_layers == shape.num_layers
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_a_layer_of_the_175_billion_keeps_its_share_of_20_6_sbh() -> None:
    cpu.use_cpu()
    shape = make_shape(**read_shape_file(FOLDER / "gpt3_175b.json"))
    with simulate_layout(8):
        config = build_ledger_config(shape, sequence_parallel=True, dtype=torch.bfloat16, recompute=())
        kept = measure(config, TempoConfig(), shape=shape, vocab_size=51200, on_fake_tensors=True)
    assert kept.layer_sbh == pytest.approx(20.6 / 8, rel=0.01)

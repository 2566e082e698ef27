"""The ledger of every family: fake tensors give what real ones do, large models are cheap, layers meet their goals."""

from __future__ import annotations

import dataclasses
import math
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from allocated import measure_held
from covering import exhaustive, parametrize_covering
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from runs import build_run, change_run

from tempo_megatron import TempoConfig, cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.routing import assume_routing
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.show.ledger import measure_run
from tempo_megatron.memory.simulated.chunk import record_chunk
from tempo_megatron.memory.simulated.chunk_model import build_ledger_config
from tempo_megatron.memory.tape.follower import count_storage_bytes
from tempo_megatron.memory.tape.rows import sum_rows
from tempo_megatron.memory.tape.scopes import record_saved
from tempo_megatron.models.build import build_model, make_inputs
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.models.shape_file import read_shape_file
from tempo_megatron.slots import dropout_rng

# Megatron's advice for a run, which changes nothing here.
pytestmark = pytest.mark.filterwarnings("ignore:Using a large number of experts")
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
    "experts, top 2, shared ones": {
        **LLAMA,
        **{"num_experts": 4, "moe_ffn_hidden_size": 96, "moe_shared_expert_intermediate_size": 64},
        **{"moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.01},
    },
    "experts, padded to their capacity": {
        **LLAMA,
        **{"num_experts": 4, "moe_ffn_hidden_size": 96, "moe_expert_capacity_factor": 0.7},
        **{"moe_pad_expert_input_to_capacity": True, "moe_aux_loss_coeff": 0.01},
    },
    "squared relu": {"activation": "squared_relu"},
    "BERT": {"family": "bert", "num_tokentypes": 2, "add_binary_head": True},
    "T5": {"family": "t5"},
}
LATENT: dict[str, Any] = {
    **{**LLAMA, "position_embedding_type": "yarn"},
    **{"multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 64, "kv_lora_rank": 32},
    **{"qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 24},
}
TEMPO = {"stock": TempoConfig.off(), "tempo": TempoConfig()}
# Rows that a stock layer has, and those of them that Tempo leaves nothing in.
OWN_ROWS = {
    "experts, top 2, shared ones": (
        {"router", "dispatcher", "experts' linear_fc1", "experts' swiglu", "experts' linear_fc2"}
        | {"shared experts' swiglu", "shared experts' linear_fc2"},
        {"experts' linear_fc2", "shared experts' linear_fc2", "swiglu"},
    ),
    "T5": ({"decoder cross core_attention (s*s)", "decoder cross linear_kv"},) * 2,
    "BERT": ({"core_attention (s*s)", "attention mask"}, {"core_attention (s*s)"}),
}


def make_run(
    shape: ModelShape, tempo_config: TempoConfig, tp: int, micro_batch_size: int = 1, stock: str = "cpu"
) -> Run:
    return build_run(
        model=shape,
        etp=1 if shape.add_bias_linear or shape.num_experts is None else tp,
        moe_grouped_gemm=shape.num_experts is not None and stock == "transformer_engine",
        tempo=tempo_config,
        tp=tp,
        sp=tp > 1,
        micro_batch_size=micro_batch_size,
        stock=stock,
    )


def measure_real(shape: ModelShape, tempo_config: TempoConfig, tp: int) -> dict[str, int]:
    """Row -> bytes, of real tensors of one layer in each stack, two samples in bfloat16. The allocator has given no
    more for them than that, but for small numbers and the states of random generators that a recomputation keeps."""
    cpu.use_cpu()
    one = dataclasses.replace(shape, num_layers=1)
    # Megatron has squared ReLU compiled; what it keeps is the same.
    with torch.compiler.set_stance("force_eager"), simulate_layout(tp):
        config = build_ledger_config(one, sequence_parallel=tp > 1, dtype=torch.bfloat16, recompute=())
        model_parallel_cuda_manual_seed(1234)
        dropout_rng.set_micro_batch(1234, 0)
        model = build_model(one, config, tempo_config, 512).to(torch.bfloat16).train()
        inputs = make_inputs(one, 512, 2, causal_mask=tempo_config.attention == "off")
        if shape.family == "gpt" or tempo_config.loss != "off":
            labels = inputs["labels" if shape.family == "gpt" else "lm_labels"]
            inputs["loss_mask"] = torch.ones(labels.shape, dtype=torch.float32)
        given = [value for value in inputs.values() if value is not None]
        # At first what exists once for all micro batches is made.
        model(**inputs)
        dropout_rng.set_micro_batch(1234, 2)
        (output, saved), _, held = measure_held(lambda: record_saved(model, lambda: model(**inputs), given))
        outputs = count_storage_bytes(output if isinstance(output, tuple) else [output])
        assert 0 <= held - outputs - sum(each.num_bytes for each in saved) < 2**13
    return {row.operation: row.num_bytes for row in sum_rows(saved, [96], shape.activation)}


@parametrize_covering(values=MODELS, tp=[1, 2], tempo_config=TEMPO)
def test_fake_tensors_give_every_row_of_real_ones(values: dict[str, Any], tp: int, tempo_config: TempoConfig) -> None:
    shape = make_shape(**{**SIZES, **values}, vocab_size=512)
    fake = measure_run(make_run(shape, tempo_config, tp, 2))
    assert {row.operation: row.num_bytes for row in fake.rows} == measure_real(shape, tempo_config, tp)
    model = next(name for name, each in MODELS.items() if each == values)
    with_stock, not_with_tempo = OWN_ROWS.get(model, (set(), set()))
    titles = {row.operation for row in fake.rows}
    assert with_stock <= titles if tempo_config.norm == "off" else with_stock - not_with_tempo <= titles
    assert tempo_config.norm == "off" or not not_with_tempo & titles


AGAIN = TempoConfig(activation="recompute", norm="recompute")


@pytest.mark.parametrize(
    ("model", "tempo_config"),
    [
        ("Llama", dataclasses.replace(AGAIN, linear_fc1="recompute", linear_qkv="recompute")),
        ("experts, top 2, shared ones", dataclasses.replace(AGAIN, moe_permute="recompute")),
    ],
)
def test_fake_tensors_give_every_row_of_what_runs_again(model: str, tempo_config: TempoConfig) -> None:
    shape = make_shape(**{**SIZES, **MODELS[model]}, vocab_size=512)
    fake = measure_run(make_run(shape, tempo_config, 1, 2))
    assert {row.operation: row.num_bytes for row in fake.rows} == measure_real(shape, tempo_config, 1)


@pytest.mark.parametrize("tp", [1, 2])
def test_latent_attention_of_transformer_engine_keeps_what_tempos_on_real_tensors_does(tp: int) -> None:
    shape = make_shape(**{**SIZES, **LATENT}, vocab_size=512)
    fake = measure_run(make_run(shape, TempoConfig(), tp, 2, "transformer_engine"))
    real = measure_real(shape, TempoConfig(), tp)
    assert fake.layer_bytes == sum(real[name] for name in real.keys() - {row.operation for row in fake.outside_rows})


# Of each architecture the largest runs always; the others differ in sizes only.
ALIKE = ("gpt2_", "gpt3_6.7b", "gpt3_22b", "gpt3_175b", "gpt3_530b", "llama3.2", "qwen3_0.6b", "bert_base", "bert_tiny")
ALIKE += ("moonlight", "t5_tiny")
FILES = sorted(FOLDER.glob("*.json"))
SMALLER = [[file] for file in FILES if file.stem.startswith(ALIKE)]


@pytest.mark.parametrize(
    "file", [*(file for file in FILES if [file] not in SMALLER), *exhaustive(*SMALLER)], ids=lambda file: file.stem
)
def test_every_model_has_a_ledger_in_seconds_and_without_its_memory(file: Path) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    shape = make_shape(**{"vocab_size": 51200, **read_shape_file(file)})
    tp = 8 if shape.num_attention_heads % 8 == 0 else 1
    is_mixed = len({*shape.layers_with_experts}) == 2
    for modules, share in {"transformer_engine": 0.95, "cpu": 0.35}.items():
        if modules == "cpu" and shape.multi_latent_attention:
            continue  # there is no such run
        stock, tempo = (measure_run(make_run(shape, choice, tp, 4, modules)) for choice in TEMPO.values())
        assert 0 < tempo.layer_bytes < share * stock.layer_bytes
        assert len(tempo.layer_kinds) == len(stock.layer_kinds) == 1 + is_mixed
        assert (tempo.mean_layer_bytes < tempo.layer_bytes) == is_mixed and tempo.num_layers == shape.num_layers
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


QWEN3_30B_A3B = make_shape(
    num_layers=1, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=32, num_query_groups=4, kv_channels=128,
    seq_length=4096, normalization="RMSNorm", activation="swiglu", position_embedding_type="rope", qk_layernorm=True,
    add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0, vocab_size=128,
    num_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768, moe_aux_loss_coeff=1e-3,
)  # fmt: skip
MIXTURE = build_run(
    model=QWEN3_30B_A3B, tempo=TempoConfig.off(), stock="transformer_engine", dispatcher="alltoall",
    moe_grouped_gemm=True,
)  # fmt: skip


def count_kept(run: Run, name: str = "") -> int:
    """Bytes that operations with this in their names keep in a layer."""
    return sum(each.num_bytes for each in record_chunk(run)[0]["decoder", 0] if name in each.operation)


DEEPSEEK_V3 = dataclasses.replace(
    QWEN3_30B_A3B, hidden_size=7168, ffn_hidden_size=18432, num_attention_heads=128, num_query_groups=128,
    num_experts=256, moe_ffn_hidden_size=2048, moe_shared_expert_intermediate_size=2048,
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_num_groups=8,
    moe_router_group_topk=4, moe_router_dtype="fp32", position_embedding_type="yarn", multi_latent_attention=True,
    q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128,
)  # fmt: skip
DEEPSEEK = change_run(MIXTURE, model=DEEPSEEK_V3, ep=64, fuses_latent_rope=True)


OFF = TempoConfig.off()
KEEP_INPUTS = dataclasses.replace(OFF, activation="recompute", norm="recompute")
CHEAP = TempoConfig(activation="recompute", norm="recompute", attention="flash", dropout="recompute")


@pytest.mark.parametrize(
    ("run", "kept"),
    [
        (MIXTURE, (34.0, 20.1, 60.7)),
        (change_run(MIXTURE, tempo=CHEAP), (28.0, 9.1, 41.2)),
        (change_run(MIXTURE, tempo=dataclasses.replace(CHEAP, moe_permute="recompute")), (12.0, 9.1, 25.2)),
        (DEEPSEEK, (29.7, None, 64.0)),
        (change_run(DEEPSEEK, tempo=KEEP_INPUTS, recompute=("mla_up_proj",)), (25.1, None, 35.6)),
        (
            change_run(
                DEEPSEEK, tempo=dataclasses.replace(KEEP_INPUTS, moe_permute="repeat"), recompute=("mla_up_proj",)
            ),
            (9.1, None, 19.6),
        ),
    ],
)
def test_a_layer_with_experts_keeps_less_without_another_product_and_than_by_megatrons_recomputation(
    run: Run, kept: tuple[float | None, ...]
) -> None:
    """sbh of Qwen3-30B-A3B's and DeepSeek-V3's experts; projection, norms and core attention; everything."""
    for name, expected in zip(("mlp.experts", "self_attention", ""), kept, strict=True):
        assert expected in (None, round(count_kept(run, name) / (4096 * run.model.hidden_size), 1))


LLAMA_3_8B = dataclasses.replace(
    QWEN3_30B_A3B, hidden_size=4096, ffn_hidden_size=14336, num_query_groups=8, qk_layernorm=False, num_experts=None,
    moe_router_topk=2, moe_ffn_hidden_size=None, moe_aux_loss_coeff=0.0,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a large number of experts")
def test_what_runs_in_several_operations_keeps_more() -> None:
    def keep(run: Run, **values: Any) -> int:
        return sum(each.num_bytes for each in record_chunk(change_run(run, **values))[0]["decoder", 0])

    tokens = 4096
    # Both halves of a gated activation, and the other half, to which an offset is added (core/transformer/mlp.py: glu).
    gated = Run(model=LLAMA_3_8B, tempo=TempoConfig.off(), stock="transformer_engine")
    assert keep(gated, fuses_activation=False) - keep(gated) == 2 * 2 * tokens * 14336
    # Of squared ReLU, relu(x) and its square.
    squared = change_run(MIXTURE, activation="squared_relu")
    assert keep(squared) - keep(squared, fuses_activation=True) == 2 * 8 * tokens * 768
    # A gate has the output of the shared experts, and its own of each token.
    shared = change_run(MIXTURE, moe_shared_expert_intermediate_size=768)
    assert keep(shared, moe_shared_expert_gate=True) - keep(shared) == 2 * tokens * (2048 + 1)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
def test_a_capacity_bounds_the_rows_of_experts_and_padding_fills_them(dispatcher: str) -> None:
    def count_rows(**values: Any) -> float:
        """Of the rank's experts, by what the first linear keeps."""
        run = change_run(MIXTURE, dispatcher=dispatcher, ep=8, **values)
        saved = record_chunk(assume_routing(run, 0))[0]["decoder", 0]
        (found,) = {each.num_bytes for each in saved if each.operation.endswith("linear_fc2")}
        return found / (2 * 768)

    # Eight ranks' tokens for 16 experts: an equal share are the 8 copies of a rank's own.
    share = 8 * 4096
    assert count_rows(moe_imbalance=1.5, moe_expert_capacity_factor=3.0) == 1.5 * share
    assert count_rows(moe_expert_capacity_factor=1.0) == share
    assert count_rows(moe_expert_capacity_factor=0.7) == round(0.7 * share)
    if dispatcher != "flex":  # which does not pad
        assert count_rows(moe_expert_capacity_factor=1.3, moe_pad_expert_input_to_capacity=True) == 128 * math.ceil(
            share / 128 * 1.3
        )
    if dispatcher == "allgather":  # no expert gets a token twice
        assert count_rows(moe_expert_capacity_factor=20.0, moe_pad_expert_input_to_capacity=True) == 128 * 4096

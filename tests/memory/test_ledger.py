from __future__ import annotations

import json

import pytest
from runs import build_run

from tempo_megatron import TempoConfig
from tempo_megatron.cli import main
from tempo_megatron.memory.show.ledger import measure_run
from tempo_megatron.memory.tape.rows import find_row
from tempo_megatron.models.shape import make_shape

SCORES = "core_attention (s*s)"
SMALL = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 512, "num_attention_heads": 2, "vocab_size": 256}


def ledger(sizes, tempo_config, tp=1, sequence_parallel=False, *, stock="cpu", **settings):
    values = {"seq_length": 64, "vocab_size": 512, "attention_dropout": 0.1, "hidden_dropout": 0.1, **sizes, **settings}
    layout = {"tp": tp, "sp": sequence_parallel}
    return measure_run(build_run(model=make_shape(**values), tempo=tempo_config, stock=stock, **layout))


def test_the_loss_head_is_counted_in_the_form_that_training_runs() -> None:
    """Which losses count is known in training, and the fused head makes the gradients of its weight, of few tokens in
    one chunk, and of the hidden states in its forward."""
    s, h, v = 64, 128, 256
    rows = {row.operation: row.num_bytes for row in ledger(SMALL, TempoConfig()).outside_rows}
    assert rows["output_layer"] == 2 * v * h + 2 * s * h + 4


def test_a_ledger_of_experts_and_latent_attention_is_of_a_run_that_exists():
    """What latent attention is not, is refused in a sentence with the remedy."""
    latent = {
        **{"multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 64, "kv_lora_rank": 32},
        **{"qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 24, "normalization": "RMSNorm"},
        "position_embedding_type": "rope",
    }
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 96, "activation": "swiglu", "add_bias_linear": False}
    with pytest.raises(ValueError, match="give --stock transformer_engine"):
        ledger({**SMALL, **latent}, TempoConfig.off())
    on_gpu = {**SMALL, **latent, **experts}
    stock, tempo = (ledger(on_gpu, each, stock="transformer_engine") for each in (TempoConfig.off(), TempoConfig()))
    # One kernel attends: a logsumexp and no scores, as with Tempo's, whose other operations keep less.
    assert stock.scores_bytes == tempo.scores_bytes == 0 and tempo.layer_bytes < stock.layer_bytes
    local = ledger({**SMALL, **experts}, TempoConfig.off())
    assert {"router", "dispatcher", "experts' swiglu"} <= {row.operation for row in local.rows} and local.scores_bytes


@pytest.mark.parametrize(
    ("stock", "file", "dropout"),
    [
        ("cpu", {}, 0.1),
        ("local", {}, 0.1),
        ("transformer_engine", {"attention_dropout": 0.0, "hidden_dropout": 0.0}, 0.0),
    ],
)
def test_the_title_says_whose_modules_stock_has_and_the_models_own_dropout(tmp_path, capsys, file, dropout, stock):
    model = tmp_path / "small.json"
    model.write_text(json.dumps({**SMALL, "seq_length": 64, **file}))
    assert main(["ledger", "--model", str(model), "--stock", stock]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    modules = {
        "cpu": "Megatron's local ones on a CPU",
        "local": "Megatron's local ones, with unfused attention",
        "transformer_engine": "Transformer Engine's, with fused",
    }
    assert f", dropout {dropout:g}, TP 1, stock modules: {modules[stock]}" in title
    assert any("(s*s)" in line for line in lines) == (stock != "transformer_engine")
    # Only stock's addition with dropout keeps a mask.
    assert any(line.startswith("mlp_bda") for line in lines) == (dropout > 0)


LAYERS = {"0-1": {"norm": "off", "dropout": "off"}, "3": {"activation": "recompute", "attention": "off"}}
MIXED = TempoConfig(activation="inplace", layers=LAYERS)


def test_the_command_prints_one_table_with_each_kind_of_layer_writes_the_same_figures_and_draws_them(tmp_path, capsys):
    model, out, png = tmp_path / "small.json", tmp_path / "ledger.json", tmp_path / "plots" / "ledger.png"
    model.write_text(json.dumps({**SMALL, "num_layers": 4, "seq_length": 64}))
    argv = ["ledger", "--model", str(model), "--tp", "2", "--sequence-parallel", "--json", str(out), "--stock", "cpu"]
    assert main([*argv, "--plot", str(png), "--tempo-layers", json.dumps(LAYERS)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
    text, figures = capsys.readouterr().out, json.loads(out.read_text())
    for row in ("input_layernorm", "core_attention", SCORES, "gelu", "linear_fc2", "model, 4 layers"):
        assert row in text
    stock, tempo = figures["stock"], figures["tempo"]
    assert f"{stock['layer_bytes']:,}" in text and f"{tempo['layer_bytes'] / stock['layer_bytes']:.3f}" in text
    # What "auto" became.
    values = "activation=inplace norm=inplace dropout=recompute attention=flash loss=fused"
    assert f"tempo: {values}" in text and figures["tempo_config"].startswith(values)
    assert "left: norm in decoder.layers.0-1 (input_layernorm, pre_mlp_layernorm): off for layers 0-1\n" in text
    assert [kind["layers"] for kind in tempo["layer_kinds"]] == ["0-1", "2", "3"]
    for kind in tempo["layer_kinds"]:
        (line,) = [line for line in text.splitlines() if line.startswith(f"each of layers {kind['layers']} ")]
        assert f"{kind['layer_bytes']:,}" in line


def test_each_kind_of_layer_is_measured_and_the_model_is_their_sum():
    found = ledger({**SMALL, "num_layers": 6}, MIXED)
    alone = [ledger(SMALL, MIXED.for_layer(layer)).layer_bytes for layer in range(6)]
    kinds = [(kind.layers, kind.num_layers, kind.layer_bytes) for kind in found.layer_kinds]
    assert kinds == [("0-1", 2, alone[0]), ("2,4-5", 3, alone[2]), ("3", 1, alone[3])]
    # Embedding, final norm and loss head are those of a model without `layers`.
    around = ledger(SMALL, TempoConfig(activation="inplace"))
    outside = around.model_bytes - around.num_layers * around.layer_bytes
    assert found.model_bytes == sum(alone) + outside
    assert found.mean_layer_bytes == pytest.approx(sum(alone) / 6)
    assert found.report.counts["dropout"] == (8, 12)


@pytest.mark.parametrize(("num_keys", "is_scores"), [(128, True), (129, True), (130, False)])
def test_scores_with_a_sink_are_scores(num_keys: int, is_scores: bool) -> None:
    row = find_row("decoder.layers.0.self_attention.core_attention", (1, 4, 128, num_keys), {128})
    assert row.is_scores is is_scores

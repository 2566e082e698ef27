from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from distributed import run_megatron_ranks
from megatron.core.activations import squared_relu
from torch.nn import functional as F

from tempo_megatron import TempoConfig, cpu
from tempo_megatron.cli import main
from tempo_megatron.memory.commands.ledger import format_table
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.kept.attribution import Row, find_row
from tempo_megatron.memory.kept.ledger import Ledger, build_ledger_config, measure
from tempo_megatron.memory.kept.plots import list_panels
from tempo_megatron.models.shape import make_shape

SCORES = "core_attention (s*s)"

CONFIGS = Path(__file__).parents[2] / "configs"
GPT2 = json.loads((CONFIGS / "model" / "gpt2_124m.json").read_text(encoding="utf-8"))
SMALL = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 512, "num_attention_heads": 2, "vocab_size": 256}


def ledger_in_this_layout(sizes, tempo_config, sequence_parallel, recompute=(), seq_length=64, dropout=0.1):
    shape = make_shape(**{"seq_length": seq_length, **sizes}, attention_dropout=dropout, hidden_dropout=dropout)
    config = build_ledger_config(shape, sequence_parallel=sequence_parallel, dtype=torch.bfloat16, recompute=recompute)
    return measure(config, tempo_config, vocab_size=512, seq_length=seq_length)


def ledger(sizes, tempo_config, tp=1, sequence_parallel=False, **settings):
    cpu.use_cpu()
    with simulate_layout(tp):
        return ledger_in_this_layout(sizes, tempo_config, sequence_parallel, **settings)


def test_a_stock_layer_keeps_at_least_34_sbh_and_its_scores():
    stock = ledger(GPT2, TempoConfig.off(), seq_length=1024)
    assert stock.layer_sbh >= 34
    # a s**2 b: softmax output and dropout output of 2 bytes each, and a mask of at least 1.
    assert stock.scores_bytes >= 5 * 12 * 1024**2


def test_the_loss_head_is_counted_in_the_form_that_training_runs() -> None:
    """Which losses count is known in training, and the fused head makes the gradients of its weight, of few tokens in
    one chunk, and of the hidden states in its forward."""
    s, h, v = 64, 128, 512
    rows = {row.operation: row.num_bytes for row in ledger(SMALL, TempoConfig()).outside_rows}
    assert rows["output_layer"] == 2 * v * h + 2 * s * h + 4


RECOMPUTE = TempoConfig(activation="recompute", norm="recompute")


def test_every_byte_of_a_layer_that_keeps_inputs_is_accounted_for():
    s, h, heads = 64, 128, 2
    tempo = ledger(SMALL, RECOMPUTE)
    # 16-bit x of two norms, qkv, context, gelu input; mean and rstd of two norms; logsumexp per head.
    assert tempo.layer_bytes == 2 * s * h * (2 + 3 + 1 + 4) + 2 * 2 * 4 * s + 4 * s * heads


def test_every_byte_of_a_tempo_layer_is_accounted_for():
    s, h, heads = 64, 128, 2
    tempo = ledger(SMALL, TempoConfig())
    # 16-bit y of two norms, qkv, context, gelu output; one bit per gelu element; rstd twice; logsumexp per head; gamma
    # and beta of two norms, whatever the number of tokens.
    per_token = 2 * h * (1 + 3 + 1 + 1 + 4) + 4 * h // 8 + 2 * 4 + 4 * heads
    assert tempo.layer_bytes == s * per_token + 2 * 2 * 4 * h


@pytest.mark.slow
@pytest.mark.parametrize("tempo_config", [TempoConfig(), TempoConfig.off()], ids=["tempo", "stock"])
def test_a_simulated_layout_keeps_what_real_ranks_keep(tempo_config):
    real = run_megatron_ranks(ledger_in_this_layout, 2, 2, SMALL, tempo_config, True)
    assert real[0].rows == real[1].rows == ledger(SMALL, tempo_config, 2, True).rows


def test_the_command_prints_one_table_writes_the_same_figures_and_draws_them(tmp_path, capsys):
    model, out, png = tmp_path / "small.json", tmp_path / "ledger.json", tmp_path / "plots" / "ledger.png"
    model.write_text(json.dumps({**SMALL, "seq_length": 64}))
    argv = ["ledger", "--model", str(model), "--tp", "2", "--sequence-parallel", "--json", str(out)]
    assert main([*argv, "--plot", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
    text, figures = capsys.readouterr().out, json.loads(out.read_text())
    for row in ("input_layernorm", "core_attention", SCORES, "gelu", "linear_fc2", "model, 2 layers"):
        assert row in text
    stock, tempo = figures["stock"], figures["tempo"]
    assert f"{stock['layer_bytes']:,}" in text and f"{tempo['layer_bytes']:,}" in text
    assert f"{tempo['layer_bytes'] / stock['layer_bytes']:.3f}" in text
    # What "auto" became.
    values = "activation=inplace norm=inplace dropout=recompute attention=flash loss=fused"
    assert f"tempo: {values}\n" in text and figures["tempo_config"] == values


def test_the_plot_has_panels_for_what_there_is():
    bars = {"stock": {"linear_fc1": 2, SCORES: 3}}
    panels = list_panels(bars, bars)
    assert [*panels] == ["one layer", "one layer without s*s", "around the layers"]
    assert panels["one layer without s*s"] == {"stock": {"linear_fc1": 2}}
    assert [*list_panels({"Tempo": {"linear_fc1": 2}}, {"Tempo": {"loss": 0}})] == ["one layer"]


@pytest.mark.parametrize(
    ("changes", "name", "choice"),
    [
        ({}, "gelu", "inplace"),
        ({"activation_func": F.silu, "gated_linear_unit": True}, "swiglu", "auto"),
        ({"activation_func": squared_relu}, "squared_relu", "inplace"),
        ({"activation_func": F.relu}, "relu", "off"),
    ],
    ids=["gelu", "swiglu", "squared relu", "relu"],
)
def test_the_activations_row_has_the_name_of_the_activation_that_was_measured(changes, name, choice):
    cpu.use_cpu()
    with simulate_layout(1):
        config = build_ledger_config(
            make_shape(**SMALL, seq_length=64), sequence_parallel=False, dtype=torch.bfloat16, recompute=()
        )
        changed = dataclasses.replace(config, **changes)
        found = measure(changed, TempoConfig(activation=choice), vocab_size=512, seq_length=64)
    rows = [line.split()[0] for line in format_table(found, found).splitlines()]
    assert rows.index("pre_mlp_layernorm") < rows.index(name) < rows.index("one")  # layer without s*s


def test_a_row_that_the_table_of_operations_does_not_know_stands_last():
    known = ledger(SMALL, TempoConfig())
    (kind,) = known.layer_kinds
    more = dataclasses.replace(
        known, layer_kinds=(dataclasses.replace(kind, rows=(Row("new operation", 640), *kind.rows)),)
    )
    assert isinstance(more, Ledger) and more.layer_bytes == known.layer_bytes + 640
    lines = format_table(known, more).splitlines()
    assert "640" in lines[[line.startswith("one layer without") for line in lines].index(True) - 2]


LAYERS = {"0-1": {"norm": "off", "dropout": "off"}, "3": {"activation": "recompute", "attention": "off"}}
MIXED = TempoConfig(activation="inplace", layers=LAYERS)


def test_each_kind_of_layer_is_measured_and_the_model_is_their_sum():
    cpu.use_cpu()
    with simulate_layout(1):
        shape = make_shape(**{**SMALL, "num_layers": 6}, seq_length=64, attention_dropout=0.1, hidden_dropout=0.1)
        config = build_ledger_config(shape, sequence_parallel=False, dtype=torch.bfloat16, recompute=())
        found = measure(config, MIXED, vocab_size=512, seq_length=64, on_fake_tensors=True)
    alone = [ledger(SMALL, MIXED.for_layer(layer)).layer_bytes for layer in range(6)]
    kinds = [(kind.layers, kind.num_layers, kind.layer_bytes) for kind in found.layer_kinds]
    assert kinds == [("0-1", 2, alone[0]), ("2,4-5", 3, alone[2]), ("3", 1, alone[3])]
    # Embedding, final norm and loss head are those of a model without `layers`.
    around = ledger(SMALL, TempoConfig(activation="inplace"))
    outside = around.model_bytes - around.num_layers * around.layer_bytes
    assert found.model_bytes == sum(alone) + outside
    assert found.mean_layer_bytes == pytest.approx(sum(alone) / 6)
    assert found.report.counts["dropout"] == (8, 12)


def test_the_command_lists_each_kind_of_layer_and_what_is_left(tmp_path, capsys):
    model, out = tmp_path / "small.json", tmp_path / "ledger.json"
    model.write_text(json.dumps({**SMALL, "num_layers": 4, "seq_length": 64}))
    argv = ["ledger", "--model", str(model), "--json", str(out), "--tempo-layers", json.dumps(LAYERS)]
    assert main(argv) == 0
    text, kinds = capsys.readouterr().out, json.loads(out.read_text())["tempo"]["layer_kinds"]
    assert "left: norm in decoder.layers.0-1 (input_layernorm, pre_mlp_layernorm): off for layers 0-1\n" in text
    assert [kind["layers"] for kind in kinds] == ["0-1", "2", "3"]
    for kind in kinds:
        (line,) = [line for line in text.splitlines() if line.startswith(f"each of layers {kind['layers']} ")]
        assert f"{kind['layer_bytes']:,}" in line


@pytest.mark.parametrize(("num_keys", "is_scores"), [(128, True), (129, True), (130, False)])
def test_scores_with_a_sink_are_scores(num_keys: int, is_scores: bool) -> None:
    row = find_row("decoder.layers.0.self_attention.core_attention", (1, 4, 128, num_keys), {128})
    assert row.is_scores is is_scores

"""FLOPs, MFU and HFU: the columns of arXiv 2205.05198's table 5, and what the command says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tempo_megatron.cli import main
from tempo_megatron.memory.plan.flops import (
    count_forward_flops,
    count_hardware_flops,
    count_model_flops,
    find_utilisation,
)
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.models.shape import make_shape
from tempo_megatron.models.shape_file import read_shape_file

V, S = 51200, 2048
# Table 3 and the "present work" columns of table 5: file, heads, hidden size, layers, GPUs, samples, seconds, MFU, HFU.
PAPER = {
    "gpt3_22b": (6144, 48, 8, 4, 1.10, 41.5, 43.7),
    "gpt3_175b": (12288, 96, 64, 64, 13.75, 51.4, 52.8),
    "gpt3_530b": (20480, 105, 280, 280, 37.83, 56.0, 57.0),
    "gpt3_1t": (25600, 128, 512, 512, 71.49, 56.3, 57.0),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_columns_come_out_to_the_printed_digit(name: str) -> None:
    h, num_layers, num_gpus, num_samples, seconds, mfu, hfu = PAPER[name]
    forward = count_forward_flops(make_shape(**read_shape_file(f"configs/model/{name}.json")), num_samples, V)
    model, hardware = count_model_flops(forward), count_hardware_flops(forward, ("core_attn",))
    equation = 72 * num_samples * num_layers * S * h * h
    assert model == pytest.approx(equation * (1 + S / (6 * h) + V / (12 * h * num_layers)), rel=1e-12)
    printed = hardware.as_in_equation_8
    assert printed == pytest.approx(equation * (1 + S / (3 * h) + V / (12 * h * num_layers)), rel=1e-12)
    assert hardware.total == pytest.approx(equation * (1 + 2 * S / (9 * h) + V / (12 * h * num_layers)), rel=1e-12)
    peak = read_gpu("a100").matmul_flops_per_second["bf16"]
    for flops, expected in ((model, mfu), (printed, hfu)):
        # The seconds are printed with two decimals; the share lies between those of the times that round to them.
        low, high = (100 * find_utilisation(flops, seconds + end, num_gpus, peak) for end in (0.005, -0.005))
        assert low - 0.05 <= expected <= high + 0.05


@pytest.mark.parametrize(
    ("name", "active"),
    # As the models' reports have it, with the output layer and without the embedding.
    [("qwen3_30b_a3b", 3.0e9), ("mixtral_8x7b", 12.7e9), ("deepseek_v3", 36.6e9), ("moonlight_16b", 2.6e9)],
)
def test_of_experts_those_count_that_a_token_goes_to(name: str, active: float) -> None:
    shape = make_shape(**read_shape_file(f"configs/model/{name}.json"))
    assert shape.vocab_size is not None
    forward = count_forward_flops(shape, 1, shape.vocab_size)
    weights = (forward.projections + forward.mlp + forward.head) / (2 * shape.seq_length)
    assert weights == pytest.approx(active, rel=0.02)


def test_a_t5_counts_each_stack_by_its_own_tokens_and_cross_attention_by_both() -> None:
    shape = make_shape(family="t5", num_layers=3, hidden_size=8, num_attention_heads=2, seq_length=16,
                       decoder_seq_length=4)  # fmt: skip
    found, h, s, d = count_forward_flops(shape, 5, 32), 8, 16, 4
    assert found.projections == 3 * 5 * 2 * h * h * (4 * s + 4 * d + 2 * d + 2 * s)
    assert found.core_attention == 3 * 5 * 4 * h * (s * s + d * d + d * s)
    assert found.mlp == 3 * 5 * 16 * h * h * (s + d) and found.head == 5 * 2 * d * h * 32


def test_recomputation_adds_what_runs_again() -> None:
    shape = make_shape(**read_shape_file("configs/model/llama3_8b.json"))
    forward = count_forward_flops(shape, 2, shape.vocab_size or V)
    model = count_model_flops(forward)
    h, kv, f, s, tokens = 4096, 1024, 14336, shape.seq_length, 2 * shape.seq_length
    layer = 2 * tokens * h * (2 * h + 2 * kv + 3 * f) + 4 * tokens * s * h
    assert forward.layers == 32 * layer and forward.head == 2 * tokens * h * (shape.vocab_size or V)
    assert count_hardware_flops(forward, ()).total == model
    assert count_hardware_flops(forward, ("full",)).total == model + forward.layers
    assert count_hardware_flops(forward, ("mlp",)).total == model + 32 * 2 * tokens * h * 3 * f
    both = count_hardware_flops(forward, ("core_attn", "mlp"))
    assert both.total == model + forward.mlp + forward.core_attention and both.as_in_equation_8 is None


def test_the_command_shows_the_right_count_beside_the_printed_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = tmp_path / "flops.json"
    command = ["flops", "--model", "configs/model/gpt3_175b.json", "--tp", "8", "--recompute", "core_attn"]
    step = ["--global-batch-size", "64", "--gpus", "64", "--step-seconds", "13.75", "--gpu", "a100"]
    assert main([*command, *step, "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert "MFU 51.4%" in out and "HFU 51.8%" in out and "HFU 52.8%" in out
    assert json.loads(figures.read_text())["mfu"] == pytest.approx(0.5138, abs=1e-4)

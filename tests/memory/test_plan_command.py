"""`tempo-megatron plan`: its table, its JSON, its plot, and one sentence for what cannot be planned."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from covering import exhaustive

from tempo_megatron import TempoConfig
from tempo_megatron.cli import main

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "configs" / "model"
LARGE = [
    "plan",
    f"--model={MODELS / 'gpt3_175b.json'}",
    "--gpu=h100",
    "--tp=8",
    "--pp=8",
    "--sequence-parallel",
    "--micro-batch-size=4",
]
SMALL = ["plan", f"--model={MODELS / 'gpt2_345m.json'}", "--fixed-memory=6GB", "--micro-batch-size=8"]


def test_the_plan_for_sizes_of_each_stage_is_a_block_arguments_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    sizes = [f"{50 - stage}GiB" for stage in range(8)]
    assert main([*LARGE, "--gpu-memory=56GiB", "--fixed-memory", *sizes, f"--json={file}"]) == 0
    out = capsys.readouterr().out
    figures = json.loads(file.read_text())
    config = TempoConfig.from_file(file)
    assert config == TempoConfig.from_dict(figures["tempo"]) and config.layers
    lines = out.splitlines()
    assert json.loads(lines[-2]) == {"tempo": figures["tempo"]}
    assert lines[-1].split() == figures["megatron_arguments"]
    assert "gpt3_175b, bf16, s 2048, b 4, TP 8 + SP, PP 8, DP 1: 64 ranks" in out and "of 56.00 GiB a GPU" in out
    assert "data-sheet (uncalibrated) rates" in out
    assert [stage["layers"] for stage in figures["stages"]] == [[n, n + 11] for n in range(0, 96, 12)]
    assert max(stage["peak_bytes"] for stage in figures["stages"]) <= 0.97 * 56 * 2**30
    assert figures["gpu"]["calibrated"] is False


@pytest.mark.slow
def test_without_fixed_memory_the_plan_fits_by_few_estimates_which_a_terminal_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, model = tmp_path / "plan.json", MODELS / "gpt2_345m.json"
    arguments = ["plan", f"--model={model}", "--gpu=h100", "--gpu-memory=8GiB", "--micro-batch-size=4"]
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main([*arguments, f"--json={file}"]) == 0
    counted = re.findall(r"\rplan: (\d+) estimates of a step", terminal.getvalue())
    assert counted == [str(number) for number in range(1, len(counted) + 1)] and 0 < len(counted) <= 9
    figures = json.loads(file.read_text())
    (stage,) = figures["stages"]
    assert 0.95 * 8 * 2**30 < stage["peak_bytes"] <= 0.97 * 8 * 2**30


ZERO = f"--deepspeed_config={ROOT / 'configs' / 'deepspeed' / 'zero1_bf16.json'}"
OTHER = "--gpu=rtx4090 --fixed-memory=4GB --tp=2 --gpu-memory=20GiB --micro-batch-size=2"
NONE = "\nwithout --recompute-granularity"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "device", "found"),
    [
        ("--gpu-memory=16GB", "NVIDIA A100-SXM4-80GB", ["\nNVIDIA A100", "Transformer Engine's", NONE]),
        (f"--gpu-memory=16GB {ZERO}", None, ["\nNVIDIA H100", "Megatron's local ones", "attention=flash"]),
        (f"{OTHER} --plot={{png}} --model={MODELS}/bert_large.json", None, [", TP 2, "]),
    ],
)
def test_what_is_asked_is_planned(
    words: str,
    device: str | None,
    found: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without --gpu the rates are this machine's or an H100's; with DeepSpeed's file modules are our trainer's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    png = tmp_path / "plan.png"
    assert main([*SMALL, *words.format(png=png).split()]) == 0
    out = capsys.readouterr().out
    assert all(each in out for each in found), out
    assert "{png}" not in words or png.read_bytes().startswith(b"\x89PNG")


MIXTURE = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 512 "
    "--max-position-embeddings 512 --micro-batch-size 2 --global-batch-size 16 --bf16 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --qk-layernorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 "
    "--vocab-size 1000 --tokenizer-type NullTokenizer --use-distributed-optimizer --moe-grouped-gemm --num-experts 8 "
    "--moe-router-topk 4 --moe-ffn-hidden-size 192 --moe-token-dispatcher-type alltoall"
)
FEW_CHOICES = (
    "--use-tempo --tempo-activation recompute --tempo-norm recompute --tempo-linear-fc1 off --tempo-linear-qkv off "
    "--tempo-moe-permute off --tempo-attention flash --tempo-dropout off"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 64 --qk-head-dim 64 --v-head-dim 64 --qk-pos-emb-head-dim 32 "
    "--moe-layer-freq [0,1,1,1] --pipeline-model-parallel-size 2"
)


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    file = tmp_path / "mixture.json"
    sizes = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 512, "vocab_size": 1000}
    experts = {"num_experts": 8, "moe_router_topk": 4, "moe_ffn_hidden_size": 192, "activation": "swiglu"}
    file.write_text(json.dumps({**sizes, **experts, "normalization": "RMSNorm", "add_bias_linear": False}))
    return file


def plan(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[float, str]:
    """What a plan command needs, in bytes, and what it says."""
    status = main(["plan", *words])
    out, err = capsys.readouterr()
    assert status == 0 or " the least that fits is " in err, err
    (text,) = re.findall(r"the least that fits is ([\d.]+ .iB)", err) or [""]
    return (float(text[:-4]) * {"M": 2**20, "G": 2**30}[text[-3]] if text else 0.0), out + err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--world-size=2", "--gpu-memory=40MiB", "--margin=1", "--recompute-allowed"], f"{MIXTURE} {FEW_CHOICES}"),
        *exhaustive(
            (["--model={mixture}", "--dp=2", "--gpu-memory=40MiB", "--recompute-allowed"], ""),
            (["--model={mixture}", "--fixed-memory=30MiB", "--gpu-memory=32MiB", "--micro-batch-size=2"], ""),
        ),
    ],
)
def test_each_remedy_is_taken_and_helps(
    words: list[str], command: str, mixture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--gpu=h100", *(word.format(mixture=mixture) for word in words)]
    needed, text = plan([*asked, *(["--", *command.split()] if command else [])], capsys)
    own, _, of_command = text.rpartition("; give ")[2].strip().partition(", or in the command ")
    options = [option.split() for option in own.split(" or ")]
    assert needed and options[0][0] == "--gpu-memory" and len(options) + bool(of_command) >= 2
    for option in options:
        less, said = plan([*asked, *option, *(["--", *command.split()] if command else [])], capsys)
        assert less < needed, (option, said)
        assert less == 0 or option[0] != "--gpu-memory"
    for option in filter(None, of_command.split(" or ")):
        less, said = plan([*asked, "--", *command.split(), *option.split()], capsys)
        assert less < needed, (option, said)


def test_experts_that_are_not_divided_are_named(mixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--model={mixture} --dp=8 --gpu=h100 --gpu-memory=80GiB --fixed-memory=50GB --recompute-allowed".split()
    _, whole = plan(words, capsys)
    _, divided = plan([*words, "--ep=8"], capsys)
    assert "the 8 experts are not divided: each of 8 ranks has all of them; --ep divides them" in whole
    assert "not divided" not in divided and ", EP 8, PP 1, DP 8: " in divided
    assert "2.40 GiB (3 %) stay free" in divided


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "asked", "budget", "found"),
    [
        (
            f"--expert-model-parallel-size 2 {LATENT}",
            ["--world-size=4", "--moe-imbalance=1.3"],
            66 << 20,
            "--recompute-granularity selective --recompute-modules mla_up_proj",
        ),
        *exhaustive(("", ["--world-size=1", "--recompute-allowed"], 132 << 20, "without --recompute-granularity")),
    ],
)
def test_layers_with_experts_and_latent_attention_fit_by_the_estimate(
    words: str, asked: list[str], budget: int, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    command = [*MIXTURE.split(), *words.split(), "--use-tempo"]
    assert main(["plan", "--gpu=h100", f"--gpu-memory={budget}", f"--json={file}", *asked, "--", *command]) == 0
    written = capsys.readouterr().out
    assert found in written.splitlines()
    figures = json.loads(file.read_text())
    imbalance = figures["moe_imbalance"]
    assert (f"the fullest rank get {imbalance:.2f} times an equal share" in written) == (imbalance > 1) == bool(words)
    assert budget * 0.9 < max(stage["peak_bytes"] for stage in figures["stages"]) <= budget
    # Tokens of other ranks are not sent again unasked; one rank's own are gathered again.
    of_layers = [figures["tempo"], *figures["tempo"].get("layers", {}).values()]
    assert {values.get("moe_permute", "off") for values in of_layers} == {"off" if words else "recompute"}

"""Long sequences: the terms of a moment are tensors that a recomputed layer of the same kind really makes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tempo_megatron.cli import main
from tempo_megatron.memory.estimate.long_sequences import PIECES, LongSequence
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.step_simulation import list_recomputed_layers, simulate_step
from tempo_megatron.memory.run import OptimizerSettings, Run
from tempo_megatron.memory.storages import PeakBytes
from tempo_megatron.models.shape import make_shape, read_shape_file
from tempo_megatron.settings.config import TempoConfig

MODEL = "configs/model/llama3_8b.json"
OFFLOADED = OptimizerSettings(kind="deepspeed", zero_stage=3, offloads=True, offloads_weights=True)


def make_long(*pieces: str, num_gpus: int = 1) -> LongSequence:
    return LongSequence(make_shape(**read_shape_file(MODEL)), OFFLOADED, frozenset(pieces), num_gpus)


def test_the_loss_of_transformers_makes_what_its_terms_say() -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    vocab, tokens = 1024, 64
    logits, labels = (
        torch.randn(1, tokens, vocab, dtype=torch.bfloat16, requires_grad=True),
        torch.ones(1, tokens).long(),
    )
    with PeakBytes(logits, labels) as seen:
        seen.begin_phase()
        ForCausalLMLoss(logits, labels, vocab).backward()
        peak = seen.peak
    terms = {term.name: term.bytes_per_token for term in make_long().list_moments()["loss"]}
    expected = terms["logarithm of the softmax"] + terms["gradients of it and of the float32 logits"]
    # Beside the logits themselves; labels and sums of a token are small.
    assert expected * vocab / make_long().model.vocab_size * tokens == pytest.approx(peak, rel=0.01)  # type: ignore[operator]


def test_each_piece_only_takes_away_and_the_most_tokens_fit_and_no_thousand_more() -> None:
    assert make_long().num_parameters == 8_030_261_248
    pieces, before = [], 0
    for name in ("tempo", "host_checkpoints", "host_attention", "tiled_mlp", "one_group", "tiled_norms"):
        pieces.append(name)
        long = make_long(*pieces)
        tokens = long.find_most_tokens(78 * 2**30)
        assert tokens > before and tokens % 1000 == 0
        assert long.find_peak(tokens)[2] <= 78 * 2**30 < long.find_peak(tokens + 1000)[2]
        before = tokens
    assert set(pieces) | {"liger"} == set(PIECES)
    sent = make_long(*pieces).count_host_bytes(1000) - make_long(*pieces).count_host_bytes(0)
    assert sent == 1000 * 32 * (2 * 4096 + 2 * 4096 + 4 * 32)
    # The weights of a rank are its part, and each of 8 GPUs has about as many tokens.
    assert 7 * before < 8 * make_long(*pieces, num_gpus=8).find_most_tokens(78 * 2**30) < 8 * before


def test_attention_that_does_not_run_again_saves_its_share_of_a_step() -> None:
    gpu, shape = read_gpu("h100"), make_long().model
    shape = dataclasses.replace(shape, seq_length=2**19, max_position_embeddings=2**19)
    run = Run(model=shape, tempo=TempoConfig.off())
    assert gpu.host_link is not None
    full, kept = (
        simulate_step(list_recomputed_layers(run, gpu, keeps_attention=keeps), gpu.host_link) for keeps in (False, True)
    )
    # Per token linears are 2 x 218,103,808 FLOPs and attention 4 x 4096 x s / 2.
    linears, attention = 2 * 218_103_808, 4 * 4096 * (2**19 + 1) / 2
    assert full.waiting_seconds == kept.waiting_seconds == 0
    assert full.seconds / kept.seconds == pytest.approx(
        (4 * linears + 4.5 * attention) / (4 * linears + 3.5 * attention), rel=1e-6
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--long-sequence", "ligr"], "ligr is no piece of a long sequence; expected some of liger"),
        (["--long-sequence", "one_group"], "one_group is asked for without host_checkpoints"),
        (["--long-sequence", "--dp", "3"], "--long-sequence divides --seq-length 8192 by --dp 3"),
        (["--long-sequence", "--dp", "64"], "32 are not a multiple of 64"),
        (["--long-sequence", "--zero", "2"], "long sequences are estimated with DeepSpeed's ZeRO 3 only"),
        (["--long-sequence", "--model", "configs/model/gpt2_124m.json"], "this one has LayerNorm and gelu"),
    ],
)
def test_what_cannot_be_estimated_is_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = [] if "--zero" in words else ["--zero", "3"]
    assert main(["estimate", "--model", MODEL, *zero, *words]) == 2
    assert message in capsys.readouterr().err


def test_the_command_lists_terms_that_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, options = tmp_path / "long.json", ["--seq-length", "400000", "--zero", "3", "--gpu-memory", "78GiB"]
    pieces = ["tempo", "host_checkpoints", "host_attention", "tiled_mlp", "tiled_norms"]
    assert main(["estimate", "--model", MODEL, *options, "--json", str(file), "--long-sequence", *pieces]) == 1
    out, figures = capsys.readouterr().out, json.loads(file.read_text())
    assert sum(figures["terms"].values()) == pytest.approx(figures["peak_bytes"], abs=20)
    assert f"peak, in the {figures['moment']}" in out and "78.00 GiB a GPU hold" in out

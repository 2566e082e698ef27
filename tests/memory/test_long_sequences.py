"""Long sequences: the terms of a moment are tensors that a recomputed layer of the same kind really makes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tempo_megatron.cli import main
from tempo_megatron.memory.estimate.long_allocations import count_reserved, play_steps
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


NARROW = dataclasses.replace(
    make_long().model,
    hidden_size=1024,
    ffn_hidden_size=3584,
    num_attention_heads=8,
    num_query_groups=2,
    num_layers=1,
)


def make_narrow_llama() -> Any:
    """NARROW, with few words."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=NARROW.hidden_size,
        intermediate_size=NARROW.ffn_hidden_size,
        num_attention_heads=NARROW.num_attention_heads,
        num_key_value_heads=NARROW.num_query_groups,
        num_hidden_layers=NARROW.num_layers,
        vocab_size=64,
    )
    return transformers.LlamaForCausalLM(config).bfloat16().train()


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


def test_the_reduction_of_gradients_has_what_deepspeed_makes_of_the_largest_one() -> None:
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3", reason="DeepSpeed is not installed").__dict__
    norm, long = stage3["DeepSpeedZeroOptimizer_Stage3"]._constant_buffered_norm2, make_long()
    with FakeTensorMode(), PeakBytes() as seen:
        part = torch.empty(128256 * 4096, dtype=torch.bfloat16)
        # As partition_grads: a copy of the rank's part, its norm, and its float32 form for the host.
        norm(None, part)
        part.float()
        peak = seen.peak
    (term,) = (term for term in long.list_moments()["loss"] if term.name == "reduction of gradients")
    assert term.num_bytes == pytest.approx(peak, rel=1e-3)
    # One alone needs no bucket; with a larger bucket it is put together with others.
    wide = dataclasses.replace(OFFLOADED, reduce_bucket_elements=600_000_000)
    assert dataclasses.replace(long, optimizer=wide)._count_reduction() == term.num_bytes + 2 * 600_000_000
    # A rank of 8 has an eighth, so that the full bucket, with an MLP's weight, has more.
    assert make_long(num_gpus=8)._count_reduction() == 2 * 500_000_000 + (2 + 8) * 4096 * 14336 // 8
    there = dataclasses.replace(OFFLOADED, offloads=False, offloads_weights=False)
    assert dataclasses.replace(long, optimizer=there)._count_reduction() == 2 * 500_000_000


@pytest.mark.parametrize("qkv", ["off", "tile"])
def test_a_layer_of_transformers_makes_what_the_highest_moment_of_its_terms_says(qkv: str) -> None:
    """On tensors without memory, in which an operation makes its results alone, as a kernel does."""
    from transformers_cases import checkpoint_layers

    from tempo_kernels.recompute import keep_attention
    from tempo_torch import tempoize

    model = make_narrow_llama()
    checkpoint_layers(model, use_reentrant=False, context_fn=keep_attention)
    model = tempoize(model, mlp="tile", qkv=qkv, norm="recompute")
    peaks = []
    for tokens in (2**15, 2**16) if qkv == "off" else (2**16,):
        # The mask of a whole causal row is none, which transformers cannot see of such tensors.
        mask = mock.patch("transformers.models.llama.modeling_llama.create_causal_mask", return_value=None)
        with mask, FakeTensorMode(allow_non_fake_inputs=True), PeakBytes(*model.parameters()) as seen:
            total = model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)[0].sum()
            seen.begin_phase()
            total.backward()
            peaks.append(seen.peak)
    shape = dataclasses.replace(
        NARROW,
        # With it the estimate has Tempo's attention, which makes nothing beside its results, as torch's on a CPU.
        attention_dropout=0.1,
    )
    pieces = {"tempo", "host_checkpoints", "host_attention", "tiled_mlp", "one_group"}
    long = LongSequence(shape, OFFLOADED, frozenset(pieces | ({"tiled_norms"} if qkv == "tile" else set())))
    moments = {name: sum(t.bytes_per_token for t in terms) for name, terms in long.list_moments().items()}
    assert max(moments, key=moments.__getitem__) == f"backward of {'attention' if qkv == 'tile' else 'an MLP'}"
    # What does not grow with the tokens, such as sums over tiles, is as much in both runs of an MLP's moment. It is
    # little in attention's moment, which is the highest one of many tokens only.
    found = (peaks[-1] - peaks[0]) / 2**15 if qkv == "off" else peaks[-1] / 2**16
    assert found == pytest.approx(max(moments.values()), rel=0.01 if qkv == "off" else 0.03)


def test_each_piece_only_takes_away_and_the_most_tokens_fit_and_no_thousand_more() -> None:
    assert make_long().num_parameters == 8_030_261_248
    pieces, before = [], 0
    for name in ("tempo", "host_checkpoints", "tiled_mlp", "one_group", "tiled_norms"):
        pieces.append(name)
        long = make_long(*pieces)
        tokens = long.find_most_tokens(78 * 2**30)
        assert tokens > before and tokens % 1000 == 0
        assert long.find_peak(tokens)[2] <= 78 * 2**30 < long.find_peak(tokens + 1000)[2]
        before = tokens
    # Attention's output on the host saves time, and where all layers come back early costs a layer's part of it.
    pieces.append("host_attention")
    assert make_long(*pieces).find_most_tokens(78 * 2**30) == before
    assert set(pieces) | {"liger"} == set(PIECES)
    # Without dropout and tiles attention is torch's, which on a GPU has 24 bytes of a token and channel at once.
    whole = make_long(*(set(pieces) - {"tiled_norms"}))
    assert whole.find_peak(10**6)[0] == "backward of attention"
    with_dropout = dataclasses.replace(whole, model=dataclasses.replace(whole.model, attention_dropout=0.1))
    moments = [
        sum(t.bytes_per_token for t in long.list_moments()["backward of attention"]) for long in (whole, with_dropout)
    ]
    assert moments[0] - moments[1] == (4 + 2 * 2) * 4096
    sent = make_long(*pieces).count_host_bytes(1000) - make_long(*pieces).count_host_bytes(0)
    assert sent == 1000 * 32 * (2 * 4096 + 2 * 4096 + 4 * 32)
    # The weights of a rank are its part, and each of 8 GPUs has about as many tokens.
    assert 7 * before < 8 * make_long(*pieces, num_gpus=8).find_most_tokens(78 * 2**30) < 8 * before


LIGER = ("liger", "host_checkpoints", "one_group", "tiled_mlp")


@pytest.mark.parametrize(
    ("pieces", "tokens", "published", "error"),
    [
        ((), 65_000, 137.36, 0.03),
        (LIGER[:1], 300_000, 134.96, 0.03),
        (LIGER[:3], 650_000, 126.81, 0.03),
        (LIGER, 1_200_000, 136.15, 0.06),
    ],
)
def test_what_is_reserved_lies_between_what_is_alive_and_what_was_published(
    pieces: tuple[str, ...], tokens: int, published: float, error: float
) -> None:
    long = make_long(*pieces)
    played, standing = play_steps(long, tokens), sum(term.num_bytes for term in long.list_standing())
    name, _, peak = long.find_peak(tokens)
    if name != "loss":  # of whose terms one is a place that is free
        assert played.peak_allocated + standing == pytest.approx(peak, rel=4e-3)
    assert peak < count_reserved(long, tokens) == played.reserved + standing
    # What of NVML's figure is not torch's is in benchmarks/offload_tables.py.
    assert published * (1 - error) < count_reserved(long, tokens) / 2**30 + 1.09 < published


@pytest.mark.parametrize("num_gpus", [2, 8, 16])
def test_several_gpus_are_played_with_their_all_to_alls(num_gpus: int) -> None:
    """8 GPUs have a group each, whose heads need no copy, and of 16 two share one."""
    tokens, peaks = 2**18, {}
    for pieces in (LIGER[:2], LIGER):
        long = make_long(*pieces, num_gpus=num_gpus)
        peaks[pieces] = play_steps(long, tokens).peak_allocated + sum(term.num_bytes for term in long.list_standing())
        assert peaks[pieces] < count_reserved(long, tokens)
    name, _, peak = make_long(*LIGER[:2], num_gpus=num_gpus).find_peak(tokens)
    assert name == "backward of an MLP" and peaks[LIGER[:2]] == pytest.approx(peak, rel=1e-4)
    name, terms, peak = make_long(*LIGER, num_gpus=num_gpus).find_peak(tokens)
    # By the order of the code no gradient is on both sides of an all-to-all while the sums are there.
    (gradient,) = (term.count(tokens) for term in terms if "both sides" in term.name)
    assert name == "backward of attention" and peaks[LIGER] == pytest.approx(peak - gradient, rel=0.012)


def test_a_layer_of_transformers_allocates_what_is_played_for_it() -> None:
    from transformers_cases import checkpoint_layers

    model, tokens = make_narrow_llama(), 2**15
    checkpoint_layers(model, use_reentrant=True)
    mask = mock.patch("transformers.models.llama.modeling_llama.create_causal_mask", return_value=None)
    with mask, FakeTensorMode(allow_non_fake_inputs=True), PeakBytes(*model.parameters()) as seen:
        ids = torch.zeros(1, tokens, dtype=torch.long)
        seen.begin_phase()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    shape = dataclasses.replace(NARROW, vocab_size=64)
    played = play_steps(LongSequence(shape, OFFLOADED), tokens)
    assert played.peak_allocated == pytest.approx(seen.peak, rel=0.01)


def test_each_packed_document_has_rows_of_its_own_in_the_sums_of_flashattention() -> None:
    whole = make_long("liger", "host_checkpoints", "one_group", "tiled_mlp")
    tokens, peaks = 1_200_000, {}
    for size in (None, tokens, 1200):
        name, _, peaks[size] = dataclasses.replace(whole, document_tokens=size).find_peak(tokens)
        assert name == "backward of attention"
    # Of 32 heads of q 64 rows and of 8 of k and of v 128, of 128 columns in float32, for each document.
    per_document = 4 * 128 * (32 * 64 + 2 * 8 * 128)
    assert peaks[tokens] - peaks[None] == per_document
    assert peaks[1200] - peaks[None] == 1000 * per_document


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
        (["--long-sequence", "tempo", "--document-tokens", "9"], "--document-tokens is given with the tempo piece"),
        (["--long-sequence", "tempo", "--allocator"], "--allocator is given with the piece tempo, whose allocations"),
        (["--document-tokens", "9"], "--document-tokens is given without --long-sequence"),
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

"""Packed rows in Megatron's layers: a document is what it is in a row of its own, masks included."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from distributed import run_megatron_ranks
from gpt import FULL, SEQ_LENGTH, VOCAB_SIZE, build_gpt, gpt_config, gradients
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType

from tempo_megatron import TempoConfig, set_micro_batch
from tempo_megatron.slots.attention import TempoDotProductAttention

pytestmark = pytest.mark.usefixtures("one_rank")
SAMPLES = [70, 3, 2**40, 12]


def as_int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def params_of(boundaries, **more):
    cu_seqlens = as_int32(boundaries)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=SEQ_LENGTH,
        max_seqlen_kv=SEQ_LENGTH,
        **more,
    )


def run(model, tokens, boundaries=None):
    """Losses [1, s] of a training forward of tokens [1, s + 1], packed where `boundaries` are given."""
    ends = boundaries or [0, tokens.size(1) - 1]
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(ends)]).unsqueeze(0)
    packed = params_of(boundaries) if boundaries else None
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:], packed_seq_params=packed)
    losses.sum().backward()
    return losses.detach()


def packed_and_alone(boundaries, overrides, tempo, dropout):
    """Losses and gradients of a packed row, and of its documents one after another."""
    config = gpt_config(dropout=dropout, params_dtype=torch.float64, **overrides)
    tokens = torch.randint(VOCAB_SIZE, (1, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(1))
    model = build_gpt(config, TempoConfig(**tempo))
    set_micro_batch(5, 0, cu_seqlens=as_int32(boundaries), document_samples=torch.tensor(SAMPLES))
    packed = run(model, tokens, boundaries), gradients(model)
    model.zero_grad()
    alone = []
    for (start, end), sample in zip(pairwise(boundaries), SAMPLES, strict=True):
        set_micro_batch(5, sample)
        alone.append(run(model, tokens[:, start : end + 1]))
    return packed, (torch.cat(alone, 1), gradients(model))


GRID = {
    "p 0": ({}, {"attention": "flash"}, 0.0),
    "flash": ({}, {"attention": "flash"}, 0.1),
    "softmax with a window": ({"num_query_groups": 2, "window_size": (2, 0)}, {"attention": "softmax"}, 0.1),
    "full recomputation": (FULL, {"attention": "recompute"}, 0.1),
    "selective": ({"recompute_granularity": "selective"}, {"linear_qkv": "recompute"}, 0.1),
}


def assert_equal(packed, alone):
    torch.testing.assert_close(packed[0], alone[0], rtol=1e-12, atol=1e-12)
    for name, grad in alone[1].items():
        torch.testing.assert_close(packed[1][name], grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", GRID)
def test_a_document_has_the_losses_and_gradients_that_it_has_alone(name):
    assert_equal(*packed_and_alone([0, 3, 4, 11, 16], *GRID[name]))


def test_it_has_them_in_sequence_parallel_ranks():
    arguments = ([0, 2, 6, 12, 16], {"sequence_parallel": True}, {"attention": "flash"}, 0.1)
    for found in run_megatron_ranks(packed_and_alone, 2, 2, *arguments):
        assert_equal(*found)


def test_masks_of_documents_that_nobody_announced_are_those_of_the_packed_row():
    model = build_gpt(gpt_config(dropout=0.1), TempoConfig(attention="flash"))
    tokens = torch.arange(SEQ_LENGTH + 1).unsqueeze(0) % 7
    found = []
    for seed, boundaries in ((5, [0, 7, 16]), (5, [0, 7, 16]), (6, [0, 7, 16]), (5, [0, 16])):
        set_micro_batch(seed, 3)
        found.append(run(model, tokens, boundaries))
    first, again, other, whole = found
    assert torch.equal(first, again) and not torch.equal(first, other)
    # The first document sees the same tokens and the same masks, whatever is behind it.
    torch.testing.assert_close(first[:, :7], whole[:, :7])
    assert not torch.allclose(first[:, 7:], whole[:, 7:])


def attend(packed, dropout=0.0, mask_type=AttnMaskType.causal, exchange=None):
    attention = TempoDotProductAttention(gpt_config(dropout=dropout), 1, mask_type, "self")
    attention._exchange = exchange or attention._exchange
    q, k, v = (torch.randn(SEQ_LENGTH, 4, 8) for _ in range(3))
    return attention(q, k, v, None, packed_seq_params=packed)


PADDED = params_of([0, 5, 12], cu_seqlens_q_padded=as_int32([0, 8, 16]), cu_seqlens_kv_padded=as_int32([0, 8, 16]))


def test_what_does_not_fit_is_refused_in_a_sentence():
    for fits in (params_of([0, 16]), PADDED):
        assert attend(fits).shape == (SEQ_LENGTH, 32)
    set_micro_batch(5, 0)
    of_ranks = {"dropout": 0.1, "exchange": object()}
    with pytest.raises(ValueError, match="without its documents' samples, and hidden_dropout is 0.1, whose masks"):
        attend(params_of([0, 16]), **of_ranks)
    set_micro_batch(5, 0, cu_seqlens=as_int32([0, 4, 16]), document_samples=torch.tensor([1, 2]))
    for packed, more, message in (
        (PADDED, {"mask_type": AttnMaskType.padding}, "cu_seqlens_q_padded is given, and attention is not causal"),
        (params_of([0, 17]), {}, r"cu_seqlens is \[0, 17\]; expected"),
        (params_of([0, 16], local_cp_size=2), {}, "local_cp_size 2; .*leave hybrid context parallelism off"),
        (PackedSeqParams(qkv_format="sbhd"), {}, 'qkv_format "sbhd" and local_cp_size 1; .* takes "thd"'),
        (params_of([0, 16]), {"dropout": 0.1}, r"document_samples is torch.int64 of shape \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(packed, **more)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cu_seqlens": [0, 4]}, "expected both"),
        ({"document_samples": [0]}, "expected both"),
        ({"cu_seqlens": [0, 4], "document_samples": [1, 2]}, "expected 3 numbers"),
        ({"cu_seqlens": [0, 4, 2], "document_samples": [1, 2]}, "growing"),
        ({"cu_seqlens": [0, 4], "document_samples": [-1]}, "holds -1"),
    ],
)
def test_documents_that_do_not_fit_are_not_announced(given, message):
    with pytest.raises(ValueError, match=message):
        set_micro_batch(5, 0, **{name: torch.tensor(numbers) for name, numbers in given.items()})


def test_documents_are_not_announced_to_cuda_graphs(monkeypatch):
    monkeypatch.setattr(get_cuda_rng_tracker(), "states_", {"model-parallel-rng": torch.Generator()})
    with pytest.raises(ValueError, match="CUDA graphs, which read one first sample"):
        set_micro_batch(5, 0, cu_seqlens=as_int32([0, 4]), document_samples=torch.tensor([1]))

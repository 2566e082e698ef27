"""Attention of context-parallel ranks is that of one: outputs, gradients, masks, and what is kept for backward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from covering import exhaustive
from distributed import run_megatron_ranks, run_megatron_ranks_once
from dropout_masks import add_row, compare_masks, recorded_masks
from gpt import LLAMA, assert_equal_to_stock, build_gpt, differentiate, gpt_config, losses
from latent_cases import build_latent
from megatron.core import parallel_state
from prediction_cases import build as build_prediction
from sequence_parts import list_tokens
from witness import assert_within_rule, kept_storages, outputs_and_gradients

from tempo_kernels.attention import attention
from tempo_megatron import TempoConfig
from tempo_megatron.slots import context_parallel
from tempo_megatron.slots.attention import TempoDotProductAttention

SEQ_LENGTH, BATCH, HEAD_DIM = 32, 2, 8
PACKED = {"causal": True, "dropout_p": 0.3, "cu_seqlens": torch.tensor([0, 16, 32], dtype=torch.int32)}
# Query heads, key-value heads, settings, dtype.
CASES = {
    "causal": (4, 4, {"causal": True}, torch.float32),
    "full, dropout": (4, 4, {"causal": False, "dropout_p": 0.3}, torch.float32),
    "causal, grouped, dropout": (8, 2, {"causal": True, "dropout_p": 0.3}, torch.float32),
    "one group, bfloat16": (4, 1, {"causal": True, "dropout_p": 0.3}, torch.bfloat16),
    "window": (4, 2, {"causal": True, "window_size": (5, 0), "dropout_p": 0.3}, torch.float32),
    "window to both sides": (4, 4, {"causal": False, "window_size": (3, 9)}, torch.float32),
    "packed": (4, 2, {**PACKED, "document_samples": torch.tensor([7, 2**40])}, torch.float32),
    # Its masks are those of the packed row.
    "packed, of unknown samples": (4, 4, {**PACKED, "causal": False}, torch.bfloat16),
}
LAYOUTS = [
    (4, "a2a+p2p", (2, 2)),
    (2, "all_gather", None),
    (2, "a2a", None),
    (4, ["all_gather", "p2p"], None),
]
MORE_LAYOUTS = [
    (2, "p2p", None),
    (4, "all_gather", None),
    (4, "a2a", None),
    (8, "p2p", None),
    (8, "a2a+p2p", (2, 4)),
    (8, "a2a+p2p", (4, 2)),
]


def whole_of(case):
    """q, k, v and grad of the whole sequence, and the settings."""
    heads, groups, settings, dtype = CASES[case]
    generator = torch.Generator().manual_seed(3)
    shapes = [
        (SEQ_LENGTH, 1 if "cu_seqlens" in settings else BATCH, n, HEAD_DIM) for n in (heads, groups, groups, heads)
    ]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    drawn = {"dropout_key": 7, "first_sample": 3, "first_head": 2} if "dropout_p" in settings else {}
    return tensors, {"softmax_scale": 0.3, **settings, **drawn}


def attend_in_parts(comm_type, layer_number):
    """By case: output and gradients of this rank's rows, the masks, and the bytes that it keeps."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    config = SimpleNamespace(context_parallel_size=size, cp_comm_type=comm_type)
    exchange = context_parallel.choose_exchange(config, layer_number, None)
    found = {}
    for case in CASES:
        (*operands, grad), settings = whole_of(case)
        rows = list_tokens(rank, size, settings["cu_seqlens"].tolist() if "cu_seqlens" in settings else (0, SEQ_LENGTH))

        def run(*tensors, settings=settings):
            return context_parallel.attend(*tensors, exchange=exchange, **settings)

        parts = [t[rows] for t in operands]
        with recorded_masks() as drawn:
            results = outputs_and_gradients(run, parts, grad[rows], grad.dtype)
        leaves = [t.clone().requires_grad_() for t in parts]
        kept = sum(kept_storages(run, *leaves).values())
        found[case] = rows, results, drawn, kept
    return found


@pytest.mark.parametrize(("size", "comm_type", "sizes"), [*LAYOUTS, *exhaustive(*MORE_LAYOUTS)], ids=str)
def test_ranks_together_compute_what_one_computes(size, comm_type, sizes):
    ranks = run_megatron_ranks(
        attend_in_parts,
        size,
        1,
        comm_type,
        2,
        context_parallel_size=size,
        hierarchical_context_parallel_sizes=None if sizes is None else list(sizes),
    )
    for case, (heads, groups, _, dtype) in CASES.items():
        (*operands, grad), settings = whole_of(case)

        def run(*tensors, settings=settings):
            return attention(*tensors, **settings)

        exact = outputs_and_gradients(run, operands, grad, torch.float64)
        with recorded_masks() as masks:
            same = outputs_and_gradients(run, operands, grad, dtype)
        joined = [torch.empty_like(t) for t in same]
        drawn = {}
        for rows, results, rank_draws, kept in (rank[case] for rank in ranks):
            for whole, part in zip(joined, results, strict=True):
                whole[rows] = part
            for place, row in rank_draws.items():
                add_row(drawn, place, row)
            documents = sum(settings[name].nbytes for name in ("cu_seqlens", "document_samples") if name in settings)
            tokens = operands[0].size(1) * SEQ_LENGTH // size
            assert kept <= kept_by_its_own_tokens(tokens, size, comm_type, sizes, heads, groups, dtype) + documents
        for name, a, b, c in zip(("out", "grad_q", "grad_k", "grad_v"), joined, same, exact, strict=True):
            if name == "out" or dtype != torch.float32 or comm_type == "a2a":
                assert_within_rule(f"{case}: {name}", a, b, c)
            else:  # the bound that differentiate_block documents: whole rows are not there to normalise again
                error = (a.double() - c).abs().max()
                assert error <= 8 * torch.finfo(dtype).eps * c.abs().max(), f"{case}: {name}: {error}"
        num_wrong, is_drawn = compare_masks(drawn, masks, is_causal=settings["causal"])
        assert num_wrong == 0 and ("window_size" in settings or is_drawn.all())


def kept_by_its_own_tokens(tokens, size, comm_type, sizes, heads, groups, dtype):
    """Bytes of q, k, v, output and logsumexp of a rank's tokens; a group has a copy for each rank that needs one."""
    exchanging = size if comm_type == "a2a" else sizes[0] if sizes else 1
    return tokens * (2 * (heads + max(groups, exchanging)) * HEAD_DIM * dtype.itemsize + 4 * heads)


@pytest.mark.parametrize(("heads", "groups"), [(6, 6), (12, 6), (2, 2)])
def test_heads_that_ranks_cannot_share_are_refused(heads, groups):
    exchange = context_parallel.Exchange(SimpleNamespace(size=lambda: 4), None, False)
    with pytest.raises(ValueError, match=f"4 context-parallel .* {heads} heads and {groups} query groups; expected"):
        context_parallel.check_heads(exchange, heads, groups)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 12, 32], "document 0 of a row has 12 tokens, and 4 .* expected a multiple of 8; pad each document"),
        ([0, 16], "is .0, 16., and 4 context-parallel ranks hold 8 tokens each; expected numbers growing from 0 to 32"),
        ([0, 24, 16, 32], "is .0, 24, 16, 32., and 4 context-parallel ranks"),
    ],
)
def test_documents_that_ranks_cannot_share_are_refused(boundaries, message):
    exchange = context_parallel.Exchange(SimpleNamespace(size=lambda: 2), SimpleNamespace(size=lambda: 2), False)
    tensors = [torch.zeros(SEQ_LENGTH // 4, 1, 4, HEAD_DIM)] * 3
    with pytest.raises(ValueError, match=message):
        context_parallel.attend(*tensors, exchange=exchange, cu_seqlens=torch.tensor(boundaries, dtype=torch.int32))


MODELS = {
    "GPT": ({}, {}),
    "Llama": (LLAMA, {"position_embedding_type": "rope"}),
    # Its heads have two sizes; those of multi-token prediction are the decoder's.
    "MLA": ({"dtype": torch.float32, "num_attention_heads": 8}, {}),
    "MTP": ({"calculate_per_token_loss": True}, {}),
}
# Context- and tensor-parallel sizes, sequence parallelism, cp_comm_type, what differs in Tempo's configuration.
# test_masks.py, test_latent_attention.py and test_sinks_and_biases.py have the other ways to exchange rows and heads.
MODEL_LAYOUTS = [("Llama", 2, 2, True, "all_gather", {"attention": "recompute", "linear_qkv": "recompute"})]
MORE_MODEL_LAYOUTS = [
    (model, cp, tp, tp > 1, comm_type, {})
    for model in MODELS
    for cp, tp in ((2, 1), (2, 2), (4, 1), (4, 2))
    for comm_type in ("p2p", "all_gather", "a2a")
    if not (cp == 4 and tp == 2 and comm_type == "a2a")
]


def train_model(name, sequence_parallel, comm_type, choices):
    """The sum of the losses and gradients by name, this tensor-parallel rank, and the class of core attention."""
    settings, more = MODELS[name]
    settings = {"sequence_parallel": sequence_parallel, "dropout": 0.2, "cp_comm_type": comm_type, **settings}
    if name in ("MLA", "MTP"):
        model = (build_latent if name == "MLA" else build_prediction)(TempoConfig(**choices), **settings)
    else:
        model = build_gpt(gpt_config(**settings), TempoConfig(**choices), **more)
    result = differentiate(model, losses(model, 3, 2, gives_mask=False).sum())
    core_attention = type(model.decoder.layers[0].self_attention.core_attention)
    return result, parallel_state.get_tensor_model_parallel_rank(), core_attention


@pytest.mark.parametrize(
    ("name", "cp", "tp", "sequence_parallel", "comm_type", "choices"),
    [*MODEL_LAYOUTS, *exhaustive(*MORE_MODEL_LAYOUTS)],
    ids=str,
)
def test_a_model_with_dropout_has_the_losses_and_gradients_of_one_context_parallel_rank(
    name, cp, tp, sequence_parallel, comm_type, choices
):
    expected = run_megatron_ranks_once(train_model, tp, tp, name, sequence_parallel, "p2p", choices)
    found = run_megatron_ranks(
        train_model, cp * tp, tp, name, sequence_parallel, comm_type, choices, context_parallel_size=cp
    )
    for result, tp_rank, core_attention in found:
        assert issubclass(core_attention, TempoDotProductAttention)
        assert_equal_to_stock(result, expected[tp_rank][0])

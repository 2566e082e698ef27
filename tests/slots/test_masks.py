"""Dropout masks do not depend on the layout: the masks themselves, caught in the real model, are compared.

Of GPT they are those of their definition; of BERT and T5 too every dropout draws with a key of its own.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from covering import exhaustive
from distributed import run_megatron_ranks
from dropout_masks import add_row, recorded_draws
from gpt import (
    FULL,
    SEQ_LENGTH,
    bert_losses,
    build_bert,
    build_gpt,
    build_t5,
    gpt_config,
    losses,
    t5_losses,
    tokens_of,
)
from megatron.core import parallel_state
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec

from tempo_kernels.philox import derive_key, drop_mask
from tempo_megatron import TempoConfig, tempoize
from tempo_megatron.slots.dropout_rng import Site, Stack, derive_site_key

pytestmark = pytest.mark.usefixtures("one_rank")
SAMPLES, SEED, HIDDEN_SIZE, HEADS, LAYERS = 8, 5, 32, 4, 2
SITES = (Site.ATTENTION, Site.SELF_ATTENTION_OUTPUT, Site.MLP_OUTPUT)


def masks_of_rank(sequence_parallel, micro_batch_size, recompute, comm_type="p2p"):
    """Every mask that this rank draws for SAMPLES samples."""
    selective = {"recompute_granularity": "selective", "recompute_modules": [recompute]}
    choices = FULL if recompute == "full" else selective if recompute else {}
    settings = {"sequence_parallel": sequence_parallel, "dropout": 0.2, "cp_comm_type": comm_type, **choices}
    model = build_gpt(gpt_config(**settings), TempoConfig())
    rank, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    with recorded_draws() as drawn:
        for first in range(0, SAMPLES, micro_batch_size * replicas):
            first_sample = first + rank * micro_batch_size
            losses(model, first_sample, micro_batch_size, gives_mask=False, seed=SEED).mean().backward()
    return drawn


@functools.cache
def expected_masks():
    """Every mask of SAMPLES samples, from its definition: (key, sample, head, row) -> columns that matter."""
    masks = {}
    sites = [(0, Site.EMBEDDING), *itertools.product(range(1, LAYERS + 1), SITES)]
    for layer, site in sites:
        key, is_attention = derive_key(SEED, layer, int(site)), site == Site.ATTENTION
        heads = range(HEADS if is_attention else 1)
        for place in itertools.product(range(SAMPLES), heads, range(SEQ_LENGTH)):
            where = dict(zip(("sample", "head", "row"), map(torch.tensor, place), strict=True))
            num_columns = place[-1] + 1 if is_attention else HIDDEN_SIZE
            masks[(key, *place)] = bytes(drop_mask(key, 0.2, **where, num_columns=num_columns).tolist())
    return masks


# Tensor-, data- and context-parallel sizes, and the arguments of masks_of_rank: micro batches, recomputation and every
# kind of parallelism once. Of the others each value is there, beside another, or in compatibility.py's layouts.
LAYOUTS = {
    "TP 1, micro batch 1": (1, 1, 1, False, 1, None),
    "TP 2, full recomputation, micro batch 1": (2, 1, 1, False, 1, "full"),
    "TP 2 + SP, DP 2, mlp recomputed": (2, 2, 1, True, 1, "mlp"),
    "CP 2, TP 2 + SP": (2, 1, 2, True, 4, None, "p2p"),
}
MORE_LAYOUTS = {
    "TP 2 + SP, core attention recomputed": (2, 1, 1, True, 1, "core_attn"),
    "TP 4 + SP": (4, 1, 1, True, 4, None),
    "DP 2, full recomputation": (1, 2, 1, False, 4, "full"),
    "CP 2": (1, 1, 2, False, 4, None, "a2a"),
    "CP 4, full recomputation": (1, 1, 4, False, 4, "full", "all_gather"),
    "CP 4": (1, 1, 4, False, 4, None, "p2p"),
    "CP 8": (1, 1, 8, False, 4, None, "p2p"),
    "CP 8, all_gather": (1, 1, 8, False, 4, None, "all_gather"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, *exhaustive(*zip(MORE_LAYOUTS))])
def test_every_layout_draws_the_masks_of_the_definition(name):
    tp, dp, cp, *arguments = (LAYOUTS | MORE_LAYOUTS)[name]
    ranks = run_megatron_ranks(masks_of_rank, tp * dp * cp, tp, *arguments, context_parallel_size=cp)
    drawn, expected = {}, expected_masks()
    for place, draws in itertools.chain.from_iterable(rank.items() for rank in ranks):
        for first_column, columns in draws:
            add_row(drawn, place, np.frombuffer(columns, np.uint8), first_column)
    assert drawn.keys() == expected.keys()
    # A causal block draws the columns up to its last row only, and under context parallelism some of them.
    for place, columns in expected.items():
        assert drawn[place].tobytes().startswith(columns), f"the mask at {place} differs"


def test_recomputation_draws_twice_what_backward_redraws_once():
    """Forward, recomputed forward and backward: the recomputed layers really ran again."""
    drawn, plain = masks_of_rank(False, 4, "full"), masks_of_rank(False, 4, None)
    embedding = derive_key(SEED, 0, int(Site.EMBEDDING))
    assert {len(draws) for draws in plain.values()} == {2}
    assert {len(draws) for place, draws in drawn.items() if place[0] != embedding} == {3}


def keys_of(stack, *sites):
    places = [(0, Site.EMBEDDING), *itertools.product(range(1, LAYERS + 1), sites)]
    return {derive_site_key(SEED, stack, *place) for place in places}


def run_gpt(model):
    return losses(model, 0, 2, gives_mask=False, seed=SEED)


ENCODER_KEYS = keys_of(Stack.ENCODER, *SITES)
T5_DECODER_KEYS = keys_of(Stack.DECODER, *SITES, Site.CROSS_ATTENTION, Site.CROSS_ATTENTION_OUTPUT)
MODELS = {
    "GPT": (build_gpt, run_gpt, keys_of(Stack.DECODER, *SITES)),
    "BERT": (build_bert, bert_losses, ENCODER_KEYS),
    "T5": (build_t5, t5_losses, ENCODER_KEYS | T5_DECODER_KEYS),
}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_dropout_of_a_model_has_a_key_of_its_own_in_every_pass(name, recomputes):
    build, run, keys = MODELS[name]
    model = build(gpt_config(dropout=0.2, **(FULL if recomputes else {})), TempoConfig())
    counts = []
    # Twice, so that what one forward leaves behind would show in the next.
    for _ in range(2):
        with recorded_draws() as drawn:
            run(model).sum().backward()
        counts.append({place: len(draws) for place, draws in drawn.items()})
    # There are as many keys as dropouts, so that no two share one.
    assert {key for key, *_ in counts[0]} == keys
    assert counts[0] == counts[1]


def test_t5_without_its_encoder_draws_as_the_decoder_and_nothing_embeds_twice():
    model = build_t5(gpt_config(dropout=0.2), TempoConfig())
    encoded = t5_losses(model, output_encoder_hidden_only=True).detach()
    with recorded_draws() as drawn:
        t5_losses(model, encoder_hidden_states=encoded)
    assert {key for key, *_ in drawn} == T5_DECODER_KEYS
    tokens = tokens_of(0, 2)[:, :-1].contiguous()
    for call in (lambda: model.embedding(tokens, tokens % SEQ_LENGTH), lambda: t5_losses(model.forward)):
        with pytest.raises(RuntimeError, match="would draw a mask twice"):
            call()
    model.eval()
    model.embedding(tokens, tokens % SEQ_LENGTH)


def test_the_stack_can_be_said():
    spec = decoder_model_with_local_spec()
    spec = tempoize(spec, gpt_config(dropout=0.2), TempoConfig(), stack=Stack.ENCODER)
    assert spec.layer_specs[0].submodules.self_attention.submodules.core_attention.params["stack"] == Stack.ENCODER

"""Dropout masks do not depend on the layout: the masks themselves, caught in the real model, are compared."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from covering import exhaustive
from distributed import run_megatron_ranks
from gpt import SEQ_LENGTH, build_gpt, gpt_config, losses
from megatron.core import parallel_state

from tempo_kernels.philox import derive_key, drop_mask, keep_bits
from tempo_megatron import TempoConfig
from tempo_megatron.slots.dropout_rng import Site

SAMPLES, SEED, HIDDEN_SIZE, HEADS, LAYERS = 8, 5, 32, 4, 2


def masks_of_rank(sequence_parallel, micro_batch_size, recompute, comm_type="p2p"):
    """{(key, sample, head, row): [(first column, columns as bytes) per draw]} of every mask this rank drew for SAMPLES
    samples."""
    choices = {}
    if recompute == "full":
        choices = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute:
        choices = {"recompute_granularity": "selective", "recompute_modules": [recompute]}
    model = build_gpt(
        gpt_config(sequence_parallel=sequence_parallel, dropout=0.2, cp_comm_type=comm_type, **choices), TempoConfig()
    )
    drawn = {}

    def record(key, p, *, sample, head, row, num_columns, first_column=0):
        bits = keep_bits(key, p, sample=sample, head=head, row=row, num_columns=num_columns, first_column=first_column)
        indices = (t.broadcast_to(bits.shape[:-1]).flatten().tolist() for t in (sample, head, row))
        for index, columns in zip(zip(*indices, strict=True), (bits == 0).flatten(0, -2), strict=True):
            drawn.setdefault((key, *index), []).append((first_column, bytes(columns.tolist())))
        return bits

    rank, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    with (
        mock.patch("tempo_kernels.dropout_add.cpu.keep_bits", record),
        mock.patch("tempo_kernels.attention.cpu.keep_bits", record),
    ):
        for first in range(0, SAMPLES, micro_batch_size * replicas):
            first_sample = first + rank * micro_batch_size
            losses(model, first_sample, micro_batch_size, gives_mask=False, seed=SEED).mean().backward()
    return drawn


def drawn_in_layout(tp, sequence_parallel, dp, micro_batch_size, recompute, cp=1, comm_type="p2p"):
    """The masks of all ranks together; every draw of one position, in whatever rank or pass, has to agree."""
    together = {}
    for drawn in run_megatron_ranks(
        masks_of_rank,
        tp * dp * cp,
        tp,
        sequence_parallel,
        micro_batch_size,
        recompute,
        comm_type,
        context_parallel_size=cp,
    ):
        for position, draws in drawn.items():
            together.setdefault(position, []).extend(draws)
    masks = {}
    for position, draws in together.items():
        # A causal block draws the columns up to its last row only, and under context parallelism some of them.
        mask = bytearray()
        for first, columns in sorted(draws):
            assert first <= len(mask), f"columns of {position} are missing"
            seen = mask[first : first + len(columns)]
            assert columns.startswith(seen), f"two draws of {position} differ"
            mask += columns[len(seen) :]
        masks[position] = bytes(mask)
    return masks


def expected_masks():
    """Every mask of SAMPLES samples, from its definition: (key, sample, head, row) -> columns that matter."""
    masks = {}
    sites = [(0, Site.EMBEDDING)] + [
        (layer + 1, site)
        for layer in range(LAYERS)
        for site in (Site.ATTENTION, Site.SELF_ATTENTION_OUTPUT, Site.MLP_OUTPUT)
    ]
    for layer, site in sites:
        key = derive_key(SEED, layer, int(site))
        is_attention = site == Site.ATTENTION
        for head in range(HEADS if is_attention else 1):
            for sample in range(SAMPLES):
                for row in range(SEQ_LENGTH):
                    mask = drop_mask(
                        key,
                        0.2,
                        sample=torch.tensor(sample),
                        head=torch.tensor(head),
                        row=torch.tensor(row),
                        num_columns=row + 1 if is_attention else HIDDEN_SIZE,
                    )
                    masks[key, sample, head, row] = bytes(mask.tolist())
    return masks


LAYOUTS = {
    "TP 1, micro batch 1": (1, False, 1, 1, None),
    "TP 2, full recomputation, micro batch 1": (2, False, 1, 1, "full"),
    "TP 2 + SP, full recomputation": (2, True, 1, 4, "full"),
    "TP 4 + SP": (4, True, 1, 4, None),
    "DP 2, full recomputation": (1, False, 2, 4, "full"),
    "TP 2 + SP, DP 2": (2, True, 2, 4, None),
    "TP 2 + SP, DP 2, mlp recomputed": (2, True, 2, 1, "mlp"),
    "TP 2 + SP, core attention recomputed": (2, True, 1, 1, "core_attn"),
    "CP 2, TP 2 + SP": (2, True, 1, 4, None, 2, "p2p"),
    "CP 4, full recomputation": (1, False, 1, 4, "full", 4, "all_gather"),
}
# Each of what these differ in is in LAYOUTS, beside another.
MORE_LAYOUTS = {
    "TP 1": (1, False, 1, 4, None),
    "TP 1, full recomputation": (1, False, 1, 4, "full"),
    "TP 2": (2, False, 1, 4, None),
    "TP 2 + SP": (2, True, 1, 4, None),
    "DP 2": (1, False, 2, 1, None),
    "TP 2, DP 2, full recomputation, micro batch 1": (2, False, 2, 1, "full"),
    "CP 2": (1, False, 1, 4, None, 2, "a2a"),
    "CP 4, a2a": (1, False, 1, 4, None, 4, "a2a"),
    "CP 4": (1, False, 1, 4, None, 4, "p2p"),
    "CP 8": (1, False, 1, 4, None, 8, "p2p"),
    "CP 8, all_gather": (1, False, 1, 4, None, 8, "all_gather"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, *exhaustive(*zip(MORE_LAYOUTS))])
def test_every_layout_draws_the_masks_of_the_definition(name):
    drawn, expected = drawn_in_layout(*(LAYOUTS | MORE_LAYOUTS)[name]), expected_masks()
    assert drawn.keys() == expected.keys()
    for position, columns in expected.items():
        assert drawn[position].startswith(columns), f"the mask at {position} differs"


def test_recomputation_draws_twice_what_backward_redraws_once():
    """Forward, recomputed forward and backward: the recomputed layers really ran again."""
    (drawn,) = run_megatron_ranks(masks_of_rank, 1, 1, False, 4, "full")
    (plain,) = run_megatron_ranks(masks_of_rank, 1, 1, False, 4, None)
    embedding = derive_key(SEED, 0, int(Site.EMBEDDING))
    assert {len(draws) for position, draws in plain.items()} == {2}
    assert {len(draws) for position, draws in drawn.items() if position[0] != embedding} == {3}

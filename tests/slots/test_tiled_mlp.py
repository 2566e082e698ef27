"""The MLP a tile of tokens at a time: the losses and gradients of the whole, from its input alone."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from distributed import run_megatron_ranks
from linear_cases import CASES, Found, run

from tempo_megatron.slots.mlp import TempoTiledMLP

NAMES = ["GPT", "GPT, norms in place", "GPT, stock", "Llama", "Llama, stock MLP", "T5", "GPT, all recomputed"]


def run_both(names: list[str], sequence_parallel: bool) -> dict[str, tuple[Found, Found]]:
    """Name -> the run with an MLP whose first linear runs again as a whole, and that in tiles."""
    found = {}
    for name in names:
        values = ({"linear_fc1": "recompute"}, {"linear_fc1": "tile"})
        tempo = CASES[name].tempo
        # Three tiles of 16 rows of 2 samples: 6, 6 and 4; on two ranks with sequence parallelism 3, 3 and 2 of 8.
        with mock.patch.object(TempoTiledMLP, "count_tile_tokens", lambda _: 12):
            runs = [
                run(CASES[name], dataclasses.replace(tempo, **value), torch.float32, 0.1, sequence_parallel)
                for value in values
            ]
        found[name] = runs[0], runs[1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, True), (2, False)], ids=["1", "SP", "TP"])
def test_losses_and_gradients_are_those_of_the_whole_and_as_little_is_kept(ranks: int, sequence_parallel: bool) -> None:
    names = NAMES if ranks == 1 else ["GPT", "Llama"]
    for found in run_megatron_ranks(run_both, ranks, ranks, names, sequence_parallel):
        for name, (whole, tiled) in found.items():
            assert (whole.keys, whole.kept) == (tiled.keys, tiled.kept), name
            torch.testing.assert_close(tiled.losses, whole.losses, rtol=1e-6, atol=1e-6)
            assert whole.gradients.keys() == tiled.gradients.keys()
            for key, expected in whole.gradients.items():
                error = (tiled.gradients[key] - expected).abs().max() / expected.abs().max()
                assert error < 1e-5, (name, key, error)

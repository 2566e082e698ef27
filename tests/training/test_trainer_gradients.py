"""Gradients of parameters that each tensor-parallel rank sees a part of the tokens for."""

from __future__ import annotations

import torch
from distributed import run_megatron_ranks
from megatron.core import parallel_state
from run_configs import complete

SIZES = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 128, "num_attention_heads": 4, "seq_length": 16}


def gradients(world_size: int, summed: bool) -> dict[str, torch.Tensor]:
    """Gradients by name of every parameter marked sequence_parallel, on this rank."""
    from tempo_megatron.models.build import build_model
    from tempo_megatron.training.engine import compute_gradient_norm, sum_partial_gradients
    from tempo_megatron.training.model import build_transformer_config
    from tempo_megatron.training.tasks.next_token import PredictNextToken

    words = "--lr 1 --train-iters 1 --data-path - --micro-batch-size 2 --attention-dropout 0 --hidden-dropout 0".split()
    words += ["--tensor-model-parallel-size", str(world_size), *(["--sequence-parallel"] if world_size > 1 else [])]
    words += [word for name, size in SIZES.items() for word in ("--" + name.replace("_", "-"), str(size))]
    run = complete(*words, world_size=world_size)
    config = build_transformer_config(run)
    torch.manual_seed(1)
    model = build_model(run.model, config, run.tempo, padded_vocab_size=128)
    if summed:
        sum_partial_gradients(model)
    # The names are those of a model on one device, where nothing is marked.
    marked = ("layernorm.weight", "layernorm.bias", "linear_proj.bias", "linear_fc2.bias")
    tokens = torch.randint(128, (2, 17), generator=torch.Generator().manual_seed(2))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": torch.ones(2, 16)}
    PredictNextToken(run, torch.device("cpu"))(model, batch)["loss"].backward()
    chosen = {name: p for name, p in model.named_parameters() if name.endswith(marked)}
    if run.sequence_parallel:
        assert all(parameter.sequence_parallel for parameter in chosen.values())
    assert parallel_state.get_tensor_model_parallel_world_size() == world_size
    found = {name: parameter.grad.clone() for name, parameter in chosen.items() if parameter.grad is not None}
    return {**found, "norm": compute_gradient_norm(model)}


def test_sequence_parallel_gradients_equal_those_of_one_rank_once_they_are_summed() -> None:
    (on_one_rank,) = run_megatron_ranks(gradients, 1, 1, 1, False)
    assert len(on_one_rank) == 2 * 6 + 2 + 1
    for of_rank in run_megatron_ranks(gradients, 2, 2, 2, True):
        for name, expected in on_one_rank.items():
            torch.testing.assert_close(of_rank[name], expected, rtol=1e-5, atol=1e-7)
    without_the_sum = run_megatron_ranks(gradients, 2, 2, 2, False)[0]
    for name, expected in on_one_rank.items():
        assert not torch.allclose(without_the_sum[name], expected, rtol=1e-2), name

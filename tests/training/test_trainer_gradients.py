"""Gradients of which each tensor-parallel rank has a part, held against one rank; which parameters decay; and the
learning rate of each step, held against its formula."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from distributed import run_megatron_ranks
from megatron.core import parallel_state
from run_configs import complete

SIZES = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 16".split()


def gradients(world_size: int, summed: bool, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """Gradients by name of every parameter whose gradient is partial on each rank, on this rank."""
    from tempo_megatron.models.build import build_model
    from tempo_megatron.training.engine import compute_gradient_norm, sum_partial_gradients
    from tempo_megatron.training.model import build_transformer_config
    from tempo_megatron.training.tasks.next_token import PredictNextToken

    words = "--lr 1 --train-iters 1 --data-path - --micro-batch-size 2 --attention-dropout 0 --hidden-dropout 0".split()
    words += ["--tensor-model-parallel-size", str(world_size), *(["--sequence-parallel"] if sequence_parallel else [])]
    run = complete(*SIZES, *words, "--qk-layernorm", world_size=world_size)
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


def test_partial_gradients_equal_those_of_one_rank_once_they_are_summed() -> None:
    (on_one_rank,) = run_megatron_ranks(gradients, 1, 1, 1, False, False)
    assert len(on_one_rank) == 2 * (6 + 4) + 2 + 1
    # Without sequence parallelism the norms of queries and keys are partial still: a rank has some of the heads.
    ranks = [run_megatron_ranks(gradients, 2, 2, 2, True, sequence_parallel) for sequence_parallel in (True, False)]
    for of_rank in itertools.chain(*ranks):
        for name, expected in on_one_rank.items():
            scale = max(float(torch.as_tensor(expected).abs().max()), 1e-5)  # the gradient of a bias of keys is 0
            torch.testing.assert_close(of_rank[name], expected, rtol=1e-4, atol=1e-4 * scale)
    without_the_sum = run_megatron_ranks(gradients, 2, 2, 2, False, True)[0]
    for name, expected in on_one_rank.items():
        if name.endswith("k_layernorm.bias"):  # 0 but for rounding: a softmax is the same for keys that all move alike
            continue
        assert not torch.allclose(without_the_sum[name], expected, rtol=1e-2), name


def test_norms_and_biases_do_not_decay() -> None:
    from tempo_megatron.training.engine import group_by_decay

    model = torch.nn.ModuleDict({"linear": torch.nn.Linear(3, 2), "norm": torch.nn.LayerNorm(2)})
    decayed, kept = group_by_decay(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and kept["weight_decay"] == 0.0
    assert {id(one) for one in decayed["params"]} == {id(model["linear"].weight)}
    assert {id(one) for one in kept["params"]} == {id(model["linear"].bias), *map(id, model["norm"].parameters())}


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_the_learning_rate_rises_to_lr_and_falls_to_min_lr(style: str) -> None:
    from tempo_megatron.training.engine import build_scheduler

    words = "--lr 1e-2 --min-lr 2e-3 --train-iters 12 --lr-warmup-iters 3 --lr-decay-iters 10 --data-path -".split()
    words += ["--micro-batch-size", "2", "--global-batch-size", "4", "--lr-decay-style", style]
    run = complete(*SIZES, *words)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=run.lr)
    scheduler = build_scheduler(optimizer, run)
    fall = {"constant": lambda x: 1.0, "linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2}
    for step in range(12):
        part = min((step - 3) / 7, 1.0)
        expected = 1e-2 * step / 3 if step < 3 else 2e-3 + 8e-3 * fall[style](part)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected), step
        scheduler.step(run.global_batch_size)

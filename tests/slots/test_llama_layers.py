"""SwiGLU at every shape: a Llama's layers on one and two ranks, against stock's gradients and in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import exhaustive
from distributed import run_megatron_ranks
from gpt import assert_equal_to_stock, gradients
from megatron.core import parallel_state

from tempo_megatron import TempoConfig
from tempo_megatron.models.build import build_model, build_transformer_config, make_inputs
from tempo_megatron.models.shape import make_shape
from tempo_megatron.slots import dropout_rng

LLAMA = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
LLAMA |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "num_layers": 1}
# hidden size, heads, groups, MLP, tokens, samples
SHAPES = [
    (1024, 8, 2, 2752, 16, 1),  # 128 channels a head, a quarter of the groups
    (64, 4, 4, 128, 16, 2),
    (96, 6, 2, 34, 8, 3),  # an MLP that no block divides
    (32, 4, 2, 130, 2, 1),  # fewer tokens than a block has rows
    (48, 2, 2, 2, 6, 1),
]


def find_losses_and_gradients(sequence_parallel: bool, dtype: torch.dtype) -> list[dict[str, Any]]:
    """By shape: loss and gradients of stock, of "auto" and of every operation recomputed."""
    found = []
    for hidden_size, heads, groups, ffn_hidden_size, seq_length, samples in SHAPES:
        shape = make_shape(
            **LLAMA, hidden_size=hidden_size, num_attention_heads=heads, num_query_groups=groups,
            ffn_hidden_size=ffn_hidden_size, seq_length=seq_length,
        )  # fmt: skip
        tp = parallel_state.get_tensor_model_parallel_world_size()
        config = build_transformer_config(
            shape, dtype=dtype, tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel
        )
        of_shape = {}
        for name, tempo_config in {
            "stock": TempoConfig.off(),
            "auto": TempoConfig(),
            "recompute": TempoConfig(activation="recompute", norm="recompute"),
        }.items():
            torch.manual_seed(7)
            model = build_model(shape, config, tempo_config, 64).to(dtype).train()
            torch.manual_seed(8)
            inputs = make_inputs(shape, 64, samples, causal_mask=name == "stock")
            dropout_rng.set_micro_batch(1, 0)
            # Both heads take a number times the masked losses.
            loss = (model(**inputs, loss_mask=torch.ones(samples, seq_length)).float()).sum() / 7
            loss.backward()
            of_shape[name] = (loss.item(), gradients(model))
        found.append(of_shape)
    return found


LAYOUTS = [(2, True), (1, False), *exhaustive((2, False))]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS, ids=["SP", "TP 1", "TP 2"])
def test_swiglu_has_stocks_gradients_at_every_shape(tp: int, sequence_parallel: bool) -> None:
    for of_rank in run_megatron_ranks(find_losses_and_gradients, tp, tp, sequence_parallel, torch.float32):
        for of_shape in of_rank:
            assert_equal_to_stock(of_shape["auto"], of_shape["stock"])
            assert_equal_to_stock(of_shape["recompute"], of_shape["stock"])


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, True), *exhaustive((1, False), (2, False))], ids=str)
def test_swiglu_runs_at_every_shape_in_bf16(tp: int, sequence_parallel: bool) -> None:
    for of_rank in run_megatron_ranks(find_losses_and_gradients, tp, tp, sequence_parallel, torch.bfloat16):
        for of_shape in of_rank:
            stock, *others = of_shape.values()
            for loss, grads in others:
                assert loss == pytest.approx(stock[0], rel=1e-2)
                for name, grad in grads.items():
                    error = (grad.double() - stock[1][name].double()).norm()
                    assert error <= 0.05 * stock[1][name].double().norm() + 1e-3, name

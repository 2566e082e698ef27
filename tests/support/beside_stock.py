"""Compares a model of Tempo with Megatron's own: loss, gradients, and what checkpoints and optimizers know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpt import differentiate, largest_gradient_error_eps

from tempo_megatron import TempoConfig

# What Megatron asks parameters for, and what it takes an absent one for.
FLAGS = {
    "sequence_parallel": False,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
    "allreduce": True,
}


def describe(model: Any) -> dict[str, Any]:
    """Everything that a checkpoint, plain or sharded, or an optimizer knows of a model's parameters."""
    state = model.state_dict()
    # Before 0.18 Megatron's MLP asks its activation, where that is a module, for a method that it has not.
    is_sharded = not getattr(model.config, "use_te_activation_func", False)
    sharded = model.sharded_state_dict() if is_sharded else {}
    return {
        "keys": {key: None if value is None else [list(value.shape), str(value.dtype)] for key, value in state.items()},
        "order": list(state),
        "sharded": {key: str(getattr(value, "key", key)) for key, value in sharded.items()},
        "parameters": [
            [name, list(each.shape), [getattr(each, flag, default) for flag, default in FLAGS.items()]]
            for name, each in model.named_parameters()
        ],
    }


def find_refusal(call: Callable[[], Any]) -> str:
    """The sentence of the ValueError that a call ends in."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def compare(
    build: Callable[[TempoConfig], Any], run: Callable[[Any, bool], torch.Tensor], tempo_config: TempoConfig
) -> dict[str, Any]:
    """How the models that `build` makes with Tempo and without differ; run(model, is_stock) returns losses."""
    found = []
    for chosen in (TempoConfig.off(), tempo_config):
        model = build(chosen)
        start = [each.flatten().tolist() for each in model.parameters()]
        found.append(({**describe(model), "start": start}, *differentiate(model, run(model, chosen.is_off).mean())))
    (stock, stock_loss, stock_gradients), (tempo, loss, gradients) = found
    same = {key: stock[key] == tempo[key] for key in stock}
    return {
        "loss": [stock_loss, loss],
        "gradients": len(stock_gradients),
        "gradient_error_eps": largest_gradient_error_eps(gradients, stock_gradients),
        "same": {**same, "gradients": stock_gradients.keys() == gradients.keys()},
        "extra_states": sum(key.endswith("_extra_state") for key in stock["order"]),
    }

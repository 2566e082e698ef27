"""Dropped outputs between norms, activations and Megatron's linears; tests/tempoize has ZeRO-3's."""

from __future__ import annotations

import time

import pytest
from distributed import run_megatron_ranks
from gpt import build_gpt, gpt_config, losses
from torch.multiprocessing.reductions import StorageWeakRef

from tempo_megatron import TempoConfig

RECOMPUTE = TempoConfig(activation="recompute", norm="recompute")
LINEARS = ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv")


def linear_inputs_alive(sequence_parallel, overrides, patience=0.0):
    """By linear behind a norm or an activation: whether its input's memory is in use when its layer is done.

    A thread of gloo lets go of what it has gathered some time after the call, hence `patience` in seconds.
    """
    model = build_gpt(gpt_config(sequence_parallel=sequence_parallel, **overrides), RECOMPUTE)
    inputs, alive = {}, {}
    for name, module in model.named_modules():
        if name.endswith(LINEARS):

            def remember(module, arguments, _, name=name):
                inputs[name] = StorageWeakRef(arguments[0].untyped_storage())

            module.register_forward_hook(remember)
    for layer in model.decoder.layers:

        def look(*_):
            end = time.monotonic() + patience
            while time.monotonic() < end and not all(memory.expired() for memory in inputs.values()):
                time.sleep(0.001)
            alive.update({name: not memory.expired() for name, memory in inputs.items()})

        layer.register_forward_hook(look)
    losses(model, 0, 2, gives_mask=False).mean().backward()
    return alive


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_inputs_of_megatrons_linears_are_gone_when_their_layer_is_done(tp, sequence_parallel):
    names = [f"decoder.layers.{layer}.{name}" for layer in (0, 1) for name in LINEARS]
    for alive in run_megatron_ranks(linear_inputs_alive, tp, tp, sequence_parallel, {}, 10.0):
        assert alive == dict.fromkeys(names, False)


def test_a_checkpointed_mlp_reads_its_input_twice_and_so_it_stays():
    overrides = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    (alive,) = run_megatron_ranks(linear_inputs_alive, 1, 1, False, overrides)
    for layer in (0, 1):
        assert alive[f"decoder.layers.{layer}.mlp.linear_fc1"]
        assert not alive[f"decoder.layers.{layer}.self_attention.linear_qkv"]

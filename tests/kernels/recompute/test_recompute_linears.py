"""Dropped outputs between norms, activations and the linears that people really use: Megatron's and ZeRO-3's."""

from __future__ import annotations

import pytest
import torch
from distributed import run_megatron_ranks, run_ranks
from gpt import build_gpt, gpt_config, losses
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tempo_megatron import TempoConfig

RECOMPUTE = TempoConfig(activation="recompute", norm="recompute")
LINEARS = ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv")


def linear_inputs_alive(sequence_parallel, overrides):
    """By linear behind a norm or an activation: whether its input's memory is in use when its layer is done."""
    model = build_gpt(gpt_config(sequence_parallel=sequence_parallel, **overrides), RECOMPUTE)
    inputs, alive = {}, {}
    for name, module in model.named_modules():
        if name.endswith(LINEARS):

            def remember(module, arguments, _, name=name):
                inputs[name] = StorageWeakRef(arguments[0].untyped_storage())

            module.register_forward_hook(remember)
    for layer in model.decoder.layers:

        def look(*_):
            alive.update({name: not memory.expired() for name, memory in inputs.items()})

        layer.register_forward_hook(look)
    losses(model, 0, 2, gives_mask=False).mean().backward()
    return alive


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_inputs_of_megatrons_linears_are_gone_when_their_layer_is_done(tp, sequence_parallel):
    names = [f"decoder.layers.{layer}.{name}" for layer in (0, 1) for name in LINEARS]
    for alive in run_megatron_ranks(linear_inputs_alive, tp, tp, sequence_parallel, {}):
        assert alive == dict.fromkeys(names, False)


def test_a_checkpointed_mlp_reads_its_input_twice_and_so_it_stays():
    overrides = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    (alive,) = run_megatron_ranks(linear_inputs_alive, 1, 1, False, overrides)
    for layer in (0, 1):
        assert alive[f"decoder.layers.{layer}.mlp.linear_fc1"]
        assert not alive[f"decoder.layers.{layer}.self_attention.linear_qkv"]


class Block(nn.Module):
    """norm, linear, gelu, linear; what `drops` keeps its inputs and drops its outputs."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.drops = drops
        self.gamma, self.beta = nn.Parameter(torch.rand(32) + 0.5), nn.Parameter(torch.randn(32))
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.memories: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from tempo_kernels.gelu import gelu
        from tempo_kernels.norm import layer_norm
        from tempo_kernels.recompute import drop

        keep = "recompute" if self.drops else "inplace"
        normalised = layer_norm(x, self.gamma, self.beta, keep=keep)
        hidden = self.first(normalised)
        activated = gelu(hidden, keep=keep)
        out = self.second(activated)
        if self.drops:
            drop(normalised, after=hidden)
            drop(activated, after=out)
            self.memories = [StorageWeakRef(t.untyped_storage()) for t in (normalised, activated)]
        return out


def zero3_steps(drops):
    """Losses of three steps of a ZeRO-3 engine, gradients accumulated over two micro batches; was memory left?"""
    import deepspeed

    # Not needed here, and two ranks that wait for the compilation of a run that was killed wait for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(3)
    model = nn.Sequential(Block(drops), Block(drops))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    found, alive = [], []
    for _ in range(6):
        loss = engine(torch.randn(4, 32, generator=generator)).square().mean()
        alive.append([not memory.expired() for block in model for memory in block.memories])
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found, alive


@pytest.mark.slow
def test_zero_3_linears_gather_and_find_their_inputs_again():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    dropped, kept = run_ranks(zero3_steps, 2, True), run_ranks(zero3_steps, 2, False)
    for (ours, alive), (theirs, _) in zip(dropped, kept, strict=True):
        assert alive == [[False] * 4] * 6
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert ours[-1] != ours[0]

"""Dropped outputs between norms, activations and the linears that people really use: Megatron's and ZeRO-3's."""

from __future__ import annotations

import pytest
import torch
from distributed import run_megatron_ranks, run_ranks
from gpt import build_gpt, gpt_config, losses
from torch import nn

from tempo_megatron import TempoConfig

RECOMPUTE = TempoConfig(gelu="recompute", norm="recompute")


LINEARS = ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv")


def bytes_of_linear_inputs(sequence_parallel, overrides):
    """By linear behind a norm or an activation: its input's bytes after forward, in its backward, and at the end."""
    model = build_gpt(gpt_config(sequence_parallel=sequence_parallel, **overrides), RECOMPUTE)
    inputs, in_backward = {}, {}
    for name, module in model.named_modules():
        if name.endswith(LINEARS):

            def remember(module, arguments, _, name=name):
                inputs[name] = arguments[0].untyped_storage()

            def look(_, name=name):
                in_backward[name] = inputs[name].nbytes()

            module.register_forward_hook(remember)
            module.weight.register_hook(look)
    loss = losses(model, 0, 2, gives_mask=False).mean()
    after_forward = {name: storage.nbytes() for name, storage in inputs.items()}
    loss.backward()
    return after_forward, in_backward, {name: storage.nbytes() for name, storage in inputs.items()}


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_inputs_of_megatrons_linears_take_no_memory_but_in_their_backward(tp, sequence_parallel):
    names = [f"decoder.layers.{layer}.{name}" for layer in (0, 1) for name in LINEARS]
    for after_forward, in_backward, at_the_end in run_megatron_ranks(
        bytes_of_linear_inputs, tp, tp, sequence_parallel, {}
    ):
        assert after_forward == at_the_end == dict.fromkeys(names, 0)
        assert in_backward.keys() == after_forward.keys() and min(in_backward.values()) > 0


def test_a_checkpointed_mlp_reads_its_input_twice_and_so_it_stays():
    overrides = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    ((after_forward, _, _),) = run_megatron_ranks(bytes_of_linear_inputs, 1, 1, False, overrides)
    for layer in (0, 1):
        assert after_forward[f"decoder.layers.{layer}.mlp.linear_fc1"] > 0
        assert after_forward[f"decoder.layers.{layer}.self_attention.linear_qkv"] == 0


class Block(nn.Module):
    """norm, linear, gelu, linear; what `drops` keeps its inputs and drops its outputs."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.drops = drops
        self.gamma, self.beta = nn.Parameter(torch.rand(32) + 0.5), nn.Parameter(torch.randn(32))
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.bytes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from tempo_kernels.gelu import gelu
        from tempo_kernels.norm import layer_norm
        from tempo_kernels.recompute import drop

        keep = "input" if self.drops else "output"
        normalised = layer_norm(x, self.gamma, self.beta, keep=keep)
        hidden = self.first(normalised)
        activated = gelu(hidden, keep=keep)
        out = self.second(activated)
        if self.drops:
            drop(normalised, after=hidden)
            drop(activated, after=out)
            self.bytes = [t.untyped_storage().nbytes() for t in (normalised, activated)]
        return out


def zero3_steps(drops):
    """Losses of three steps of a ZeRO-3 engine, gradients accumulated over two micro batches, and the bytes left."""
    import deepspeed

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
    found = []
    for _ in range(6):
        loss = engine(torch.randn(4, 32, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found, [size for block in model for size in block.bytes]


@pytest.mark.slow
def test_zero_3_linears_gather_and_find_their_inputs_again():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    dropped, kept = run_ranks(zero3_steps, 2, True), run_ranks(zero3_steps, 2, False)
    for (ours, sizes), (theirs, _) in zip(dropped, kept, strict=True):
        assert sizes == [0, 0, 0, 0]
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert ours[-1] != ours[0]

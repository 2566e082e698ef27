"""DeepSpeed's Ulysses beside tempoize: ranks that share the tokens of a sample compute what one process computes."""

from __future__ import annotations

import pytest
import torch
from distributed import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from tempo_kernels.recompute import keep_attention
from tempo_torch import report_on, tempoize

SEQ_LENGTH, BATCH, LAYERS = 32, 2, 2
EVERYTHING = {"mlp": "tile", "offload": "all", "offload_ahead": 0}


class CountsAttention(TorchDispatchMode):
    num_forwards = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        self.num_forwards += "scaled_dot_product" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


def build_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=LAYERS, use_cache=False, **sizes)).train()


def train(model, rank, size):
    """This rank's part of the loss, after backward, and how often attention ran."""
    ids = torch.randint(0, 50, (BATCH, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(SEQ_LENGTH).expand(BATCH, -1)
    parts = [t.chunk(size, dim=1)[rank].contiguous() for t in (ids[:, :-1], positions, ids[:, 1:])]
    inputs = dict(zip(("input_ids", "position_ids", "shift_labels"), parts, strict=True))
    with CountsAttention() as counts:
        loss = model(**inputs, labels=inputs["shift_labels"]).loss / size
        loss.backward()
    return loss.detach(), counts.num_forwards


def train_rank(settings, register_first):
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    # Two ranks that wait for the compilation of a run that was killed wait for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = build_llama()
    if settings:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})
    if register_first:
        UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", size, BATCH)
    tempoize(model, **settings)
    if not register_first:
        UlyssesSPAttentionHF.register_with_transformers(model, "tempo", size, BATCH)
    train(model, rank, size)  # the first forward is also the one that the report has seen
    model.zero_grad()
    loss, num_forwards = train(model, rank, size)
    torch.distributed.all_reduce(loss)
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
    return loss, {name: p.grad for name, p in model.named_parameters()}, num_forwards, str(report_on(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "settings", "register_first"),
    [(2, EVERYTHING, False), (4, {}, False), (2, {}, True)],
    ids=["all pieces of long sequences", "a copy of a group for each rank", "registered before tempoize"],
)
def test_ranks_of_ulysses_compute_what_one_process_computes(size, settings, register_first):
    pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp", reason="this DeepSpeed has no Ulysses")
    pytest.importorskip("transformers", reason="transformers is not installed; pip install tempo-megatron[test]")
    stock = build_llama()
    expected, _ = train(stock, 0, 1)
    for loss, grads, num_forwards, report in run_ranks(train_rank, size, settings, register_first):
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for name, parameter in stock.named_parameters():
            error = (grads[name] - parameter.grad).abs().max()
            assert error <= 1e-5 * parameter.grad.abs().max(), name
        assert num_forwards == LAYERS  # a checkpointed layer does not run it again
        assert ("call tempoize first" in report) == register_first

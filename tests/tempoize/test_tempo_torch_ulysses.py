"""DeepSpeed's Ulysses beside tempoize: ranks that share the tokens of a sample compute what one process computes."""

from __future__ import annotations

import pytest
import torch
from covering import exhaustive
from distributed import run_ranks
from tiny_models import build
from torch.utils._python_dispatch import TorchDispatchMode

from tempo_kernels.recompute import keep_attention
from tempo_torch import report_on, restore, tempoize

SEQ_LENGTH, BATCH, LAYERS = 32, 4, 2
SIZES = {"vocab_size": 50, "num_hidden_layers": LAYERS}
EVERYTHING = {"mlp": "tile", "offload": "all", "offload_ahead": 0}


class CountsAttention(TorchDispatchMode):
    num_forwards = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        self.num_forwards += "scaled_dot_product" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


def build_phi(p):
    """A model with dropout behind the embedding, in attention, behind it and behind the MLP."""
    return build("Phi", attention_dropout=p, resid_pdrop=p, embd_pdrop=p, **SIZES)


def build_llama():
    return build("Llama", num_key_value_heads=2, **SIZES)


def train(model, rank, size, groups=1, documents=1):
    """This rank's part of the loss, after backward, and how often attention ran; `size` ranks share a sample."""
    ids = torch.randint(0, 50, (BATCH, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(SEQ_LENGTH // documents).repeat(documents).expand(BATCH, -1)
    ours = [t.chunk(groups)[rank // size] for t in (ids[:, :-1], positions, ids[:, 1:])]
    parts = [t.chunk(size, dim=1)[rank % size].contiguous() for t in ours]
    inputs = dict(zip(("input_ids", "position_ids", "shift_labels"), parts, strict=True))
    with CountsAttention() as counts:
        loss = model(**inputs, labels=inputs["shift_labels"]).loss / (size * groups)
        loss.backward()
    return loss.detach(), counts.num_forwards


def refuse(call):
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def draw_hidden(tokens, hidden_size=32, **settings):
    model = tempoize(torch.nn.Sequential(torch.nn.Dropout(0.5)), **settings).train()
    return model(torch.ones(BATCH, tokens, hidden_size))


def start():
    """Returns DeepSpeed's class, and this rank."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    # Two ranks that wait for the compilation of a run that was killed wait for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    return UlyssesSPAttentionHF, torch.distributed.get_rank()


def train_rank(settings, register_first):
    ulysses, rank = start()
    size, model = torch.distributed.get_world_size(), build_llama()
    if settings:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})
    if register_first:
        ulysses.register_with_transformers(model, "sdpa", size, BATCH)
    tempoize(model, **settings)
    if not register_first:
        ulysses.register_with_transformers(model, "tempo", size, BATCH)
    train(model, rank, size)  # the first forward is also the one that the report has seen
    model.zero_grad()
    loss, num_forwards = train(model, rank, size)
    torch.distributed.all_reduce(loss)
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
    return loss, {name: p.grad for name, p in model.named_parameters()}, num_forwards, str(report_on(model))


def train_twice(model, *ranks):
    model.zero_grad()
    losses = torch.stack([train(model, *ranks)[0] for _ in range(2)])
    torch.distributed.all_reduce(losses)
    return losses


def train_rank_with_dropout(p):
    early = refuse(lambda: tempoize(build_phi(p), sequence_ranks=3))
    ulysses, rank = start()
    mask, odd = draw_hidden(8, sequence_ranks=4), refuse(lambda: draw_hidden(3, 4, sequence_ranks=4))
    size, groups = 2, 2
    model = tempoize(build_phi(p), sequence_ranks=size)
    ulysses.register_with_transformers(model, "tempo", size, BATCH // groups)
    losses = train_twice(model, rank, size, groups)
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    torch.distributed.all_reduce(gradient)
    packed = refuse(lambda: train(model, rank, size, groups, documents=4))
    tempoize(restore(model), rank=rank // size, num_ranks=groups)
    same = refuse(lambda: train(model, rank, size, groups))
    tempoize(restore(model), sequence_ranks=size).compile(backend="aot_eager")
    return losses, train_twice(model, rank, size, groups), gradient, mask, (early, packed, same, odd)


@pytest.mark.slow
def test_ranks_of_ulysses_draw_the_masks_of_one_process_in_attention_and_elsewhere():
    pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp", reason="this DeepSpeed has no Ulysses")
    whole = tempoize(build_phi(0.1))
    expected = torch.stack([train(whole, 0, 1)[0] for _ in range(2)])
    assert expected[0] != expected[1]
    gradient = whole.model.layers[0].self_attn.q_proj.weight.grad
    parts = []
    for losses, compiled, grad, mask, errors in run_ranks(train_rank_with_dropout, 4, 0.1):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(compiled, expected, rtol=1e-6, atol=0)
        assert (grad - gradient).abs().max() <= 1e-5 * gradient.abs().max()
        sentences = ("divides the ranks", "one document in a row", "sequence_ranks=2", "12 elements of a sample")
        for error, part in zip(errors, sentences, strict=True):
            assert part in error
        parts.append(mask)
    assert torch.equal(torch.cat(parts, dim=1), draw_hidden(32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "settings", "register_first"),
    # All pieces of long sequences; registered before tempoize; and of each group a copy for each rank.
    [(2, EVERYTHING, False), (2, {}, True), *exhaustive((4, {}, False))],
)
def test_ranks_of_ulysses_compute_what_one_process_computes(size, settings, register_first):
    pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp", reason="this DeepSpeed has no Ulysses")
    stock = build_llama()
    expected, _ = train(stock, 0, 1)
    for loss, grads, num_forwards, report in run_ranks(train_rank, size, settings, register_first):
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for name, parameter in stock.named_parameters():
            error = (grads[name] - parameter.grad).abs().max()
            assert error <= 1e-5 * parameter.grad.abs().max(), name
        assert num_forwards == LAYERS  # a checkpointed layer does not run it again
        assert ("call tempoize first" in report) == register_first

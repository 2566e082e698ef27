"""Data parallel models of two processes: losses of one process that sees the batches of both."""

from __future__ import annotations

import pytest
import torch
from distributed import run_ranks
from tiny_models import build as build_tiny
from torch import nn
from torch.nn import functional as F
from torch_models import H, S, build, make_ids

from tempo_torch import tempoize

STEPS, BATCH = 3, 2


def loss_of(model, ids):
    if any("GPT2LMHeadModel" in type(module).__name__ for module in model.modules()):
        return model(input_ids=ids, labels=ids).loss
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def build_gpt2():
    """A model of transformers, whose head and attention are Tempo's too."""
    return build_tiny("GPT2", vocab_size=50, hidden_size=H, max_position_embeddings=S, num_attention_heads=2)


def build_for(kind):
    return build_gpt2() if "GPT-2" in kind else build()


def one_process(kind):
    """The losses of a process that sees the batches of both ranks."""
    model = tempoize(build_for(kind), seed=9, norm="recompute")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        ids = make_ids(2 * BATCH, first=2 * BATCH * step)
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def one_rank(kind):
    """The mean over ranks of this kind of data parallelism's losses."""
    model = tempoize(build_for(kind), seed=9, norm="recompute")
    if kind.startswith("DDP"):
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif kind.startswith("FSDP2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in model.transformer.h if "GPT-2" in kind else model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrapped = None
    engine = make_engine(build_for(kind)) if wrapped is None else None
    optimizer = None if wrapped is None else torch.optim.SGD(wrapped.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        ids = make_ids(BATCH, first=(2 * step + torch.distributed.get_rank()) * BATCH)
        loss = loss_of(engine or wrapped, ids)
        if engine is not None:
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / 2)
    return losses


def make_engine(model):
    import deepspeed

    from tempo_megatron import initialize

    # Not needed here, and two ranks that wait for the compilation of a run that was killed wait for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # DeepSpeed's default clips, and the other processes do not
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "tempo": {"seed": 9, "norm": "recompute"},
        },
    )
    return engine


KINDS = ["DDP", "FSDP2", "ZeRO-3", "FSDP2 GPT-2", "ZeRO-3 GPT-2"]


def one_rank_of_each_kind():
    return {kind: one_rank(kind) for kind in KINDS}


@pytest.mark.slow
def test_losses_are_those_of_one_process():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    expected = {kind: one_process(kind) for kind in ("DDP", "FSDP2 GPT-2")}
    for rank in run_ranks(one_rank_of_each_kind, 2):
        for kind, losses in rank.items():
            of_one = expected["FSDP2 GPT-2" if "GPT-2" in kind else "DDP"]
            assert losses == pytest.approx(of_one, rel=2e-5), kind
            assert losses[0] != pytest.approx(losses[-1], rel=1e-3)


def run_llama(folder, tp_size=1):
    """The output of a forward with dropout in attention."""
    from transformers import LlamaModel

    kwargs = {} if tp_size == 1 else {"tp_plan": "auto", "tp_size": tp_size}
    model = LlamaModel.from_pretrained(folder, attention_dropout=0.5, **kwargs).train()
    out = tempoize(model, seed=9, norm="off")(input_ids=make_ids(2)).last_hidden_state
    return out.detach().tolist()


@pytest.mark.slow
def test_ranks_that_share_the_heads_of_an_attention_draw_the_mask_of_one_process(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * H}
    transformers.LlamaModel(transformers.LlamaConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path)
    expected = torch.tensor(run_llama(tmp_path))
    for out in run_ranks(run_llama, 2, tmp_path, 2):
        torch.testing.assert_close(torch.tensor(out), expected, rtol=1e-4, atol=1e-4)

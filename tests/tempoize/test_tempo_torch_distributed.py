"""Data parallel models of two processes: losses of one process that sees the batches of both."""

from __future__ import annotations

import pytest
import torch
from distributed import run_ranks
from tiny_models import build as build_tiny
from torch import nn
from torch.nn import functional as F
from torch_models import H, S, build, make_ids

from tempo_torch import restore, tempoize

STEPS, BATCH = 3, 2


def build_for(kind):
    """GPT-2 is a model of transformers, whose head and attention are Tempo's too."""
    gpt2 = {"vocab_size": 50, "hidden_size": H, "max_position_embeddings": S, "num_attention_heads": 2}
    model = build_tiny("GPT2", **gpt2) if "GPT-2" in kind else build()
    return tempoize(model, seed=9, norm="recompute")


def train(kind, model, backward, step, num_samples, first):
    """The losses of steps on so many samples, of which the first step's is `first`."""
    losses = []
    for n in range(STEPS):
        ids = make_ids(num_samples, first=2 * BATCH * n + first)
        loss = model(input_ids=ids, labels=ids).loss if "GPT-2" in kind else F.cross_entropy(model(ids).mT, ids)
        backward(loss)
        step()
        losses.append(loss.detach())
    return torch.stack(losses)


def train_by_torch(kind, model, num_samples=BATCH, first=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return train(kind, model, torch.Tensor.backward, step, num_samples, first)


def train_on_one_rank(kind):
    """The mean over ranks of this kind of data parallelism's losses."""
    model, first = build_for(kind), BATCH * torch.distributed.get_rank()
    if kind.startswith("DDP"):
        losses = train_by_torch(kind, nn.parallel.DistributedDataParallel(model), first=first)
    elif kind.startswith("FSDP2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in model.transformer.h if "GPT-2" in kind else model.layers:
            fully_shard(layer, mesh=mesh)
        losses = train_by_torch(kind, fully_shard(model, mesh=mesh), first=first)
    else:
        engine = make_engine(restore(model))
        losses = train(kind, engine, engine.backward, engine.step, BATCH, first)
    torch.distributed.all_reduce(losses)
    return (losses / 2).tolist()


def make_engine(model):
    import deepspeed

    from tempo_megatron import initialize

    # Not needed here, and two ranks that wait for the compilation of a run that was killed wait for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # DeepSpeed's default clips, and the other processes do not
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "tempo": {"seed": 9, "norm": "recompute"},
    }  # fmt: skip
    engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=config)
    return engine


KINDS = ["DDP", "FSDP2", "ZeRO-3", "FSDP2 GPT-2", "ZeRO-3 GPT-2"]


def train_each_kind():
    return {kind: train_on_one_rank(kind) for kind in KINDS}


@pytest.mark.slow
def test_losses_are_those_of_one_process():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    # Of a process that sees the batches of both ranks.
    expected = {kind: train_by_torch(kind, build_for(kind), 2 * BATCH).tolist() for kind in ("", "GPT-2")}
    for rank in run_ranks(train_each_kind, 2):
        for kind, losses in rank.items():
            assert losses == pytest.approx(expected["GPT-2" if "GPT-2" in kind else ""], rel=2e-5), kind
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

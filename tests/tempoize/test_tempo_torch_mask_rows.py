"""No two rows of any two forwards, steps or ranks share a dropout mask, whatever the sizes of their batches are."""

from __future__ import annotations

from collections import OrderedDict, UserDict

import pytest
import torch
import transformers
from dropout_masks import recorded_draws
from tiny_models import build as build_tiny
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tempo_torch import samples, set_step, tempoize

P, H, S = 0.5, 32, 8
STEPS = {
    0: [(4, 2), (4, 3), (2, 6), (6, 1), (3, 5), (4, 2), (1, 7)],
    1: [(4, 2), (1, 8), (5, 2), (4, 4), (7, 3), (2, 6)],
}
"""Of each rank, the (samples, rows of a sample) of its forwards."""


class Calls(nn.Module):
    """Calls one module on x [n, m, s, h], or on what `change` makes of it."""

    def __init__(self, inner, change=lambda x: x):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x):
        x = self.change(x)
        is_attention = isinstance(self.inner, nn.MultiheadAttention)
        return self.inner(x, x, x, need_weights=False)[0] if is_attention else self.inner(x)


class Functional(nn.Module):
    def forward(self, x):
        return F.dropout(x, P, self.training)


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(P)})

    def forward(self, x):
        return self.lora_dropout["default"](x)


DEPEND_ON_THE_BATCH = ("dropout of other rows", "sequence first", "some of the rows")


def fold(x):
    return x.flatten(0, 1)


def attention(**settings):
    return nn.MultiheadAttention(H, 2, P, **settings)


def hugging_face(name, **settings):
    sizes = {"vocab_size": 50, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": H}
    return build_tiny(name, **sizes, **settings)


BERT = {"attention_probs_dropout_prob": P, "hidden_dropout_prob": P}
ATTENTION = {"attention_dropout": P, "hidden_dropout": P}
MODELS = {
    "dropout": lambda: Calls(nn.Dropout(P)),
    "dropout of rows": lambda: Calls(nn.Dropout(P), fold),
    "dropout of other rows": lambda: Calls(nn.Dropout(P), lambda x: x.transpose(0, 1)),
    "F.dropout": lambda: Calls(Functional(), fold),
    "LoRA": lambda: Calls(Lora(), fold),
    "frames folded": lambda: Calls(attention(batch_first=True), fold),
    "frames folded, sequence first": lambda: Calls(attention(), lambda x: fold(x).transpose(0, 1)),
    "sequence first": lambda: Calls(attention(), lambda x: x[:, 0]),
    "some of the rows": lambda: Calls(attention(batch_first=True), lambda x: fold(x)[:-1]),
}
LANGUAGE_MODELS = {
    "BERT": (lambda: hugging_face("Bert", **BERT).bert, lambda n, m: {"input_ids": ids(n, S)}),
    "multiple choice": (
        lambda: transformers.BertForMultipleChoice(hugging_face("Bert", **BERT).config),
        lambda n, m: {"input_ids": ids(n, m, S)},
    ),
    "positions first": (
        lambda: hugging_face("Llama", attention_dropout=P).model,
        lambda n, m: {"position_ids": torch.arange(S)[None], "input_ids": ids(n, S)},
    ),
    "embeddings last": (
        lambda: hugging_face("Llama", attention_dropout=P).model,
        lambda n, m: {"attention_mask": torch.ones(1, 1, S, S, dtype=torch.bool), "inputs_embeds": torch.ones(n, S, H)},
    ),
    "ALiBi": (lambda: hugging_face("Bloom", **ATTENTION).transformer, lambda n, m: {"input_ids": ids(n, S)}),
}


def ids(*shape):
    return torch.arange(int(torch.Size(shape).numel())).view(shape) % 50


def build(name):
    torch.manual_seed(0)
    return (MODELS.get(name) or LANGUAGE_MODELS[name][0])()


def make_batch(name, n, m):
    return {"x": torch.ones(n, m, S, H)} if name in MODELS else LANGUAGE_MODELS[name][1](n, m)


def draw(model, batch):
    """The (key, sample, head, row) of what one forward draws."""
    with recorded_draws() as drawn:
        model(**batch)
    return set(drawn)


@pytest.mark.parametrize("name", [*MODELS, *LANGUAGE_MODELS])
def test_no_two_rows_share_a_mask(name):
    seen = set()
    for rank, steps in STEPS.items():
        model = tempoize(build(name), seed=3, rank=rank, num_ranks=2)
        for n, m in steps:
            drawn = draw(model, make_batch(name, n, m))
            assert drawn and seen.isdisjoint(drawn), f"rank {rank}, {n} samples of {m} rows"
            seen |= drawn
            model.eval()
            assert not draw(model, make_batch(name, n, m))
            model.train()
            with torch.no_grad():
                drawn = draw(model, make_batch(name, n, m))
            assert seen.isdisjoint(drawn)
            seen |= drawn


@pytest.mark.parametrize("name", [name for name in (*MODELS, *LANGUAGE_MODELS) if name not in DEPEND_ON_THE_BATCH])
def test_ranks_draw_what_one_process_draws(name):
    """Where rows are a whole multiple of samples, and the first dimension of the batch counts these."""
    whole, *ranks = (
        tempoize(build(name), seed=3, **given) for given in ({}, *({"rank": r, "num_ranks": 2} for r in (0, 1)))
    )
    for m in (3, 1, 4):
        parts = [draw(model, make_batch(name, 2, m)) for model in ranks]
        assert draw(whole, make_batch(name, 4, m)) == parts[0] | parts[1] and parts[0].isdisjoint(parts[1])


def test_larger_batches_than_two_to_the_16th_share_no_mask():
    model, seen = tempoize(Calls(nn.Dropout(P)), seed=3), set()
    for n in (60_000, 140_000, 65_536, 65_537, 1000):
        model(torch.ones(n, 1))
        key, first, _ = model.inner.place.draw(torch.device("cpu"))
        rows = {(key, first + row) for row in range(n)}
        assert seen.isdisjoint(rows)
        seen |= rows


def test_a_count_beyond_2_to_the_47th_is_refused():
    model = tempoize(Calls(nn.Dropout(P)), seed=3)
    set_step(model, 2**40, 2**7)
    with pytest.raises(
        ValueError,
        match=r"the first of 128 samples, have come to sample 2\*\*47; expected fewer; say with tempo_torch.samples",
    ):
        model(torch.ones(2, 8))


def test_samples_may_say_how_many_there_are():
    """[tokens, samples, h]: attention's rows are then those of one process."""

    def run(first, n, count):
        model = tempoize(Calls(attention()), seed=3)
        with samples(model, first, count):
            return draw(model, {"x": torch.ones(S, n, H)})

    assert run(10, 4, 4) == run(10, 2, 2) | run(12, 2, 2)
    with pytest.raises(ValueError, match="num_samples is 0; expected at least 1, the samples of each batch"):
        run(0, 2, 0)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_samples_are_counted_by_the_ids_in_a_dictionary(kind):
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(P)

        def forward(self, features):
            return self.drop(torch.ones(len(features["input_ids"]), H))

    features = kind(position_ids=torch.arange(S)[None], input_ids=ids(4, S))
    assert torch.equal(tempoize(Features())(features), tempoize(Features())({"input_ids": features["input_ids"]}))
    assert torch.equal(
        tempoize(Features())(features), tempoize(nn.Sequential(OrderedDict(drop=nn.Dropout(P))))(torch.ones(4, H))
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_run_again_draw_the_same_masks(name, reentrant):
    model = tempoize(build(name), seed=3)
    batches = [torch.ones(n, m, S, H, requires_grad=True) for n, m in STEPS[0][:3]]
    with recorded_draws() as first:
        outs = [model(x) for x in batches]
    set_step(model, 0)
    inner, settings = model.inner.forward, {"use_reentrant": reentrant, "preserve_rng_state": False}
    model.inner.forward = lambda *x, **more: checkpoint(lambda *x: inner(*x, **more), *x, **settings)
    outs = [model(x) for x in batches]
    with recorded_draws() as again:
        sum(out.sum() for out in outs).backward()
    assert set(first) == set(again)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_rows_draw_the_same_masks():
    plain, compiled = (tempoize(build("frames folded"), seed=3) for _ in range(2))
    compiled.inner.compile(backend="aot_eager", fullgraph=True)
    for n, m in STEPS[0][:4]:
        x = torch.randn(n, m, S, H)
        torch.testing.assert_close(plain(x), compiled(x))

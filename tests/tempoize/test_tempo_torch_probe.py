"""What a forward in training was seen to run is what it runs, and seeing it changes nothing."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tempo_torch import report_on, restore, tempoize

LEFT_BY_TORCH = "draws from torch's generator"


class Plain(nn.Module):
    """Modules and functions that draw in ways that no name tells."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.unused = nn.Linear(8, 8), nn.Dropout(0.1), nn.Dropout(0.1)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.batch_norm, self.function = nn.BatchNorm1d(8), getattr(F, "drop" + "out")

    def forward(self, x, noise=None):
        x = self.function(self.drop(self.up(x)), 0.1, self.training)
        if noise is not None:
            x = x + torch.rand_like(noise)
        return self.batch_norm(self.attention(x, x, x)[0].flatten(0, 1))


def list_draws(model):
    return {entry.name: entry.why.split()[0] for entry in report_on(model).left if LEFT_BY_TORCH in entry.why}


def test_a_plain_model_is_seen_in_its_first_forward_in_training():
    model, x = tempoize(Plain(), attention="off", loss="off"), torch.randn(2, 4, 8)
    assert "is not known yet" in str(report_on(model)) and not list_draws(model)
    model.eval()(x)
    assert "is not known yet" in str(report_on(model))
    model.train()(x)
    draws = {"": "torch.nn.functional.dropout", "attention": "torch.nn.functional.multi_head_attention_forward"}
    assert list_draws(model) == draws
    assert [(entry.name, entry.why) for entry in report_on(model).left if "watched" in entry.why] == [
        ("unused", "the forward that was watched does not call it")
    ]
    assert [entry.name for entry in report_on(model).replaced] == ["drop"]
    assert "Seen in a forward in training, without memory, of 0 [2, 4, 8]." in str(report_on(model))


def test_seeing_a_forward_changes_neither_the_model_nor_random_states():
    model, calls = Plain(), []
    model.up.register_forward_hook(lambda *_: calls.append(random.random()))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    tempoize(model, attention="off", loss="off")
    members = {name: set(module.__dict__) for name, module in model.named_modules()}
    watched = []

    def look(*_):
        watched.append((torch.get_rng_state(), random.getstate(), len(calls)))

    look()
    model.register_forward_pre_hook(look)  # after the one that watches
    model(torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)))
    (torch_before, random_before, calls_before), (torch_after, random_after, calls_after) = watched
    assert torch.equal(torch_before, torch_after) and random_before == random_after and calls_before == calls_after == 0
    assert "Seen" in str(report_on(model)) and len(calls) == 1
    assert members == {name: set(module.__dict__) for name, module in model.named_modules()}
    assert model.batch_norm.num_batches_tracked == 1
    assert all(torch.equal(value, state[name]) for name, value in model.named_parameters())


def test_a_model_that_cannot_be_seen_says_why():
    model = Plain()
    model.function = lambda x, *_: model.up(x)  # leads past the copy
    tempoize(model, attention="off", loss="off")
    model(torch.randn(2, 4, 8))
    assert "is not known yet: RuntimeError: a function reaches up otherwise than by its module." in str(
        report_on(model)
    )


def find_case(name):
    """A model of transformers with dropout, of two or three layers."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from huggingface_models import MODELS

    return MODELS[name]


# What of each model still draws from torch's generator.
STILL_DRAW = {
    "Falcon, ALiBi": {"FalconAttention"},
    "BLOOM": set(),
    "Starcoder2": set(),
    "DINOv2": {"Dinov2DropPath"},
    "BART decoder": {"BartEncoder"},
    "BERT": set(),
}


@pytest.mark.parametrize("name", STILL_DRAW)
def test_a_model_moves_torchs_generator_where_its_report_says_so_and_nowhere_else(name):
    case = find_case(name)
    more = {"encoder_layerdrop": 0.1} if name == "BART decoder" else {}
    ours = tempoize(case.build(small=True, **more), seed=3)
    moved, stack = set(), []

    def enter(module, *_):
        if stack and not torch.equal(stack[-1][1], torch.get_rng_state()):
            moved.add(stack[-1][0])
        stack.append((names[module], torch.get_rng_state()))

    def leave(module, *_):
        own, state = stack.pop()
        if not torch.equal(state, torch.get_rng_state()):
            moved.add(own)
        if stack:
            stack[-1] = (stack[-1][0], torch.get_rng_state())

    names = {module: name for name, module in ours.named_modules()}
    for module in names:
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    torch.manual_seed(0)
    ours(**case.make_inputs(small=True))
    by_mask = {entry.name for entry in report_on(ours).left if entry.why == "it adds a tensor to its scores"}
    assert moved == {*list_draws(ours), *by_mask}, str(report_on(ours))
    assert {type(ours.get_submodule(name)).__name__ for name in moved} == STILL_DRAW[name]


UNASKED = "none of its modules asks transformers' registry for attention"


@pytest.mark.parametrize(
    ("name", "place", "why"),
    [("Falcon, ALiBi", "", UNASKED), ("Swin", "{layer}.attention", "it adds a tensor to its scores")],
)
def test_attention_that_adds_to_its_scores_stays_stock_or_is_refused_by_name(name, place, why):
    case = find_case(name)
    ours = tempoize(case.build(small=True))
    if why == UNASKED:
        assert ours.config._attn_implementation == "sdpa"
    else:
        ours(**case.make_inputs(small=True))
    left = {(entry.name, entry.why) for entry in report_on(ours).left if entry.operation == "attention"}
    assert (place.format(layer=case.layer), why) in left
    with pytest.raises(ValueError, match='attention is "flash", but it adds a tensor to its scores'):
        tempoize(case.build(small=True), attention="flash")


@pytest.mark.parametrize("name", ["BERT", "Falcon, ALiBi"])
def test_torchs_attention_in_a_model_of_transformers_has_an_entry_of_its_own(name):
    case = find_case(name)
    model = case.build(small=True)
    model = getattr(model, "transformer", model)  # without Falcon's head

    class Pooled(type(model)):
        def forward(self, input_ids=None, **kwargs):
            out = super().forward(input_ids=input_ids, **kwargs)
            self.pool(out[0], out[0], out[0], need_weights=False)
            return out

    model.__class__, model.pool = Pooled, nn.MultiheadAttention(64, 4, 0.1)
    ours = tempoize(tempoize(model))
    entries = {entry.name: entry for entry in report_on(ours).entries if entry.operation == "attention"}
    assert entries["pool"].now == "flash" and entries["pool"].module == "MultiheadAttention"
    registered = [entry.name for entry in entries.values() if entry.now and entry.name != "pool"]
    assert registered == ([f"encoder.layer.{n}.attention.self" for n in range(3)] if name == "BERT" else [])
    ours(case.make_inputs(small=True)["input_ids"])
    members = set(nn.MultiheadAttention(64, 4).__dict__)
    assert set(restore(ours).pool.__dict__) == members and ours.config._attn_implementation == "sdpa"

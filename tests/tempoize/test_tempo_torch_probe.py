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


def build(name, config, p=(), **settings):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**settings, **dict.fromkeys(p, 0.1))).train()


SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "Falcon": ("FalconModel", "FalconConfig", ("hidden_dropout", "attention_dropout"), {**SMALL, "alibi": True}),
    "BLOOM": (
        "BloomModel",
        "BloomConfig",
        ("hidden_dropout", "attention_dropout"),
        {"vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    ),
    "Starcoder2": (
        "Starcoder2Model",
        "Starcoder2Config",
        ("residual_dropout", "embedding_dropout", "attention_dropout"),
        {**SMALL, "num_key_value_heads": 2, "intermediate_size": 96, "pad_token_id": 0},
    ),
    "DINOv2": (
        "Dinov2Model",
        "Dinov2Config",
        ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"),
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4},
    ),
    "BART": (
        "BartModel",
        "BartConfig",
        ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop"),
        {"vocab_size": 64, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 1}
        | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
        | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    ),
    "BERT": (
        "BertModel",
        "BertConfig",
        ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        {**SMALL, "intermediate_size": 96},
    ),
}


STILL_DRAW = {"Falcon": {"FalconAttention"}, "DINOv2": {"Dinov2DropPath"}, "BART": {"BartEncoder"}}


def make_call(name):
    ids = torch.arange(24).view(2, 12)
    return {"pixel_values": torch.ones(2, 3, 16, 16)} if name == "DINOv2" else {"input_ids": ids}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_moves_torchs_generator_where_its_report_says_so_and_nowhere_else(name):
    model, config, p, settings = MODELS[name]
    ours = tempoize(build(model, config, p, **settings), seed=3)
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
    ours(**make_call(name))
    assert moved == set(list_draws(ours)), str(report_on(ours))
    assert {type(ours.get_submodule(name)).__name__ for name in moved} == STILL_DRAW.get(name, set())


def test_attention_that_no_module_asks_for_stays_as_it_was_and_is_refused_by_name():
    model, config, p, settings = MODELS["Falcon"]
    ours = tempoize(build(model, config, p, **settings))
    assert ours.config._attn_implementation == "sdpa"
    why = "none of its modules asks transformers' registry for attention"
    assert ("attention", why) in {(entry.operation, entry.why) for entry in report_on(ours).left}
    with pytest.raises(ValueError, match=f'attention is "flash", but {why}'):
        tempoize(build(model, config, p, **settings), attention="flash")


@pytest.mark.parametrize("name", ["BERT", "Falcon"])
def test_torchs_attention_in_a_model_of_transformers_has_an_entry_of_its_own(name):
    model, config, p, settings = MODELS[name]
    model = build(model, config, p, **settings)

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
    assert registered == ([f"encoder.layer.{n}.attention.self" for n in range(2)] if name == "BERT" else [])
    ours(**make_call(name))
    members = set(nn.MultiheadAttention(64, 4).__dict__)
    assert set(restore(ours).pool.__dict__) == members and ours.config._attn_implementation == "sdpa"


def test_attention_that_adds_to_its_scores_stays_stock_or_is_refused_by_name():
    settings = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": (2,), "num_heads": (2,), "window_size": 4}
    p = ("attention_probs_dropout_prob",)
    ours = tempoize(build("SwinModel", "SwinConfig", p, **settings))
    ours(torch.ones(2, 3, 16, 16))
    left = {(entry.name, entry.why) for entry in report_on(ours).left if entry.operation == "attention"}
    assert ("encoder.layers.0.blocks.1.attention", "it adds a tensor to its scores") in left
    with pytest.raises(ValueError, match='attention is "flash", but it adds a tensor to its scores'):
        tempoize(build("SwinModel", "SwinConfig", p, **settings), attention="flash")


def test_a_norm_whose_class_has_no_bias_is_the_same_function():
    sizes = {**SMALL, "num_key_value_heads": 4, "intermediate_size": 96, "pad_token_id": 0, "eos_token_id": 1}
    stock, ours = (build("CohereModel", "CohereConfig", **sizes) for _ in range(2))
    ids = make_call("Cohere")["input_ids"]
    assert {entry.operation for entry in report_on(tempoize(ours)).replaced} >= {"norm"}
    torch.testing.assert_close(ours(ids)[0], stock(ids)[0], rtol=1e-5, atol=1e-5)

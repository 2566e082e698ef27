"""GPT, BERT and T5: every dropout draws with a key of its own, and what Megatron computes is computed."""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import pytest
from covering import parametrize_covering
from distributed import run_megatron_ranks, run_megatron_ranks_once
from gpt import (
    RECOMPUTE,
    SEQ_LENGTH,
    assert_equal_to_stock,
    bert_losses,
    build_bert,
    build_gpt,
    build_t5,
    gpt_config,
    gradients,
    losses,
    t5_losses,
    tokens_of,
)  # fmt: skip
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec
from megatron.core.transformer.transformer_layer import TransformerLayer

from tempo_kernels.philox import keep_bits
from tempo_megatron import TempoConfig, tempoize
from tempo_megatron.slots.dropout_rng import Site, Stack, derive_site_key

SEED, LAYERS = 5, 2
OFF = TempoConfig.off()


def run_bert(model, **_):
    return bert_losses(model)


def run_gpt(model, **_):
    return losses(model, 0, 2, gives_mask=False, seed=SEED)


MODELS = {"GPT": (build_gpt, run_gpt), "BERT": (build_bert, run_bert), "T5": (build_t5, t5_losses)}


@contextlib.contextmanager
def recorded_draws(model):
    """{place in the model: the keys it drew with}, where the embedding's calls are places of their own."""
    places, keys, calls = [], {}, {}

    def enter(name):
        calls[name] = calls.get(name, 0) + 1
        places.append(f"{name} {calls[name]}" if "embedding" in name else name)

    def leave(*_):
        places.pop()

    def scoped(name, get_function):
        def get(training, fused):
            def run(*args):
                enter(name)
                try:
                    return get_function(training, fused)(*args)
                finally:
                    places.pop()

            return run

        return get

    def record(key, p, **where):
        keys.setdefault(places[-1] if places else "backward", set()).add(key)
        return keep_bits(key, p, **where)

    for name, module in model.named_modules():
        if name.endswith(("core_attention", "embedding_dropout")):
            module.register_forward_pre_hook(lambda *_, name=name: enter(name))
            module.register_forward_hook(leave)
        if isinstance(module, TransformerLayer):
            for bda in ("self_attn_bda", "cross_attn_bda", "mlp_bda"):
                if isinstance(getattr(module, bda), types.FunctionType):
                    setattr(module, bda, scoped(f"{name}.{bda}", getattr(module, bda)))
    with (
        mock.patch("tempo_kernels.dropout_add.cpu.keep_bits", record),
        mock.patch("tempo_kernels.attention.cpu.keep_bits", record),
    ):
        yield keys


def keys_of(name, recomputes=False):
    build, run = MODELS[name]
    choices = {}
    if recomputes:
        choices = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model = build(gpt_config(dropout=0.2, **choices), TempoConfig())
    with recorded_draws(model) as keys:
        # Twice, so that what one forward leaves behind would show in the next.
        for _ in range(2):
            run(model).sum().backward() if recomputes else run(model)
    return keys


def keys_of_stack(stack, sites):
    places = [(0, Site.EMBEDDING), *((layer + 1, site) for layer in range(LAYERS) for site in sites)]
    return {derive_site_key(SEED, stack, *place) for place in places}


SITES = (Site.ATTENTION, Site.SELF_ATTENTION_OUTPUT, Site.MLP_OUTPUT)
CROSS = (Site.CROSS_ATTENTION, Site.CROSS_ATTENTION_OUTPUT)
ENCODER_KEYS, DECODER_KEYS = (keys_of_stack(stack, SITES) for stack in (Stack.ENCODER, Stack.DECODER))
KEYS = {
    "GPT": DECODER_KEYS,
    "BERT": ENCODER_KEYS,
    "T5": ENCODER_KEYS | keys_of_stack(Stack.DECODER, SITES + CROSS),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_two_dropouts_of_a_model_share_a_key(name):
    (keys,) = run_megatron_ranks(keys_of, 1, 1, name)
    embeddings = {place for place in keys if "embedding" in place}
    # The second forward's calls draw with the keys of the first one's.
    assert len(embeddings) == (4 if name == "T5" else 2)
    half = len(embeddings) // 2
    first = sorted(embeddings)[:half]
    assert [keys[place] for place in sorted(embeddings)[half:]] == [keys[place] for place in first]
    drawn = {place: found for place, found in keys.items() if place not in embeddings or place in first}
    assert all(len(found) == 1 for found in drawn.values()), drawn
    assert len(set.union(*drawn.values())) == len(drawn)
    assert set.union(*drawn.values()) == KEYS[name]


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_layers_draw_with_the_keys_of_their_forward(name):
    (keys,) = run_megatron_ranks(keys_of, 1, 1, name, True)
    assert set.union(*keys.values()) == KEYS[name]


def t5_given_what_the_encoder_made():
    """Keys of the embedding where T5 is given encoder_hidden_states, and errors where a mask would be drawn twice."""
    model = build_t5(gpt_config(dropout=0.2), TempoConfig())
    encoded = t5_losses(model, output_encoder_hidden_only=True).detach()
    with recorded_draws(model) as keys:
        t5_losses(model, encoder_hidden_states=encoded)
    tokens = tokens_of(0, 2)[:, :-1].contiguous()
    errors = []
    for call in (lambda: model.embedding(tokens, tokens % SEQ_LENGTH), lambda: t5_losses(model.forward)):
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))
    model.eval()
    model.embedding(tokens, tokens % SEQ_LENGTH)
    return {place: found for place, found in keys.items() if "embedding" in place}, errors


def test_t5_without_its_encoder_embeds_as_the_decoder_and_nothing_embeds_twice():
    ((keys, errors),) = run_megatron_ranks(t5_given_what_the_encoder_made, 1, 1)
    assert list(keys.values()) == [{derive_site_key(SEED, Stack.DECODER, 0, Site.EMBEDDING)}]
    assert len(errors) == 2 and all("would draw a mask twice" in error for error in errors)


def stack_that_was_asked_for():
    config = gpt_config(dropout=0.2)
    spec = tempoize(decoder_model_with_local_spec(), config, TempoConfig(), stack=Stack.ENCODER)
    return spec.layer_specs[0].submodules.self_attention.submodules.core_attention.params["stack"]


def test_the_stack_can_be_said():
    assert run_megatron_ranks(stack_that_was_asked_for, 1, 1) == [Stack.ENCODER]


def loss_and_gradients(name, tempo_config, sequence_parallel=False):
    build, run = MODELS[name]
    config = gpt_config(sequence_parallel=sequence_parallel)
    settings = {"add_binary_head": False} if name == "BERT" else {}
    model = build(config, tempo_config, **settings)
    loss = run(model).mean()
    loss.backward()
    return loss.item(), gradients(model)


# BertLMHead has a norm of its own, which refuses sequence parallelism without Apex.
LAYOUTS = {
    f"{name}, {layout}": (name, *sizes)
    for name in ("BERT", "T5")
    for layout, sizes in {"TP 1": (1, False), "TP 2": (2, False), "TP 2 + SP": (2, True)}.items()
    if (name, sizes) != ("BERT", (2, True))
}


@parametrize_covering(each={"layout": LAYOUTS, "tempo_config": {"inplace": TempoConfig(), "recompute": RECOMPUTE}})
def test_loss_and_every_gradient_equal_stock_without_dropout(layout, tempo_config):
    name, tp, sequence_parallel = layout
    found = run_megatron_ranks(loss_and_gradients, tp, tp, name, tempo_config, sequence_parallel)
    stock = run_megatron_ranks_once(loss_and_gradients, tp, tp, name, OFF)
    for ours, theirs in zip(found, stock, strict=True):
        assert_equal_to_stock(ours, theirs)

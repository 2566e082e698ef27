"""Which layers a block has is Megatron's to say, and what Tempo cannot do is said before anything is built."""

from __future__ import annotations

import dataclasses
import json
import re
from unittest import mock

import torch
from covering import parametrize_covering
from distributed import run_megatron_ranks, run_megatron_ranks_once
from gpt import RECOMPUTE, SEQ_LENGTH, VOCAB_SIZE, WRITTEN, assert_equal_to_stock, gpt_config, gradients, losses
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.moe import moe_utils

from tempo_megatron import TempoConfig, tempo_block_spec, tempoize
from tempo_megatron.slots.report import report_on

STOCK = None
NO_ATTENTION = {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}
BLOCKS = [
    {"attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False}, "ffn": {"ffn_mult": 2.0}},
    {"attention": NO_ATTENTION, "ffn": {"ffn_mult": 3.0}},
]


def heterogeneous_config():
    blocks = json.dumps({"block_configs": BLOCKS})
    return gpt_config(HeterogeneousTransformerConfig, heterogeneous_layers_config_encoded_json=blocks)


def config_of(name):
    if name == "heterogeneous":
        return heterogeneous_config()
    moe = {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True, "add_bias_linear": False}
    overrides = {
        "a dense layer, then experts": {**moe, "moe_layer_freq": [0, 1]},
        "experts, then a dense layer": {**moe, "moe_layer_freq": 2},
        "query and key norm without weights": {"qk_l2_norm": True},
    }
    return gpt_config(**overrides[name])


BLOCK_NAMES = ["a dense layer, then experts", "experts, then a dense layer", "query and key norm without weights"]
BLOCK_NAMES += ["heterogeneous"]


def stock_spec(config):
    if isinstance(config, HeterogeneousTransformerConfig):
        return get_gpt_heterogeneous_layer_spec(config)
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, qk_l2_norm=config.qk_l2_norm)


def loss_and_gradients(name, tempo_config):
    """Also the parameters' names and the class of every module that Tempo does not replace."""
    config = config_of(name)
    spec = stock_spec(config) if tempo_config is STOCK else tempo_block_spec(config, tempo_config)
    torch.manual_seed(7)
    model = GPTModel(config, spec, vocab_size=VOCAB_SIZE, max_sequence_length=SEQ_LENGTH).train()
    # Without Transformer Engine Megatron does not define what its router looks for.
    with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
        loss = losses(model, 0, 2, gives_mask=tempo_config is STOCK).mean()
        loss.backward()
    is_expert = [type(layer.mlp).__name__ == "MoELayer" for layer in model.decoder.layers]
    return (loss.item(), gradients(model)), is_expert


@parametrize_covering(each={"name": BLOCK_NAMES, "tempo_config": {"inplace": TempoConfig(), "recompute": RECOMPUTE}})
def test_the_block_is_megatrons_of_the_same_configuration(name, tempo_config):
    ((found, is_expert),) = run_megatron_ranks(loss_and_gradients, 1, 1, name, tempo_config)
    ((stock, stock_is_expert),) = run_megatron_ranks_once(loss_and_gradients, 1, 1, name, STOCK)
    assert is_expert == stock_is_expert
    assert_equal_to_stock(found, stock)


def counts_of_heterogeneous():
    return report_on(tempo_block_spec(heterogeneous_config(), TempoConfig())).counts


def test_a_slot_that_is_left_empty_is_not_counted():
    # Two layers, the second without attention and its norm and bias-dropout-add; and the final norm.
    expected = {"norm": (4, 4), "attention": (1, 1), "dropout": (3, 3), "activation": (2, 2)}
    assert run_megatron_ranks(counts_of_heterogeneous, 1, 1) == [expected]


DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
HALF = {"params_dtype": torch.bfloat16, "bf16": True}
NO_MASKS = TempoConfig(attention="off", dropout="off")
CONTEXT = {"context_parallel_size": 2}
REFUSED = {
    "hybrid context parallelism": (
        DROPS, {"hybrid_context_parallel": True}, WRITTEN,
        r'hybrid_context_parallel is on, .*same masks; set tempo.dropout and tempo.attention to "off"',
    ),
    "context parallelism, the paper's form": (
        {}, CONTEXT, TempoConfig(attention="softmax"),
        'context_parallel_size is 2 and the form is softmax, .*set tempo.attention to "flash" or "recompute" or "off"',
    ),
    "multi-token prediction in parts": (
        DROPS, {"mtp_num_layers": 1, "overlap_moe_expert_parallel_comm": True}, WRITTEN,
        "overlap_moe_expert_parallel_comm is on, .*same dropout masks",
    ),
    "recomputed layernorm": (
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, {}, WRITTEN,
        "recompute_modules holds layernorm.*NameError",
    ),
    "attention variant": (
        {}, {"experimental_attention_variant": "gated_delta_net"}, WRITTEN,
        "experimental_attention_variant is gated_delta_net; expected none",
    ),
}  # fmt: skip
FLOAT32 = {"fp32_residual_connection": True}
ALLOWED = {
    "context parallelism": (DROPS, CONTEXT, WRITTEN),
    "multi-token prediction": (DROPS, {"mtp_num_layers": 1}, WRITTEN),
    "float32 residual, stock norm": (HALF, FLOAT32, dataclasses.replace(WRITTEN, norm="off")),
    "float32 residual, parameters of 16 bits": (HALF, FLOAT32, WRITTEN),
    "float32 residual and parameters": ({}, FLOAT32, WRITTEN),
}


def answers():
    """What tempo_block_spec says to each configuration; attributes are set once Megatron has checked it."""
    found = {}
    for kind, cases in (("refused", REFUSED), ("allowed", ALLOWED)):
        for name, (overrides, attributes, tempo_config, *_) in cases.items():
            config = gpt_config(**overrides)
            for attribute, value in attributes.items():
                setattr(config, attribute, value)
            try:
                tempo_block_spec(config, tempo_config)
                found[kind, name] = "not refused"
            except ValueError as error:
                found[kind, name] = str(error)
    return found


def test_what_cannot_be_is_refused_at_the_start_with_the_remedy_and_what_draws_no_mask_is_not():
    (found,) = run_megatron_ranks(answers, 1, 1)
    for name, (*_, message) in REFUSED.items():
        assert re.search(message, found["refused", name]), (name, found["refused", name])
    assert {found["allowed", name] for name in ALLOWED} == {"not refused"}, found


def refusals_of_other_specs():
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    config = gpt_config()
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    with_prediction = gpt_config(mtp_num_layers=1)
    prediction = get_gpt_mtp_block_spec(with_prediction, block, use_transformer_engine=False)
    found = []
    for spec in (mamba_stack_spec, prediction.layer_specs[0], None, block.layer_specs):
        try:
            tempoize(spec, config, TempoConfig())
        except ValueError as error:
            found.append(str(error))
    # Newer Megatrons call it HybridStack.
    return found, mamba_stack_spec.module.__name__


def test_a_spec_of_something_else_is_one_sentence():
    ((found, mamba),) = run_megatron_ranks(refusals_of_other_specs, 1, 1)
    names = [mamba, "MultiTokenPredictionLayer", "NoneType", "list"]
    assert len(found) == len(names)
    for text, name in zip(found, names, strict=True):
        assert f"one of {name}; expected a spec of TransformerLayer" in text and text.count(".") == 0, text

"""With "auto" each operation takes the first of its preference that the model can have, and says why it is lesser."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from megatron.core.activations import squared_relu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from tempo_megatron import TempoConfig
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import make_shape
from tempo_megatron.settings.activations import ACTIVATIONS
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.slots.choose import choose, choose_operation
from tempo_megatron.slots.mlp import FUNCTIONS, make_activation, name_activation

FIRST = {name: operation.preference[0] for name, operation in OPERATIONS.items()}
EVERYTHING_OFF = dict.fromkeys(OPERATIONS, "off")
ALL_THAT_AUTO_TAKES = {name: "off" for name, value in FIRST.items() if value != "off"}
DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True}
HALF = {"params_dtype": torch.bfloat16, "bf16": True}

# Settings of the TransformerConfig, what "auto" takes where that is not its first choice, and the reason.
CASES: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "gelu": ({}, {}, ""),
    "squared relu": ({"activation_func": squared_relu}, {}, ""),
    "swiglu": (SWIGLU, {"activation": "recompute"}, "activation is swiglu, and in place exists for gelu and squared"),
    "geglu": ({"activation_func": F.gelu, "gated_linear_unit": True}, {"activation": "recompute"}, "is geglu"),
    "relu": ({"activation_func": F.relu}, {"activation": "off"}, "activation is relu, and Tempo has gelu, .* only$"),
    "geglu with a clamp": (
        {"activation_func": F.gelu, "gated_linear_unit": True, "activation_func_clamp_value": 7.0},
        {"activation": "off"},
        "activation is gated gelu",
    ),
    "unknown normalization": ({"normalization": "L2Norm"}, {"norm": "off"}, "normalization is L2Norm"),
    "float32 residual": ({**HALF, "fp32_residual_connection": True}, {}, ""),
    "multi-token prediction": ({**DROPS, "mtp_num_layers": 1}, {}, ""),
    "residual after the norm": ({"apply_residual_connection_post_layernorm": True}, {}, ""),
    "hybrid context parallelism": (
        {**DROPS, "hybrid_context_parallel": True},
        {"attention": "off", "dropout": "off"},
        "hybrid_context_parallel is on, .* would draw the same masks",
    ),
    "context parallelism on a GPU": ({"context_parallel_size": 2, "cp_comm_type": "p2p"}, {}, ""),
    "multi-token prediction in parts": (
        {**DROPS, "mtp_num_layers": 1, "overlap_moe_expert_parallel_comm": True},
        {"attention": "off", "dropout": "off"},
        "overlap_moe_expert_parallel_comm is on, .* would draw the same dropout masks",
    ),
    "deferred gradient of the embedding": (
        {"defer_embedding_wgrad_compute": True},
        {"loss": "off"},
        "defer_embedding_wgrad_compute is on",
    ),
    "fp8": ({**DROPS, "fp8": "hybrid"}, {"activation": "off", "norm": "off"}, "fp8 or fp4 is on, whose linears keep"),
    "fp8 attention": (
        {"fp8": "e4m3", "fp8_dot_product_attention": True},
        {"activation": "off", "norm": "off", "attention": "off"},
        "fp8 or fp4 is on, whose linears|fp8_dot_product_attention is on, and Tempo's attention computes in 16 bits",
    ),
    "autocast": ({"enable_autocast": True}, ALL_THAT_AUTO_TAKES, "autocast is on"),
}  # fmt: skip


def config_with(**settings: Any) -> TransformerConfig:
    """A small configuration in which the settings stand, also those that Megatron checks against a layout."""
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0
    )
    for name, value in settings.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(("settings", "lesser", "reason"), CASES.values(), ids=CASES)
def test_auto_takes_the_best_there_is_and_says_why_it_is_not_the_first(settings, lesser, reason):
    choices = choose(config_with(**settings), TempoConfig())
    assert choices.config == TempoConfig(**{**FIRST, **lesser})
    assert set(choices.reasons) == set(lesser)
    assert all(re.search(reason, found) and "tempo." not in found for found in choices.reasons.values()), (
        choices.reasons
    )
    # The same value, written, is an error of one sentence.
    for name, taken in lesser.items():
        with pytest.raises(ValueError, match=reason.rstrip("$")) as error:
            choose(config_with(**settings), TempoConfig(**{**EVERYTHING_OFF, name: FIRST[name]}))
        text = str(error.value)
        assert f'set tempo.{name} to "{taken}"' in text and text.count(";") == 1 and "\n" not in text, text


def test_a_written_value_is_taken_as_it_is_and_has_no_reason():
    written = TempoConfig(activation="recompute", norm="recompute", attention="softmax", dropout="off")
    choices = choose(config_with(), written)
    opt_in = dict.fromkeys(("linear_fc1", "linear_qkv", "moe_permute"), "off")
    assert choices.config == dataclasses.replace(written, loss="fused", **opt_in)
    assert choices.reasons == {}
    off = choose(config_with(fp8="hybrid"), TempoConfig.off())
    assert off.config.is_off and off.reasons == {} and off.describe() == "off (stock)"


def test_the_sentence_names_every_value_that_can_be_had_and_every_switch_it_concerns():
    with pytest.raises(ValueError, match='squared relu only; set tempo.activation to "recompute" or "off"$'):
        choose(config_with(**SWIGLU), TempoConfig(activation="inplace"))
    with pytest.raises(ValueError, match='same masks; set tempo.dropout and tempo.attention to "off"$'):
        choose(
            config_with(**DROPS, hybrid_context_parallel=True),
            TempoConfig(dropout="recompute", attention="softmax"),
        )
    with pytest.raises(ValueError, match='use bf16 or fp16 parameters, or set tempo.norm to "off"$'):
        choose(config_with(enable_autocast=True), TempoConfig(norm="inplace"))
    after_norm = config_with(apply_residual_connection_post_layernorm=True)
    with pytest.raises(ValueError, match='once more .*; set tempo.norm to "inplace" or "off"$'):
        choose(after_norm, TempoConfig(norm="recompute"))


def test_in_fp8_outputs_are_kept_if_they_are_asked_for_and_can_be_quantised_again():
    asked = TempoConfig(**{**EVERYTHING_OFF, "norm": "inplace"})
    assert choose(config_with(fp8="e4m3", fp8_recipe="blockwise"), asked).config.norm == "inplace"
    assert choose(config_with(fp8="e4m3", fp8_recipe="blockwise"), TempoConfig()).config.norm == "off"
    with pytest.raises(ValueError, match='"recompute" saves nothing, .*set tempo.norm to "inplace" or "off"'):
        choose(config_with(fp8="e4m3", fp8_recipe="mxfp8"), TempoConfig(**{**EVERYTHING_OFF, "norm": "recompute"}))
    with pytest.raises(ValueError, match='keeping outputs saves nothing; set tempo.norm to "off"'):
        choose(config_with(fp8="e4m3", fp8_recipe="delayed"), asked)


def test_in_fp8_nothing_is_refused_but_what_reckons_with_a_layers_linears():
    written = TempoConfig(activation="off", norm="off", dropout="recompute", attention="softmax", loss="fused")
    assert choose(config_with(**DROPS, fp8="hybrid"), written).reasons == {}
    for name in ("attention", "linear_fc1", "linear_qkv"):
        with pytest.raises(ValueError, match=f'fp8 or fp4 is on.*; set tempo.{name} to .*"off"$'):
            choose(config_with(fp8="hybrid"), TempoConfig(**{**EVERYTHING_OFF, name: "recompute"}))


def test_one_operation_is_chosen_whatever_the_others_ask_for():
    config = config_with(**SWIGLU)
    assert choose_operation("norm", config, TempoConfig(activation="inplace")) == "inplace"
    with pytest.raises(ValueError, match="activation is swiglu"):
        choose_operation("activation", config, TempoConfig(activation="inplace"))
    with pytest.raises(ValueError, match=r'activation is swiglu.*; set tempo.layers\["0"\].activation to'):
        choose_operation("activation", config, TempoConfig(activation="off", layers={"0": {"activation": "inplace"}}))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_row_of_the_table_is_built_named_and_computed(name: str) -> None:
    activation = ACTIVATIONS[name]
    shape = make_shape(
        num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, seq_length=4, activation=name
    )
    config = build_transformer_config(shape)
    value = "inplace" if activation.has_inplace else "recompute"
    assert name_activation(config) == name and choose(config, TempoConfig()).config.activation == value
    x = torch.linspace(-3, 3, 48).view(6, 8).requires_grad_()
    gate, up = x.chunk(2, -1) if activation.is_gated else (x, torch.ones(()))
    expected = FUNCTIONS[activation.formula](gate) * up
    (expected_grad,) = torch.autograd.grad(expected.sum(), x)
    for keep in (value, "recompute"):
        y = make_activation(config, keep)(x, None)
        torch.testing.assert_close(y, expected)
        # In place, GELU's derivative is that of an inverse: section "Error" of its docstring.
        tolerance = {"rtol": 0.0, "atol": 1e-4} if keep == "inplace" else {}
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected_grad, **tolerance)

"""Tempo in the specs of Megatron's layers: the model computes what stock does, and what cannot be had is refused."""

from __future__ import annotations

import copy
import inspect
import json
from unittest import mock

import pytest
import torch
from beside_stock import describe
from covering import exhaustive
from distributed import run_megatron_ranks
from gpt import RECOMPUTE, WRITTEN, assert_equal_to_stock, build_gpt, gpt_config, gradients, losses, run_schedule
from megatron.core.activations import squared_relu
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.nn import functional as F

from tempo_megatron import TempoConfig, tempo_block_spec, tempoize
from tempo_megatron.slots.attention import TempoDotProductAttention
from tempo_megatron.slots.choose import choose
from tempo_megatron.slots.mlp import TempoMLP
from tempo_megatron.slots.norm import TempoNorm, TorchNorm
from tempo_megatron.slots.report import report_on

AUTO, OFF = TempoConfig(), TempoConfig.off()
pytestmark = pytest.mark.usefixtures("one_rank")
MOE = {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True, "add_bias_linear": False}
NO_ATTENTION = {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}
GROUPS = {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False}
BLOCKS = [{"attention": GROUPS, "ffn": {"ffn_mult": 2.0}}, {"attention": NO_ATTENTION, "ffn": {"ffn_mult": 3.0}}]
HETEROGENEOUS = {
    "cls": HeterogeneousTransformerConfig,
    "heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": BLOCKS}),
}
SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True}
GEGLU = {"activation_func": F.gelu, "gated_linear_unit": True}
RMS_NORM, ZERO_CENTRED = {"normalization": "RMSNorm"}, {"layernorm_zero_centered_gamma": True}
# Megatron's settings, and Tempo's: each operation alone; settings, each beside one of the two forms; what "auto" takes
# less of; layers of several kinds. Recomputation and further layouts are compatibility.py's.
CASES = {
    "everything": ({}, AUTO),
    "activation": ({}, TempoConfig(norm="off", dropout="off", attention="off")),
    "norm": ({}, TempoConfig(activation="off", dropout="off", attention="off")),
    "attention": ({}, TempoConfig(activation="off", norm="off", dropout="off")),
    "recompute": ({}, RECOMPUTE),
    "the paper's attention": ({}, TempoConfig(attention="softmax")),
    "zero-centred gamma": (ZERO_CENTRED, AUTO),
    "tanh gelu": ({"bias_activation_fusion": True}, RECOMPUTE),
    "query-key layer scaling": ({"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}, AUTO),
    "grouped queries": ({"num_query_groups": 2}, RECOMPUTE),
    "no biases": ({"add_bias_linear": False}, AUTO),
    "query and key norms": ({"qk_layernorm": True}, RECOMPUTE),
    "swiglu": (SWIGLU, AUTO),
    "clamped swiglu": ({**SWIGLU, "activation_func_clamp_value": 0.01}, AUTO),
    "relu": ({"activation_func": F.relu}, AUTO),
    "residual after the norm": ({"apply_residual_connection_post_layernorm": True}, AUTO),
    "query and key norms without weights": ({"qk_l2_norm": True}, AUTO),
    "a dense layer, then experts": ({**MOE, "moe_layer_freq": [0, 1]}, AUTO),
    "experts, then a dense layer": ({**MOE, "moe_layer_freq": 2}, RECOMPUTE),
    "heterogeneous": (HETEROGENEOUS, AUTO),
    "heterogeneous, recompute": (HETEROGENEOUS, RECOMPUTE),
}
PARALLEL = {
    "everything": ({}, AUTO),
    "recompute": ({}, RECOMPUTE),
    "swiglu and RMSNorm": ({**SWIGLU, **RMS_NORM}, RECOMPUTE),
    "swiglu without biases": ({**SWIGLU, "add_bias_linear": False}, RECOMPUTE),
    "geglu": (GEGLU, RECOMPUTE),
    "fused geglu": ({**GEGLU, "bias_activation_fusion": True}, RECOMPUTE),
    "reglu": ({"activation_func": F.relu, "gated_linear_unit": True}, RECOMPUTE),
    "squared relu": ({"activation_func": squared_relu}, AUTO),
    "silu, recomputed": ({"activation_func": F.silu}, RECOMPUTE),
    "squared relu, recomputed": ({"activation_func": squared_relu}, RECOMPUTE),
    "RMSNorm": (RMS_NORM, AUTO),
    "zero-centred RMSNorm": ({**RMS_NORM, **ZERO_CENTRED}, AUTO),
}


def stock_spec(config):
    """Megatron's own where the configuration says which layers there are; None for one whose norms are torch's."""
    if isinstance(config, HeterogeneousTransformerConfig):
        return get_gpt_heterogeneous_layer_spec(config)
    if config.num_moe_experts or config.qk_l2_norm:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, qk_l2_norm=config.qk_l2_norm)
    return None


def train(settings, tempo_config, sequence_parallel):
    """Loss of four samples in two micro batches, gradients as they would be summed, and which layers have experts."""
    config = gpt_config(sequence_parallel=sequence_parallel, **settings)
    model = build_gpt(config, tempo_config, spec=stock_spec(config) if tempo_config.is_off else None)
    takes_mask = choose(model.config, tempo_config).config.attention == "off"
    found = run_schedule(model, lambda first: losses(model, first, 2, gives_mask=takes_mask), (0, 2))
    return (torch.stack(found).mean().item(), gradients(model)), [
        type(layer.mlp).__name__ == "MoELayer" for layer in model.decoder.layers
    ]


def train_all(cases, sequence_parallel):
    """Name -> ours and stock with the same settings."""
    stocks, found = {}, {}
    # Without Transformer Engine Megatron does not define what its router looks for.
    with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
        for name, (settings, tempo_config) in cases.items():
            key = repr(settings)
            if key not in stocks:
                stocks[key] = train(settings, OFF, sequence_parallel)
            found[name] = train(settings, tempo_config, sequence_parallel), stocks[key]
    return found


@pytest.mark.parametrize(
    ("cases", "ranks"),
    [(CASES, 1), (PARALLEL, 2), *exhaustive((PARALLEL, 1))],
    ids=["one rank", "two ranks", "settings of two ranks on one"],
)
def test_loss_and_every_gradient_equal_stock_without_dropout(cases, ranks):
    for found in run_megatron_ranks(train_all, ranks, ranks, cases, ranks > 1):
        for name, ((ours, has_experts), (stock, stock_has_experts)) in found.items():
            assert has_experts == stock_has_experts
            assert_equal_to_stock(ours, stock, name)


def test_checkpoint_keys_and_parameter_flags_equal_megatrons_and_a_checkpoint_of_one_loads_into_the_other():
    tempo, stock = build_gpt(gpt_config(), AUTO, 2), build_gpt(gpt_config(), OFF, 1)
    described, of_stock = describe(tempo), describe(stock)
    assert described == of_stock
    assert any("linear_qkv.layer_norm_weight" in key for key in described["sharded"].values())
    tempo.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(tempo.state_dict(), strict=True)
    found = [losses(model.eval(), 0, 2, gives_mask=model is stock).mean().item() for model in (tempo, stock)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (TempoMLP.__init__, MLP.__init__),
        (TempoMLP.forward, MLP.forward),
        (TempoDotProductAttention.forward, DotProductAttention.forward),
        (TempoNorm.__init__, WrappedTorchNorm.__new__),
    ],
    ids=["MLP", "MLP.forward", "DotProductAttention.forward", "norm"],
)
def test_positional_signatures_equal_megatrons(ours, theirs):
    def positional(function):
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds][1:]

    assert positional(ours)[: len(positional(theirs))] == positional(theirs)


def test_every_slot_is_filled_and_the_given_spec_stays_as_it_is():
    config, original = gpt_config(), get_gpt_layer_local_spec()
    before = copy.copy(original.submodules)
    tempoized, stock = tempoize(original, config, AUTO), tempo_block_spec(config, OFF)
    everything = {"norm": (5, 5), "attention": (2, 2), "dropout": (4, 4), "activation": (2, 2)}
    assert report_on(tempoized).counts == report_on(tempoize(tempoized, config, AUTO)).counts == everything
    assert report_on(stock).counts == {name: (0, total) for name, (_, total) in everything.items()}
    assert stock.layer_norm.__name__ == TorchNorm.__name__
    assert original.submodules == before
    keys = tempoized.layer_specs[0].submodules.sharded_state_dict_keys_map
    assert keys == before.sharded_state_dict_keys_map
    # Two layers, the second without attention and its norm and bias-dropout-add; and the final norm.
    counts = report_on(tempo_block_spec(gpt_config(**HETEROGENEOUS), AUTO)).counts
    assert counts == {"norm": (4, 4), "attention": (1, 1), "dropout": (3, 3), "activation": (2, 2)}


AGAIN = TempoConfig(linear_fc1="recompute", linear_qkv="recompute", attention="recompute")
FC1, QKV = TempoConfig(linear_fc1="recompute"), TempoConfig(attention="off", linear_qkv="recompute")
# Beside what tests/settings/test_choices.py has: settings, attributes that are set once Megatron has checked the
# configuration, Tempo's values, words of the refusal.
REFUSED = {
    "context parallelism, the paper's form": (
        {}, {"context_parallel_size": 2}, TempoConfig(attention="softmax"),
        'context_parallel_size is 2 and the form is softmax, .*set tempo.attention to "flash" or "recompute" or "off"',
    ),
    "recomputed layernorm": (
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, {}, WRITTEN,
        "recompute_modules holds layernorm.*NameError",
    ),
    "attention variant": (
        {}, {"experimental_attention_variant": "gated_delta_net"}, WRITTEN,
        "experimental_attention_variant is gated_delta_net; expected none",
    ),
    "delayed": (
        {}, {"delay_wgrad_compute": True}, AGAIN,
        "^delay_wgrad_compute is on, by which linears hold their inputs beyond backward, and Tempo does not run a "
        'linear again beside it; set tempo.linear_fc1 and tempo.linear_qkv to "off"$',
    ),
    "offloaded": ({}, {"cpu_offloading": True}, FC1, "^cpu_offloading is on, which moves what a layer keeps to the"),
    "latent": (
        {}, {"multi_latent_attention": True}, QKV,
        "^multi_latent_attention is on, and Tempo cannot recompute its projections",
    ),
    "grouped": (
        {}, {"num_query_groups": 2}, QKV,
        '^tempo.linear_qkv is "recompute" in a layer whose core attention is DotProductAttention, which may keep '
        r"copies of q, k and v; expected Tempo's attention, or one that Megatron recomputes \(core_attn\); set "
        'tempo.attention to "flash", or tempo.linear_qkv to "off"$',
    ),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "attributes", "tempo_config", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_at_the_start_with_the_remedy(settings, attributes, tempo_config, message):
    config = gpt_config(**settings)
    for attribute, value in attributes.items():
        setattr(config, attribute, value)
    with pytest.raises(ValueError, match=message):
        tempo_block_spec(config, tempo_config)


@pytest.mark.filterwarnings("ignore:The legacy GroupedMLP")
def test_a_spec_of_something_else_is_one_sentence():
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    config = gpt_config()
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    prediction = get_gpt_mtp_block_spec(gpt_config(mtp_num_layers=1), block, use_transformer_engine=False)
    for spec, name in (
        (mamba_stack_spec, mamba_stack_spec.module.__name__),  # newer Megatrons call it HybridStack
        (prediction.layer_specs[0], "MultiTokenPredictionLayer"),
        (None, "NoneType"),
        (block.layer_specs, "list"),
    ):
        with pytest.raises(ValueError, match=f"one of {name}; expected a spec of TransformerLayer") as refused:
            tempoize(spec, config, AUTO)
        assert str(refused.value).count(".") == 0


def test_masks_follow_seed_and_samples_which_training_has_to_say_and_evaluation_draws_none():
    model = build_gpt(gpt_config(dropout=0.5), AUTO)
    same, again, other = (losses(model, 0, 1, gives_mask=False, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(same, again) and not torch.equal(same, other)
    get_cuda_rng_tracker().reset()
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="set_micro_batch"):
        model(tokens, tokens, None, labels=tokens)
    model.eval()
    state = torch.get_rng_state()
    assert torch.equal(*(losses(model, 0, 2, gives_mask=False, seed=seed) for seed in (1, 2)))
    assert torch.equal(state, torch.get_rng_state())

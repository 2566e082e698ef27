from __future__ import annotations

import copy
import inspect
import itertools
import re

import pytest
import torch
from covering import exhaustive
from distributed import run_megatron_ranks
from gpt import RECOMPUTE, WRITTEN, assert_equal_to_stock, build_gpt, gpt_config, gradients, losses
from megatron.core.activations import squared_relu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.nn import functional as F

from tempo_megatron import TempoConfig, tempo_block_spec, tempoize
from tempo_megatron.slots.attention import TempoDotProductAttention
from tempo_megatron.slots.choose import choose
from tempo_megatron.slots.mlp import TempoMLP
from tempo_megatron.slots.norm import TempoLayerNorm, TorchLayerNorm
from tempo_megatron.slots.report import report_on

CONFIGS = {
    "everything": TempoConfig(),
    "activation": TempoConfig(norm="off", dropout="off", attention="off"),
    "norm": TempoConfig(activation="off", dropout="off", attention="off"),
    "attention": TempoConfig(activation="off", norm="off", dropout="off"),
    "recompute": RECOMPUTE,
    "the paper's attention": TempoConfig(attention="softmax"),
}


def loss_and_gradients(tempo_config, sequence_parallel, overrides):
    """Loss of four samples in two micro batches, and gradients as they would be summed, at dropout 0."""
    model = build_gpt(gpt_config(sequence_parallel=sequence_parallel, **overrides), tempo_config)
    total = 0.0
    takes_mask = choose(model.config, tempo_config).config.attention == "off"
    for first_sample in (0, 2):
        loss = losses(model, first_sample, 2, gives_mask=takes_mask).mean()
        (loss / 2).backward()
        total += loss.item() / 2
    return total, gradients(model)


def run_each(cases):
    return [loss_and_gradients(*case) for case in cases]


def assert_each_equals_stock(cases, ranks=1, sequence_parallel=False, stock=None):
    """Each (TempoConfig, Megatron's overrides), by name, beside stock with the same overrides, or with the
    (sequence_parallel, overrides) that are given; all in one process group."""
    ours = [(tempo_config, sequence_parallel, overrides) for tempo_config, overrides in cases.values()]
    stocks = [(TempoConfig.off(), *(stock or case[1:])) for case in ours]
    distinct = [each for place, each in enumerate(stocks) if each not in stocks[:place]]
    for found in run_megatron_ranks(run_each, ranks, ranks, [*ours, *distinct]):
        for name, of_case, of_stock in zip(cases, found[: len(ours)], stocks, strict=True):
            try:
                assert_equal_to_stock(of_case, found[len(ours) + distinct.index(of_stock)])
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def test_loss_and_every_gradient_equal_stock_without_dropout():
    assert_each_equals_stock({name: (tempo_config, {}) for name, tempo_config in CONFIGS.items()})


OVERRIDES = {
    "zero-centred gamma": {"layernorm_zero_centered_gamma": True},
    "tanh gelu": {"bias_activation_fusion": True},
    "query-key layer scaling": {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
    "grouped queries": {"num_query_groups": 2},
    "no biases": {"add_bias_linear": False},
    "query and key norms": {"qk_layernorm": True},
    "full recomputation": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "core attention recomputed": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}
BOTH = {"inplace": TempoConfig(), "recompute": RECOMPUTE}


@pytest.mark.parametrize("covers", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["covering", "all"])
def test_loss_and_every_gradient_equal_stock_under_megatrons_settings(covers):
    pairs = list(itertools.product(OVERRIDES, BOTH))
    pairs = [pair for place, pair in enumerate(pairs) if not covers or place % 4 in (0, 3)]  # each with one of BOTH
    assert_each_equals_stock({f"{name}, {form}": (BOTH[form], OVERRIDES[name]) for name, form in pairs})


MODELS = {
    "swiglu and RMSNorm": (
        {"activation_func": F.silu, "gated_linear_unit": True, "normalization": "RMSNorm"},
        RECOMPUTE,
    ),
    "swiglu without biases": (
        {"activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": False},
        RECOMPUTE,
    ),
    "geglu": ({"activation_func": F.gelu, "gated_linear_unit": True}, RECOMPUTE),
    "fused geglu": ({"activation_func": F.gelu, "gated_linear_unit": True, "bias_activation_fusion": True}, RECOMPUTE),
    "reglu": ({"activation_func": F.relu, "gated_linear_unit": True}, RECOMPUTE),
    "squared relu": ({"activation_func": squared_relu}, TempoConfig()),
    "silu, recomputed": ({"activation_func": F.silu}, RECOMPUTE),
    "squared relu, recomputed": ({"activation_func": squared_relu}, RECOMPUTE),
    "RMSNorm": ({"normalization": "RMSNorm"}, TempoConfig()),
    "zero-centred RMSNorm": ({"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True}, TempoConfig()),
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *exhaustive([1])], ids=["TP 2 + SP", "TP 1"])
def test_other_activations_and_norms_equal_stock(ranks):
    cases = {name: (tempo_config, overrides) for name, (overrides, tempo_config) in MODELS.items()}
    assert_each_equals_stock(cases, ranks, sequence_parallel=ranks > 1)


LESSER = {
    "swiglu": {"activation_func": F.silu, "gated_linear_unit": True},
    "clamped swiglu": {"activation_func": F.silu, "gated_linear_unit": True, "activation_func_clamp_value": 0.01},
    "relu": {"activation_func": F.relu},
    "residual after the norm": {"apply_residual_connection_post_layernorm": True},
}


def test_where_auto_takes_less_the_model_equals_stock():
    assert_each_equals_stock({name: (TempoConfig(), overrides) for name, overrides in LESSER.items()})


def test_a_recomputed_mlp_with_biases_gives_the_gradients_of_one_that_is_not():
    # Stock Megatron recurses without end here, so that its layer without recomputation is the reference.
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    assert_each_equals_stock({"a recomputed MLP": (TempoConfig(), recomputed)}, stock=(False, {}))


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["SP", "TP"])
def test_tensor_parallel_ranks_equal_stock_of_the_same_layout(sequence_parallel):
    cases = {name: (tempo_config, {}) for name, tempo_config in {**BOTH, "stock": TempoConfig.off()}.items()}
    assert_each_equals_stock(cases, 2, sequence_parallel, stock=(False, {}))


def keys_and_losses():
    found, models = {}, []
    for name, tempo_config, seed in (("tempo", TempoConfig(), 2), ("stock", TempoConfig.off(), 1)):
        models.append(build_gpt(gpt_config(), tempo_config, seed))
        state, parameters = models[-1].state_dict(), models[-1].named_parameters()
        found[name] = (
            {key: tuple(value.shape) for key, value in state.items() if value is not None},
            sorted(getattr(value, "key", key) for key, value in models[-1].sharded_state_dict().items()),
            [(key, getattr(parameter, "sequence_parallel", False)) for key, parameter in parameters],
        )
    tempo, stock = models
    tempo.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(tempo.state_dict(), strict=True)
    return found, [losses(m.eval(), 0, 2, gives_mask=m is stock).mean().item() for m in models]


def test_checkpoint_keys_and_parameter_flags_equal_megatrons_and_a_checkpoint_of_one_loads_into_the_other():
    ((found, (tempo, stock)),) = run_megatron_ranks(keys_and_losses, 1, 1)
    assert found["tempo"] == found["stock"]
    assert any("linear_qkv.layer_norm_weight" in key for key in found["tempo"][1])
    assert tempo == pytest.approx(stock, rel=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (TempoMLP.__init__, MLP.__init__),
        (TempoMLP.forward, MLP.forward),
        (TempoDotProductAttention.forward, DotProductAttention.forward),
        (TempoLayerNorm.__init__, WrappedTorchNorm.__new__),
    ],
    ids=["MLP", "MLP.forward", "DotProductAttention.forward", "norm"],
)
def test_positional_signatures_equal_megatrons(ours, theirs):
    def positional(function):
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds][1:]

    assert positional(ours)[: len(positional(theirs))] == positional(theirs)


def specs_with(**overrides):
    config = gpt_config(**overrides)
    original = get_gpt_layer_local_spec()
    before = copy.copy(original.submodules)
    tempoized = tempoize(original, config, TempoConfig())
    stock = tempo_block_spec(config, TempoConfig.off())
    return {
        "counts": report_on(tempoized).counts,
        "stock counts": report_on(stock).counts,
        "unchanged": original.submodules == before,
        "again": report_on(tempoize(tempoized, config, TempoConfig())).counts,
        "stock norm": stock.layer_norm.__name__,
        "key map": tempoized.layer_specs[0].submodules.sharded_state_dict_keys_map
        == original.submodules.sharded_state_dict_keys_map,
    }


def test_every_slot_is_filled_and_the_given_spec_stays_as_it_is():
    (found,) = run_megatron_ranks(specs_with, 1, 1)
    everything = {"norm": (5, 5), "attention": (2, 2), "dropout": (4, 4), "activation": (2, 2)}
    assert found["counts"] == found["again"] == everything
    assert found["stock counts"] == {name: (0, total) for name, (_, total) in everything.items()}
    assert found["unchanged"] and found["key map"]
    assert found["stock norm"] == TorchLayerNorm.__name__


def refusal(overrides):
    try:
        tempo_block_spec(gpt_config(**overrides), WRITTEN)
    except ValueError as error:
        return str(error)
    return "not refused"


REFUSED = {
    "swiglu": (
        {"activation_func": F.silu, "gated_linear_unit": True},
        'activation is swiglu, and in place exists for .*set tempo.activation to "recompute" or "off"',
    ),
    "relu": ({"activation_func": F.relu}, 'activation is relu, .*set tempo.activation to "off"'),
    "L2Norm": ({"normalization": "L2Norm"}, 'normalization is L2Norm.*set tempo.norm to "off"'),
    "autocast": ({"enable_autocast": True, "autocast_dtype": torch.bfloat16}, "autocast is on"),
}


def refusals():
    found = {}
    for name, (overrides, _) in REFUSED.items():
        with pytest.raises(ValueError) as refused:
            tempo_block_spec(gpt_config(**overrides), WRITTEN)
        found[name] = str(refused.value)
    return found


def test_what_an_operation_cannot_do_is_refused_with_the_remedy():
    (found,) = run_megatron_ranks(refusals, 1, 1)
    for name, (_, message) in REFUSED.items():
        assert re.search(message, found[name]), found[name]


def draws():
    """Whether evaluation draws nothing, the same seed and sample the same masks and another seed others; a refusal."""
    model = build_gpt(gpt_config(dropout=0.5), TempoConfig())
    same, again, other = (losses(model, 0, 1, gives_mask=False, seed=seed) for seed in (1, 1, 2))
    get_cuda_rng_tracker().reset()
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    with pytest.raises(RuntimeError) as refused:
        model(tokens, tokens, None, labels=tokens)
    model.eval()
    state = torch.get_rng_state()
    found = [losses(model, 0, 2, gives_mask=False, seed=seed) for seed in (1, 2)]
    draws_nothing = torch.equal(*found) and torch.equal(state, torch.get_rng_state())
    return draws_nothing, torch.equal(same, again), torch.equal(same, other), str(refused.value)


def test_masks_follow_seed_and_samples_which_training_has_to_say_and_evaluation_draws_none():
    ((draws_nothing, are_same, others_are_same, refused),) = run_megatron_ranks(draws, 1, 1)
    assert draws_nothing and are_same and not others_are_same and "set_micro_batch" in refused

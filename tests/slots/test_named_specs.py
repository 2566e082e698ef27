from __future__ import annotations

import functools
import types

import pytest
import torch
from distributed import run_megatron_ranks
from gpt import SEQ_LENGTH, VOCAB_SIZE, assert_equal_to_stock, build_gpt, gpt_config, gradients, losses
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import import_module
from torch.nn import functional as F

from tempo_megatron import TempoConfig, tempoize
from tempo_megatron.slots import named_specs
from tempo_megatron.slots.mlp import TempoMLP, TempoRecomputeMLP
from tempo_megatron.slots.norm import TempoLayerNorm, TempoRMSNorm
from tempo_megatron.slots.report import report_on

MODULE = "tempo_megatron.slots.named_specs"
SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True, "normalization": "RMSNorm", "qk_layernorm": True}


def as_gpt_builder_does(config, name):
    """As `--spec MODULE NAME`: before 0.19 the object itself, since then a function that is called first."""
    spec = import_module((MODULE, name))
    if callable(spec) and name != "tempo_layer":
        spec = spec(types.SimpleNamespace(transformer=config), vp_stage=None)
    return spec


def loss_and_gradients(name, overrides):
    config = gpt_config(**overrides)
    if name is None:
        model = build_gpt(config, TempoConfig.off())
    else:
        torch.manual_seed(7)
        model = GPTModel(config, as_gpt_builder_does(config, name), VOCAB_SIZE, SEQ_LENGTH).train()
    loss = losses(model, 0, 2, gives_mask=name is None).mean()
    loss.backward()
    layer = model.decoder.layers[1]
    found = [type(layer.mlp), type(layer.input_layernorm), type(model.decoder.final_layernorm)]
    return (loss.item(), gradients(model)), found, sorted(model.state_dict()), sorted(model.sharded_state_dict())


@pytest.mark.parametrize("name", ["tempo_layer", "tempo_block"])
def test_a_named_spec_is_stock_with_tempo_in_its_slots(name):
    ((found, classes, keys, sharded),) = run_megatron_ranks(loss_and_gradients, 1, 1, name, {})
    ((stock, _, stock_keys, stock_sharded),) = run_megatron_ranks(loss_and_gradients, 1, 1, None, {})
    assert_equal_to_stock(found, stock)
    assert (keys, sharded) == (stock_keys, stock_sharded)
    assert classes[:2] == [TempoMLP, TempoLayerNorm]
    assert (classes[2] is TempoLayerNorm) is (name == "tempo_block")


def test_a_named_function_knows_the_configuration():
    ((found, classes, *_),) = run_megatron_ranks(loss_and_gradients, 1, 1, "tempo_block", SWIGLU)
    ((stock, *_),) = run_megatron_ranks(loss_and_gradients, 1, 1, None, SWIGLU)
    assert_equal_to_stock(found, stock)
    assert classes[0] is TempoRecomputeMLP and classes[1] is TempoRMSNorm


def spec_of_each_kind(tempo_config):
    config = gpt_config()
    layer = named_specs.make_layer_spec(tempo_config)
    torch.manual_seed(7)
    model = GPTModel(config, layer, VOCAB_SIZE, SEQ_LENGTH)
    # Megatron-Bridge and NeMo call it with their model configuration, which is a TransformerConfig.
    block = functools.partial(named_specs.tempo_block, tempo_config=tempo_config)(config)
    return type(model.decoder.layers[0].mlp), block.layer_specs[0].submodules.mlp.module, len(block.layer_specs)


def test_a_spec_of_ones_own_takes_a_configuration_of_tempos():
    (found,) = run_megatron_ranks(spec_of_each_kind, 1, 1, TempoConfig(activation="recompute"))
    assert found == (TempoRecomputeMLP, TempoRecomputeMLP, 2)


def what_draws(tempo_config):
    try:
        block = named_specs.tempo_block(gpt_config(dropout=0.1), tempo_config=tempo_config)
    except ValueError as error:
        return str(error)
    return report_on(block).counts


def test_what_draws_masks_stays_stock_or_is_refused_as_nobody_tells_the_samples():
    (found,) = run_megatron_ranks(what_draws, 1, 1, TempoConfig())
    assert found["dropout"] == (0, 4) and found["attention"] == (0, 2) and found["activation"] == (2, 2)
    (refused,) = run_megatron_ranks(what_draws, 1, 1, TempoConfig(dropout="recompute"))
    assert refused.startswith(
        "hidden_dropout is 0.1, and a spec cannot tell Tempo which samples a micro batch holds; start the run with"
    )


def report_of_layers_that_choose():
    config = gpt_config(dropout=0.1)
    model = GPTModel(config, named_specs.tempo_layer, VOCAB_SIZE, SEQ_LENGTH)
    with pytest.raises(ValueError) as refused:
        tempoize(named_specs.tempo_layer, config, TempoConfig(norm="off"))
    return report_on(model), str(refused.value)


def test_layers_that_choose_are_reported_as_built_and_take_no_second_choice():
    ((report, refused),) = run_megatron_ranks(report_of_layers_that_choose, 1, 1)
    # The final norm, the embedding and what draws masks are Megatron's.
    counts = {"activation": (2, 2), "norm": (4, 5), "dropout": (0, 5), "attention": (0, 2), "loss": (0, 1)}
    assert report.counts == counts
    why = "auto: attention_dropout is 0.1, and a spec cannot tell Tempo which samples a micro batch holds"
    assert f"attention in decoder.layers.0-1 (self_attention.core_attention): {why}" in report.describe_left()
    assert refused.startswith(
        "the spec is one of TempoTransformerLayer, whose layers choose Tempo's modules by themselves"
    )

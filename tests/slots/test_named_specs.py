from __future__ import annotations

import functools
import types

import pytest
from gpt import SEQ_LENGTH, VOCAB_SIZE, assert_equal_to_stock, build_gpt, differentiate, gpt_config, losses
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import import_module
from torch.nn import functional as F

from tempo_megatron import TempoConfig, tempoize
from tempo_megatron.slots import named_specs
from tempo_megatron.slots.mlp import TempoMLP, TempoRecomputeMLP
from tempo_megatron.slots.norm import TempoNorm
from tempo_megatron.slots.report import report_on

pytestmark = pytest.mark.usefixtures("one_rank")
OFF = TempoConfig.off()
MODULE = "tempo_megatron.slots.named_specs"
SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True, "normalization": "RMSNorm", "qk_layernorm": True}


def as_gpt_builder_does(config, name):
    """As `--spec MODULE NAME`: before 0.19 the object itself, since then a function that is called first."""
    spec = import_module((MODULE, name))
    if callable(spec) and name != "tempo_layer":
        spec = spec(types.SimpleNamespace(transformer=config), vp_stage=None)
    return spec


def train(name, **settings):
    """(loss, gradients), a layer's MLP and norm and whether the final norm is as that, and the keys of checkpoints."""
    config = gpt_config(**settings)
    spec = None if name is None else as_gpt_builder_does(config, name)
    model = build_gpt(config, OFF, spec=spec)
    result = differentiate(model, losses(model, 0, 2, gives_mask=name is None).mean())
    layer = model.decoder.layers[1]
    norm = type(layer.input_layernorm)
    classes = [type(layer.mlp), norm, type(model.decoder.final_layernorm) is norm]
    return result, classes, [sorted(model.state_dict()), sorted(model.sharded_state_dict())]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("tempo_layer", {}, [TempoMLP, TempoNorm, False]),
        ("tempo_block", {}, [TempoMLP, TempoNorm, True]),
        # A function knows the configuration.
        ("tempo_block", SWIGLU, [TempoRecomputeMLP, TempoNorm, True]),
    ],
    ids=["layer", "block", "block of a Llama"],
)
def test_a_named_spec_is_stock_with_tempo_in_its_slots(name, settings, expected):
    (found, classes, keys), (stock, _, stock_keys) = train(name, **settings), train(None, **settings)
    assert_equal_to_stock(found, stock)
    assert keys == stock_keys
    assert classes == expected


def test_a_spec_of_ones_own_takes_a_configuration_of_tempos():
    config, tempo_config = gpt_config(), TempoConfig(activation="recompute")
    model = GPTModel(config, named_specs.make_layer_spec(tempo_config), VOCAB_SIZE, SEQ_LENGTH)
    assert type(model.decoder.layers[0].mlp) is TempoRecomputeMLP
    # Megatron-Bridge and NeMo call it with their model configuration, which is a TransformerConfig.
    block = functools.partial(named_specs.tempo_block, tempo_config=tempo_config)(config)
    assert block.layer_specs[0].submodules.mlp.module is TempoRecomputeMLP and len(block.layer_specs) == 2


def test_what_draws_masks_stays_stock_or_is_refused_as_nobody_tells_the_samples():
    config = gpt_config(dropout=0.1)
    found = report_on(named_specs.tempo_block(config, tempo_config=TempoConfig())).counts
    assert found["dropout"] == (0, 4) and found["attention"] == (0, 2) and found["activation"] == (2, 2)
    reason = "hidden_dropout is 0.1, and a spec cannot tell Tempo which samples a micro batch holds; start the run with"
    with pytest.raises(ValueError, match=reason):
        named_specs.tempo_block(config, tempo_config=TempoConfig(dropout="recompute"))


def test_layers_that_choose_are_reported_as_built_and_take_no_second_choice():
    config = gpt_config(dropout=0.1)
    report = report_on(GPTModel(config, named_specs.tempo_layer, VOCAB_SIZE, SEQ_LENGTH))
    # The final norm, the embedding and what draws masks are Megatron's.
    counts = {"activation": (2, 2), "norm": (4, 5), "dropout": (0, 5), "attention": (0, 2), "loss": (0, 1)}
    assert report.counts == counts
    why = "auto: attention_dropout is 0.1, and a spec cannot tell Tempo which samples a micro batch holds"
    assert f"attention in decoder.layers.0-1 (self_attention.core_attention): {why}" in report.describe_left()
    with pytest.raises(
        ValueError,
        match="the spec is one of TempoTransformerLayer, whose layers choose Tempo's modules by themselves",
    ):
        tempoize(named_specs.tempo_layer, config, TempoConfig(norm="off"))

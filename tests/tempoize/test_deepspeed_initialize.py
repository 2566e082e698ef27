"""tempo_megatron.initialize: the "tempo" block of a DeepSpeed configuration, for any PyTorch model."""

from __future__ import annotations

import json
import types

import pytest
from torch import nn
from torch_models import build

from tempo_torch import report_on


@pytest.fixture
def initialize(monkeypatch):
    """`initialize` with a deepspeed that only remembers what it was called with."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    import tempo_megatron
    from tempo_megatron import deepspeed_initialize

    assert tempo_megatron.initialize is deepspeed_initialize.initialize and "initialize" in tempo_megatron.__all__
    stand_in = types.SimpleNamespace(initialize=lambda *args, **kwargs: (args, kwargs))
    monkeypatch.setattr(deepspeed_initialize, "deepspeed", stand_in)
    return deepspeed_initialize.initialize


NEARLY = ("tempo_config", "Tempo", "temppo")
BLOCK = {"seed": 3, "norm": "recompute", "attention": "off", "loss": "off"}


@pytest.mark.parametrize("form", ["dictionary", "file", "argument"])
def test_a_block_is_honoured_and_everything_is_handed_on(initialize, form, tmp_path):
    config = {"train_micro_batch_size_per_gpu": 1, "tempo": BLOCK}
    path, model, args, given = tmp_path / "config.json", build(), None, config
    path.write_text(json.dumps(config))
    if form == "file":
        given = str(path)
    if form == "argument":
        args, given = types.SimpleNamespace(deepspeed_config=str(path)), None
    found = initialize(args, model, config=given, dist_init_required=False)
    assert found == ((args, model), {"config": given, "dist_init_required": False})
    assert {entry.now for entry in report_on(model).replaced if entry.operation == "norm"} == {"recompute"}


@pytest.mark.parametrize("config", [{}, {"tempo": {"enabled": False, "norm": "inplace"}}, None])
def test_without_an_enabled_block_the_model_stays(initialize, config):
    model = build()
    initialize(model=model, config=config)
    assert type(model.norm) is nn.LayerNorm


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ({"norms": "auto"}, "tempo.norms is not known for a PyTorch model; expected norm; correct or remove it"),
        ({"enabled": 1}, "tempo.enabled is 1; expected true or false"),
        ({"norm": "fast"}, "norm is 'fast'; expected one of"),
        ("auto", '"tempo" is \'auto\'; expected a block such as {"activation": "auto"}'),
        *((name, f'"{name}" is unknown, and Tempo would stay off; expected "tempo"') for name in NEARLY),
    ],
)
def test_what_is_wrong_in_a_block_or_nearly_its_name_is_one_sentence(initialize, block, sentence):
    config = {"train_micro_batch_size_per_gpu": 1, **({block: BLOCK} if block in NEARLY else {"tempo": block})}
    with pytest.raises(ValueError) as raised:
        initialize(model=build(), config=config)
    assert str(raised.value).startswith(sentence)


def test_a_file_that_is_not_json_is_named(initialize, tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON \(.*\); correct it or give another file"):
        initialize(model=build(), config=str(tmp_path / "config.json"))


def test_a_megatron_model_that_tempo_did_not_build_is_refused(initialize):
    layer = type("Layer", (nn.Module,), {"__module__": "megatron.core.layer"})()
    with pytest.raises(ValueError, match="Sequential is made of Megatron-core's modules"):
        initialize(model=nn.Sequential(layer), config={"tempo": {}})

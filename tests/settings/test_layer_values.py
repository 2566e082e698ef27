"""`"layers"` of a "tempo" block: which ranges there are, what is refused, and that JSON and pickle bring it back."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from tempo_megatron import TempoConfig, add_tempo_arguments
from tempo_megatron.settings.arguments import describe_tempo_arguments, tempo_config_from
from tempo_megatron.slots.choose import Refusal, choose

BLOCK = {
    "activation": "inplace",
    "layers": {
        "20-": {"dropout": "off"},
        "12": {"norm": "off"},
        "0-11": {"attention": "off", "activation": "recompute"},
    },
}
SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True}


def config_with(**settings: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=24, hidden_size=32, num_attention_heads=4, **settings)


def test_a_layer_has_the_values_of_its_range_and_else_those_of_all() -> None:
    config = TempoConfig.from_dict(BLOCK)
    first = TempoConfig(activation="recompute", attention="off")
    assert config.for_layer(0) == config.for_layer(11) == config.for_layer(3, "encoder") == first
    assert config.for_layer(12) == TempoConfig(activation="inplace", norm="off")
    assert config.for_layer(13) == config.for_layer(19) == TempoConfig(activation="inplace")
    assert config.for_layer(20) == config.for_layer(999) == TempoConfig(activation="inplace", dropout="off")


def test_a_stack_of_a_t5_may_have_ranges_of_its_own() -> None:
    config = TempoConfig(layers={"encoder 0-3": {"norm": "off"}, "decoder 2-": {"norm": "recompute"}})
    assert [config.for_layer(2, stack).norm for stack in ("encoder", "decoder")] == ["off", "recompute"]
    assert [config.for_layer(9, stack).norm for stack in ("encoder", "decoder")] == ["auto", "recompute"]


def test_it_goes_through_json_pickle_copy_and_hash_and_cannot_be_changed() -> None:
    config = TempoConfig.from_dict(BLOCK)
    written = json.loads(json.dumps(dataclasses.asdict(config)))
    assert written["layers"] == BLOCK["layers"]
    for again in (TempoConfig.from_dict(written), pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert again == config and hash(again) == hash(config)
        assert list(again.layers) == ["0-11", "12", "20-"]
    assert config != TempoConfig(activation="inplace") and len({config, TempoConfig.from_dict(BLOCK)}) == 1
    for change in (lambda: config.layers.update(a=1), lambda: config.layers["12"].pop("norm")):  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="cannot be changed"):
            change()


def test_a_layer_that_is_not_off_is_seen() -> None:
    off = TempoConfig.off()
    assert dataclasses.replace(off, layers={"0-3": {"norm": "off"}}).is_off
    assert not dataclasses.replace(off, layers={"3": {"norm": "auto"}}).is_off
    assert TempoConfig.from_dict({**BLOCK, "enabled": False}) == off


REFUSED: dict[str, tuple[Any, str]] = {
    "not a block": (3, 'tempo.layers is 3; expected ranges of layers with their values, such as {"0-11": '),
    "not a range": (
        {"all": {}},
        "tempo.layers has the key 'all'; expected a layer or a range of layers, counted",
    ),
    "no beginning": ({"-3": {}}, "tempo.layers has the key '-3'; expected"),
    "a number": ({12: {}}, "tempo.layers has the key 12; expected"),
    "another stack": ({"vision 0": {}}, "tempo.layers has the key 'vision 0'; expected"),
    "reversed": ({"5-2": {}}, 'tempo.layers["5-2"] ends before it begins; write the smaller number first'),
    "overlap": (
        {"0-5": {}, "3": {}},
        'tempo.layers["0-5"] and tempo.layers["3"] both hold layer 3; expected each',
    ),
    "overlap of open ranges": ({"4-": {}, "9-": {}}, "both hold layer 9"),
    "overlap of both stacks and one": ({"0-": {}, "encoder 1": {}}, '["0-"] and tempo.layers["encoder 1"] both'),
    "twice": ({"3": {}, "3-3": {}}, "tempo.layers names a range twice, in two spellings; leave one out"),
    "values": ({"0": "off"}, "tempo.layers[\"0\"] is 'off'; expected a block such as"),
    "loss": ({"0": {"loss": "off"}}, 'tempo.layers["0"].loss is given; expected what a layer has, activation, norm, '),
    "enabled": ({"0": {"enabled": False}}, 'tempo.layers["0"].enabled is given; expected operations; set'),
    "unknown": ({"0": {"nrm": "off"}}, '.nrm is unknown; the nearest known name is tempo.layers["0"].norm'),
    "choice": ({"0": {"norm": "flash"}}, "tempo.layers[\"0\"].norm is 'flash'; it must be one of 'auto', 'off', "),
    "type of a choice": ({"0": {"norm": ["off"]}}, "tempo.layers[\"0\"].norm is ['off']; it must be one of"),
}


@pytest.mark.parametrize(("layers", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_range_of_layers_is_refused_in_one_sentence(layers: Any, message: str) -> None:
    for make in (lambda: TempoConfig(layers=layers), lambda: TempoConfig.from_dict({"layers": layers})):
        with pytest.raises(ValueError) as error:
            make()
        assert message in str(error.value) and "\n" not in str(error.value)


def test_layers_that_a_model_does_not_have_are_refused() -> None:
    config = TempoConfig(layers={"0-11": {"norm": "off"}, "encoder 12-15": {"norm": "off"}})
    config.check_layers("decoder", 12)
    with pytest.raises(ValueError, match=r'tempo.layers\["encoder 12-15"\] goes beyond the encoder\'s 12 layers'):
        config.check_layers("encoder", 12)
    with pytest.raises(ValueError, match='a GPTModel has no encoder; expected layers of its decoder; write "12-15"'):
        config.check_stacks(("decoder",), "GPTModel")
    config.check_stacks(("encoder", "decoder"), "T5Model")
    with pytest.raises(ValueError, match=r'\["4-"\] goes beyond the decoder\'s 4 layers; expected layers from 0 to 3'):
        TempoConfig(layers={"4-": {}}).check_layers("decoder", 4)


def test_auto_in_a_layer_becomes_what_it_becomes_everywhere() -> None:
    written = TempoConfig(activation="off", layers={"0-3": {"activation": "auto"}, "4": {"norm": "auto"}})
    choices = choose(config_with(**SWIGLU), written)
    assert choices.config.layers == {"0-3": {"activation": "recompute"}, "4": {"norm": "inplace"}}
    assert choices.config.activation == "off" and choices.written == written
    assert "activation is swiglu" in choices.reasons["activation"]
    assert choices.describe() == (
        "activation=off norm=inplace dropout=recompute attention=flash loss=fused layers 0-3: activation=recompute, "
        f"4: norm=inplace (auto of activation: {choices.reasons['activation']})"
    )


def test_a_written_value_of_a_layer_that_cannot_be_had_is_refused_by_its_range() -> None:
    config = config_with(**SWIGLU)
    written = TempoConfig(layers={"0-3": {"activation": "recompute"}, "4-": {"activation": "inplace"}})
    with pytest.raises(ValueError, match=r'only; set tempo.layers\["4-"\].activation to "recompute" or "off"$'):
        choose(config, written)
    with pytest.raises(ValueError, match=r'set tempo.activation and tempo.layers\["4-"\].activation to "recompute" or'):
        choose(config, dataclasses.replace(written, activation="inplace"))
    with pytest.raises(ValueError, match=r'so; wait, or set tempo.layers\["4-"\].activation to "off"$'):
        choose(
            config_with(),
            dataclasses.replace(written, layers={"4-": {"activation": "inplace"}}),
            {"activation": Refusal("so", "wait")},
        )
    in_one = TempoConfig(norm="off", layers={"1": {"norm": "auto"}})
    choices = choose(config_with(), in_one, {"norm": Refusal("so", "wait")})
    assert choices.config.layers == {"1": {"norm": "off"}} and choices.reasons == {"norm": "so"}
    useless = {"norm": Refusal("so", is_for_auto=True)}
    assert choose(config_with(), in_one, useless).reasons == {"norm": "so"}
    assert choose(config_with(), dataclasses.replace(in_one, layers={"1": {"norm": "inplace"}}), useless).reasons == {}


def test_the_argument_takes_the_place_of_the_blocks_layers(capsys: pytest.CaptureFixture[str]) -> None:
    parser = add_tempo_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--use-tempo", "--tempo-layers", '{"0-1": {"norm": "off"}}'])
    assert tempo_config_from(args, {"tempo": BLOCK}) == TempoConfig(
        activation="inplace", layers={"0-1": {"norm": "off"}}
    )
    assert describe_tempo_arguments(args) == """--use-tempo --tempo-layers '{"0-1": {"norm": "off"}}'"""
    assert tempo_config_from(parser.parse_args([]), {"tempo": BLOCK}) == TempoConfig.from_dict(BLOCK)
    with pytest.raises(ValueError, match="--tempo-layers is given but Tempo is off"):
        tempo_config_from(parser.parse_args(["--tempo-layers", '{"0": {}}']), {})
    for text, message in (("{", "is not valid JSON"), ('{"2-1": {}}', "ends before it begins")):
        with pytest.raises(SystemExit):
            parser.parse_args(["--tempo-layers", text])
        assert message in capsys.readouterr().err


def test_layers_in_a_row_are_those_of_a_model_of_their_own() -> None:
    config = TempoConfig(
        norm="off", layers={"1-3": {"norm": "inplace"}, "4": {"norm": "off"}, "6-": {"dropout": "off"}}
    )
    part = config.for_layers(range(2, 8), ("decoder",))
    assert part.layers == {"0-1": {"norm": "inplace"}, "4-5": {"dropout": "off"}}
    assert [part.for_layer(i) for i in range(6)] == [config.for_layer(i) for i in range(2, 8)]
    # Equal chunks are equal, however they are written.
    assert config.for_layers(range(1, 3), ("decoder",)) == config.for_layers(range(2, 4), ("encoder",))
    both = TempoConfig(layers={"encoder 1": {"norm": "off"}, "decoder 0": {"norm": "off"}})
    split = both.for_layers(range(2), ("encoder", "decoder"))
    assert split.layers == {"decoder 0": {"norm": "off"}, "encoder 1": {"norm": "off"}}

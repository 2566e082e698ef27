from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest

from tempo_megatron import TempoConfig, add_tempo_arguments
from tempo_megatron.settings.arguments import tempo_config_from
from tempo_megatron.settings.operations import LEDGER_ROWS, OPERATIONS

CONFIGS = Path(__file__).parents[2] / "configs"


def parsed(*argv):
    return add_tempo_arguments(argparse.ArgumentParser()).parse_args(argv)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"activaton": "off"}, r"tempo\.activaton is unknown; .* known name is tempo\.activation"),
        (
            {"activation": "flash"},
            "activation is 'flash'; it must be one of 'auto', 'off', 'inplace', 'recompute'",
        ),
        ({"norm": True}, "tempo.norm is True"),
        ({"enabled": "yes"}, "tempo.enabled is 'yes'; it must be true or false"),
        ("on", "\"tempo\" is 'on'"),
        ({"check": "on"}, "tempo.check is 'on'; it must be one of 'auto', 'off'"),
    ],
    ids=["name", "choice", "type", "enabled", "block", "check"],
)
def test_a_value_that_does_not_exist_is_refused(block, message):
    with pytest.raises(ValueError, match=message):
        TempoConfig.from_dict(block)


def test_choices_are_checked_without_a_file_too():
    with pytest.raises(ValueError, match="tempo.attention is 'fast'"):
        TempoConfig(attention="fast")


@pytest.mark.parametrize("path", sorted((CONFIGS / "deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_deepspeed_file_has_a_block_that_reads(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    assert TempoConfig.from_file(path).is_off
    taken = [name for name, operation in OPERATIONS.items() if not operation.is_opt_in]
    assert content["tempo"] == {"enabled": False, **dict.fromkeys(taken, "auto")}
    assert TempoConfig.from_dict({**content["tempo"], "enabled": True}) == TempoConfig()


def test_a_bare_block_reads_and_other_files_are_refused(tmp_path):
    path = tmp_path / "tempo.json"
    path.write_text('{"activation": "off"}')
    assert TempoConfig.from_file(path) == TempoConfig(activation="off")
    for text, message in (
        ('{"zero_optimization": {}}', 'no "tempo" block'),
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"activation": "off", "nrm": "off"}', r"tempo\.nrm is unknown; the nearest known name is tempo\.norm"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            TempoConfig.from_file(path)


@pytest.mark.parametrize(
    ("argv", "block", "expected"),
    [
        ([], None, TempoConfig.off()),
        (["--use-tempo"], None, TempoConfig()),
        (["--use-tempo"], {"enabled": False, "activation": "off"}, TempoConfig(activation="off")),
        ([], {"activation": "off"}, TempoConfig(activation="off")),
        ([], {"enabled": False}, TempoConfig.off()),
        (["--no-use-tempo"], {"enabled": True}, TempoConfig.off()),
        (
            ["--use-tempo", "--tempo-activation", "inplace"],
            {"activation": "off", "norm": "off"},
            TempoConfig(activation="inplace", norm="off"),
        ),
        (["--tempo-activation", "auto"], {"activation": "off", "norm": "auto"}, TempoConfig()),
        (["--tempo-norm", "off"], {"enabled": True}, TempoConfig(norm="off")),
        (["--tempo-check", "off"], {"check": "auto"}, TempoConfig(check="off")),
    ],
)
def test_the_argument_wins_over_the_block_field_by_field(argv, block, expected):
    config = {} if block is None else {"tempo": block}
    assert tempo_config_from(parsed(*argv), config) == expected


def test_auto_is_the_value_of_every_field_and_is_not_off():
    others = {"offload": "off", "check": "auto", "layers": {}}
    assert dataclasses.asdict(TempoConfig()) == {**dict.fromkeys(OPERATIONS, "auto"), **others}
    assert TempoConfig.from_dict({}) == TempoConfig.from_dict(dict.fromkeys(OPERATIONS, "auto")) == TempoConfig()
    assert not TempoConfig().is_off and not TempoConfig(**{**dict.fromkeys(OPERATIONS, "off"), "norm": "auto"}).is_off
    assert TempoConfig(norm="off").describe() == "activation=auto norm=off dropout=auto attention=auto loss=auto"
    for operation in OPERATIONS.values():
        assert operation.preference[-1] == "off"
        assert {"auto", *operation.preference} <= set(operation.choices)


def test_an_operation_asked_for_while_tempo_is_off_is_refused():
    with pytest.raises(ValueError, match="--tempo-activation is given but Tempo is off"):
        tempo_config_from(parsed("--tempo-activation", "inplace"), {})
    with pytest.raises(ValueError, match="--tempo-norm is given but Tempo is off"):
        tempo_config_from(parsed("--no-use-tempo", "--tempo-norm", "off"), {"tempo": {}})


def test_the_table_of_operations_names_every_switch_and_no_other() -> None:
    assert [field.name for field in dataclasses.fields(TempoConfig)] == [*OPERATIONS, "offload", "check", "layers"]
    assert {row.operation for row in LEDGER_ROWS} - {None} == set(OPERATIONS)
    assert len({(row.module, row.is_scores) for row in LEDGER_ROWS}) == len(LEDGER_ROWS)


@pytest.mark.parametrize("where", ["field", "layer", "argument"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mlp.linear_fc3", r'offload has .mlp.linear_fc3.; expected .*; the nearest known name is "mlp.linear_fc2"'),
        ("", "offload has ''; expected"),
        ("mlp+mlp", "names a row twice"),
    ],
)
def test_a_row_that_no_layer_has_is_not_offloaded(where, value, message, capsys):
    if where == "argument":
        parser = add_tempo_arguments(argparse.ArgumentParser())
        with pytest.raises(SystemExit):
            parser.parse_args(["--tempo-offload", value])
        assert re.search(message, capsys.readouterr().err)
        return
    block = {"offload": value} if where == "field" else {"layers": {"3-": {"offload": value}}}
    with pytest.raises(ValueError, match=message):
        TempoConfig.from_dict(block)


def test_offload_alone_is_not_off_and_is_a_layers_own():
    config = TempoConfig.from_dict({"offload": "all", "layers": {"2-": {"offload": "off"}, "1": {"offload": "input"}}})
    assert [config.for_layer(layer).offload for layer in range(4)] == ["all", "input", "off", "off"]
    assert config.describe().endswith("loss=auto offload=all layers 1: offload=input, 2-: offload=off")
    off = dataclasses.replace(TempoConfig.off(), layers={"0": {"offload": "mlp+layer"}})
    assert off.offloads and not off.is_off and TempoConfig.off().is_off
    assert off.fill_auto({}) == off and off.for_layers(range(1), ("decoder",)).layers == off.layers

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tempo_megatron import TempoConfig, add_tempo_arguments
from tempo_megatron.arguments import tempo_config_from

CONFIGS = Path(__file__).parent.parent / "configs"


def parsed(*argv):
    return add_tempo_arguments(argparse.ArgumentParser()).parse_args(argv)


def test_an_unknown_key_names_the_nearest_known_one():
    with pytest.raises(ValueError, match=r"tempo\.gleu is unknown; the nearest known name is tempo\.gelu"):
        TempoConfig.from_dict({"gleu": "inplace"})


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"gelu": "flash"}, r"tempo.gelu is 'flash'; it must be one of 'off', 'inplace', 'recompute'"),
        ({"norm": True}, "tempo.norm is True"),
        ({"enabled": "yes"}, "tempo.enabled is 'yes'; it must be true or false"),
        ("on", "\"tempo\" is 'on'"),
    ],
    ids=["choice", "type", "enabled", "block"],
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
    assert TempoConfig.from_dict({**content["tempo"], "enabled": True}) == TempoConfig()


def test_a_bare_block_reads_and_other_files_are_refused(tmp_path):
    path = tmp_path / "tempo.json"
    path.write_text('{"gelu": "off"}')
    assert TempoConfig.from_file(path) == TempoConfig(gelu="off")
    path.write_text('{"zero_optimization": {}}')
    with pytest.raises(ValueError, match='no "tempo" block'):
        TempoConfig.from_file(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        TempoConfig.from_file(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="a JSON object is wanted"):
        TempoConfig.from_file(path)


@pytest.mark.parametrize(
    ("argv", "block", "expected"),
    [
        ([], None, TempoConfig.off()),
        (["--use-tempo"], None, TempoConfig()),
        (["--use-tempo"], {"enabled": False, "gelu": "off"}, TempoConfig(gelu="off")),
        ([], {"gelu": "off"}, TempoConfig(gelu="off")),
        ([], {"enabled": False}, TempoConfig.off()),
        (["--no-use-tempo"], {"enabled": True}, TempoConfig.off()),
        (["--use-tempo", "--tempo-gelu", "inplace"], {"gelu": "off", "norm": "off"}, TempoConfig(norm="off")),
        (["--tempo-norm", "off"], {"enabled": True}, TempoConfig(norm="off")),
    ],
)
def test_the_argument_wins_over_the_block_field_by_field(argv, block, expected):
    config = {} if block is None else {"tempo": block}
    assert tempo_config_from(parsed(*argv), config) == expected


def test_an_operation_asked_for_while_tempo_is_off_is_refused():
    with pytest.raises(ValueError, match="--tempo-gelu is given but Tempo is off"):
        tempo_config_from(parsed("--tempo-gelu", "inplace"), {})
    with pytest.raises(ValueError, match="--tempo-norm is given but Tempo is off"):
        tempo_config_from(parsed("--no-use-tempo", "--tempo-norm", "off"), {"tempo": {}})

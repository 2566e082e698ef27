"""What the README says is so: its commands parse, its paths exist, its table is what is measured."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from tempo_megatron import TempoConfig
from tempo_megatron.training.arguments import parse_arguments

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def kept_bytes() -> dict:
    return runpy.run_path(str(ROOT / "benchmarks" / "kept_bytes.py"))


def test_the_training_command_is_one_the_trainer_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"^deepspeed launch/pretrain_gpt.py ((?:.*\\\n)+.*)$", README, re.MULTILINE)
    args = parse_arguments(shlex.split(command.replace("\\\n", " ")))
    assert args.num_layers == 12 and args.use_tempo is True
    assert Path(args.deepspeed_config).is_file()


def test_the_tempo_block_switches_everything_on() -> None:
    (block,) = re.findall(r'^"tempo": (\{.*\})$', README, re.MULTILINE)
    assert TempoConfig.from_dict(json.loads(block)) == TempoConfig()


def test_the_paths_of_the_reading_order_exist() -> None:
    named = re.findall(r"^\| (`.*?`) \|", README.partition("## Where things are")[2], re.MULTILINE)
    paths = [path for cell in named for path in re.findall(r"`([^`]+)`", cell)]
    assert len(paths) >= 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_table_is_written_from_the_results_file(kept_bytes: dict) -> None:
    records = [json.loads(line) for line in kept_bytes["OUTPUT"].read_text(encoding="utf-8").splitlines()]
    assert kept_bytes["table_in_readme"]() == kept_bytes["table"](records)


@pytest.mark.slow
def test_the_results_file_holds_what_is_measured_now(kept_bytes: dict) -> None:
    recorded = [json.loads(line) for line in kept_bytes["OUTPUT"].read_text(encoding="utf-8").splitlines()]
    for old, new in zip(recorded, kept_bytes["measure"](), strict=True):
        for key in ("layout", "model", "shape", "dtype", "p", "stock", "tempo", "recompute"):
            assert old[key] == new[key], f"{old['layout']}: {key}; run python benchmarks/kept_bytes.py"

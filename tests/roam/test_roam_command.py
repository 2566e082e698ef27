"""The order command on a tiny GPT: what it prints, writes and draws."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tempo_megatron.cli import main
from tempo_megatron.memory.commands.arguments import add_order_arguments
from tempo_megatron.roam.order import WORK_LIMIT


@pytest.mark.slow
def test_the_command_orders_a_gpt_and_proves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures_file, plot = tmp_path / "order.json", tmp_path / "order.png"
    command = "order --model configs/model/gpt2_tiny.json --seq-length 64 --vocab-size 512 --dtype fp32".split()
    assert main([*command, "--json", str(figures_file), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "gpt2_tiny, fp32, s 64, b 1, adam" in printed
    assert "no order needs less" in printed
    figures = json.loads(figures_file.read_text())
    assert figures["lower_bound"] <= figures["peak_bytes"] <= figures["given_peak_bytes"] <= figures["eager_peak_bytes"]
    assert figures["arena_lower_bound"] <= figures["arena_bytes"]
    assert len(figures["order"]) == len(set(figures["order"]))
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_commands_work_limit_is_that_of_the_search() -> None:
    parser = argparse.ArgumentParser()
    add_order_arguments(parser)
    assert parser.get_default("work_limit") == WORK_LIMIT

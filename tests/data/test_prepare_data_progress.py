from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tempo_megatron.cli import main as cli
from tempo_megatron.data.prepare_data import main, show_progress

OPTIONS = Namespace(prog="prog", line_seconds=5.0)


def write_command(folder: Path, text: str) -> list[str]:
    (folder / "a.txt").write_text(text)
    return ["--input", str(folder / "a.txt"), "--output-prefix", str(folder / "out"), "--workers", "1"]


@pytest.mark.slow
def test_a_log_gets_lines_while_the_vocabulary_is_trained_and_while_text_is_tokenized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(f"word{n} and {n * n} " for n in range(60_000))
    assert main([*write_command(tmp_path, text), "--vocab-size", "1000"], line_seconds=0.005) == 0
    rest = r"\d+(\.\d+)?[kM]?B of 1\.44MB, .*B/s, \d\d:\d\d so far, .* left"
    phases = ["training the vocabulary", "training the vocabulary, learning its merges", "tokenizing"]
    lines = capsys.readouterr().err.splitlines()
    found = [next((p for p in phases if re.fullmatch(f"prepare_data: {p}: {rest}", line)), line) for line in lines]
    assert [phase for phase, before in zip(found, ["", *found], strict=False) if phase != before] == phases


def test_the_line_tells_rate_and_time_left() -> None:
    with show_progress(OPTIONS, "tokenizing", 200_000_000) as bar:
        bar.n = 50_000_000
        bar.start_t = bar._time() - 10
        assert str(bar) == "prog: tokenizing: 50.0MB of 200MB, 5.00MB/s, 00:10 so far, 00:30 left"
    with show_progress(OPTIONS, "tokenizing", None) as unknown:
        unknown.n = 7
        assert "7.00B of ?B" in str(unknown)


def test_a_short_run_prints_no_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(write_command(tmp_path, "some words")) == 0
    assert capsys.readouterr().err == ""


def test_the_command_calls_itself_by_the_name_that_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli(["prepare-data"])
    assert "usage: tempo-megatron prepare-data" in capsys.readouterr().err
    assert cli(["prepare-data", "--input", str(tmp_path / "none"), "--output-prefix", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("tempo-megatron prepare-data: ")


def test_a_reader_that_leaves_is_no_error_and_nothing_is_warned_of(tmp_path: Path) -> None:
    code = "import sys; from tempo_megatron.data.prepare_data import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-u", "-c", code, *write_command(tmp_path, "some words")]
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (0, b"")
    assert (tmp_path / "out.idx").exists()

"""The commands' front: versions, pipes whose reader leaves, files that cannot be."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tempo_megatron
from tempo_megatron.cli import main
from tempo_megatron.cluster import installation as doctor
from tempo_megatron.training.run.arguments import divide_processes, parse_arguments

ROOT = Path(__file__).parent.parent


def test_both_commands_say_their_version(capsys: pytest.CaptureFixture[str]) -> None:
    for parse, name in ((main, "tempo-megatron"), (parse_arguments, "tempo-pretrain-gpt")):
        with pytest.raises(SystemExit, match="0"):
            parse(["--version"])
        assert capsys.readouterr().out == f"{name} {tempo_megatron.__version__}\n"


@pytest.mark.parametrize("name", tempo_megatron.__all__)
def test_a_public_name_is_found_where_the_package_says(name: str) -> None:
    assert getattr(tempo_megatron, name) is not None


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["plan", "--help"], 0),
        (["estimate", "--help"], 0),
        (["plan", "--model=gpt.json"], 2),
        (["ledger", "--tp=0"], 2),
    ],
    ids=str,
)
def test_help_and_a_slip_of_the_pen_import_neither_torch_nor_megatron(argv: list[str], status: int) -> None:
    program = (
        "import sys\nfrom tempo_megatron.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as error:\n"
        "    print([name in sys.modules for name in ('torch', 'megatron.core')], error.code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"[False, False] {status}", done.stderr


@pytest.mark.slow
def test_a_reader_that_left_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| head -1` does when it has its line
    command = [sys.executable, "-m", "tempo_megatron", "doctor"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


def test_ctrl_c_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", interrupt)
    assert main(["order", "--model", "x"]) == 130
    assert capsys.readouterr().err == "tempo-megatron order: stopped before it was done\n"


def test_without_the_environment_data_preparation_says_how_to_activate_it() -> None:
    command = [sys.executable, "-I", "-S", "launch/prepare_data.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "source .venv/bin/activate" in done.stderr and done.stderr.count("\n") == 1


def test_too_few_processes_name_the_option_that_starts_more() -> None:
    with pytest.raises(ValueError, match="start a multiple of 2 processes .deepspeed --num_gpus 2, torchrun"):
        divide_processes(1, tensor_model_parallel_size=2)


def test_doctor_says_at_once_what_it_knows_and_then_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[None] = []
    monkeypatch.setattr(doctor, "get_obstacle", lambda: tried.append(None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = []
    for line in doctor.describe_installation():
        names.append(line[:21].strip())
        if not tried:
            assert capsys.readouterr().err == ""
    assert names.index("CPU") + 1 == names.index("C++ compiler") and tried
    assert capsys.readouterr().err.startswith("trying the C++ compiler on a small function: 10 s")
    tried.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    rows = {line[:21].strip(): line[21:] for line in doctor.describe_installation()}
    assert "nothing of Tempo needs it on a GPU" in rows["C++ compiler"] and not tried


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--plot", "file/a.png"], "file/a.png cannot be written, the folder file cannot be made (File exists); give"),
        (["--plot", "a.pdf"], "a.pdf does not end in .png, which is what is drawn"),
        (["--json", "."], ". is a folder; give a file in it"),
        (["--json", "/proc/a.json"], "/proc/a.json cannot be written (No such file or directory); give another place"),
        (["--deepspeed_config", "none.json"], "none.json cannot be read (No such file or directory); correct the path"),
    ],
)
@pytest.mark.parametrize("command", ["order", "ledger", "estimate"])
def test_files_that_cannot_be_are_told_before_the_work(
    command: str,
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with contextlib.suppress(SystemExit):
        assert main([command, "--model", str(ROOT / "configs/model/gpt2_tiny.json"), *words]) == 2
    assert sentence in capsys.readouterr().err

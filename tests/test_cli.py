"""The commands' front: versions, pipes whose reader leaves, one wording for what an operation runs on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tempo_megatron
from tempo_megatron import TempoConfig, doctor
from tempo_megatron.cli import main
from tempo_megatron.training import banner
from tempo_megatron.training.arguments import parse_arguments
from tempo_megatron.training.checks import data_parallel_size_of

ROOT = Path(__file__).parent.parent


def test_both_commands_say_their_version(capsys: pytest.CaptureFixture[str]) -> None:
    for parse, name in ((main, "tempo-megatron"), (parse_arguments, "tempo-pretrain-gpt")):
        with pytest.raises(SystemExit, match="0"):
            parse(["--version"])
        assert capsys.readouterr().out == f"{name} {tempo_megatron.__version__}\n"


def test_a_reader_that_left_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| head -1` does when it has its line
    command = [sys.executable, "-m", "tempo_megatron", "doctor"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


def test_without_the_environment_data_preparation_says_how_to_activate_it() -> None:
    command = [sys.executable, "-I", "-S", "launch/prepare_data.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "source .venv/bin/activate" in done.stderr and done.stderr.count("\n") == 1


def test_too_few_processes_name_the_option_that_starts_more() -> None:
    args = SimpleNamespace(tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="start a multiple of 2 processes .deepspeed --num_gpus 2, torchrun"):
        data_parallel_size_of(args, 1)


def test_banner_and_doctor_say_the_same_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse_arguments(
        "--deepspeed_config d --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 "
        "--micro-batch-size 1 --train-iters 1 --lr 1 --data-path x --clip-grad 1".split()
    )
    vars(args).update(padded_vocab_size=8, num_micro_batches=1, precision="fp32")
    facts = SimpleNamespace(launcher="none", world_size=1, parameters=1, optimizer_name="Adam", gelu_form="erf")
    for compiler in ("/usr/bin/c++", None):
        monkeypatch.setattr(doctor, "find_compiler", lambda found=compiler: found)
        text = banner.run_banner(args, {}, TempoConfig(), device=torch.device("cpu"), **vars(facts))
        (said,) = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("attention")]
        (known,) = [line[21:] for line in doctor.report().splitlines() if line.startswith("tempo attention")]
        if not torch.cuda.is_available():
            assert said == known
        assert said == ("plain torch, compiled where that pays" if compiler else "plain torch")

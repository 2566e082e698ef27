"""The table of Megatron-LM's options beside the parser of Megatron-LM itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron_wheels import unpack

from tempo_megatron.memory import commands
from tempo_megatron.memory.megatron.command import spell_arguments
from tempo_megatron.memory.megatron.options import GONE, READ, get_field, is_ignored, parse_options

PUBLISHED = Path(__file__).parent.parent.parent / "benchmarks" / "published" / "megatron.json"
# Reads lists of words; writes what the options are, and what the parser makes of each list.
PARSE = """
import argparse, enum, json, sys
from megatron.training.arguments import add_megatron_arguments
def name(value):
    return value.name if isinstance(value, enum.Enum) else value
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
options = {}
for action in parser._actions:
    choices = action.choices and sorted(str(name(each)) for each in action.choices)
    row = {"bare": action.nargs == 0, "nargs": action.nargs or None, "choices": choices, "dest": action.dest}
    options |= {option: row | {"default": name(action.default)} for option in action.option_strings}
parsed = [vars(parser.parse_known_args(words)[0]) for words in json.load(sys.stdin)]
json.dump({"options": options, "parsed": parsed}, sys.__stdout__, default=lambda value: str(name(value)))
"""
# Ours is a word where Megatron's parser evaluates it, and a tuple where it has a bare value.
OTHER_DEFAULTS = {"moe-layer-freq": 1, "moe-router-load-balancing-type": "aux_loss", "moe-aux-loss-coeff": 0.0}
OTHER_CHOICES = {"cross-entropy-fusion-impl": {"linear"}}
ONLY_IN_OTHER_VERSIONS = {
    *("dsv4-mode", "linear-attention-type", "use-legacy-models"),
    *("offload-optimizer-states", "post-mlp-layernorm", "post-self-attn-layernorm", "megatron-fsdp-version"),
}
# Fields that several of our options fill and Megatron derives, or that its parser evaluates.
NOT_COMPARED = {"moe-layer-freq", "enable-cuda-graph", "external-cuda-graph", "hybrid-override-pattern"}
NOT_COMPARED |= {"heterogeneous-layers-config-encoded-json", "moe-router-padding-for-fp8", *OTHER_DEFAULTS}


@pytest.mark.slow
def test_the_options_and_published_commands_are_what_megatrons_parser_makes_of_them() -> None:
    rows = json.loads(PUBLISHED.read_text(encoding="utf-8"))["megatron_goldens"]
    # Of one the tokenizer's type is a shell's variable.
    commands = [spell_arguments(row["args"]) for row in rows if "${TOKENIZER_TYPE}" not in row["args"].values()]
    environment = {**os.environ, "PYTHONPATH": str(unpack("megatron-core==0.19.2")), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [sys.executable, "-c", PARSE], env=environment, input=json.dumps(commands), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    theirs: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    options = {option: row for option, row in theirs["options"].items() if option.startswith("--")}
    unknown = {option for option in options if option[2:] not in READ and not is_ignored(option)}
    assert unknown == {"--help", *(f"--{name}" for name in GONE)} & {"--help", *options}
    assert {name for name in READ if f"--{name}" not in options} == ONLY_IN_OTHER_VERSIONS
    for name in READ.keys() - ONLY_IN_OTHER_VERSIONS:
        option, row = READ[name], options[f"--{name}"]
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        assert row["default"] == OTHER_DEFAULTS.get(name, default), name
        assert (row["bare"], row["nargs"]) == (option.kind is bool, option.nargs), name
        choices = None if option.choices is None else sorted({*option.choices} - OTHER_CHOICES.get(name, set()))
        assert choices in (None, row["choices"]), name
    for words, parsed in zip(commands, theirs["parsed"], strict=True):
        ours = vars(parse_options(words)[0])
        for name in READ.keys() - ONLY_IN_OTHER_VERSIONS - NOT_COMPARED:
            value = ours[get_field(name)]
            assert (list(value) if isinstance(value, tuple) else value) == parsed[options[f"--{name}"]["dest"]], name


def test_estimate_and_plan_know_a_newer_megatron() -> None:
    words = "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    words += " --micro-batch-size 2 --bf16 --swiglu --disable-bias-linear --num-experts 4 --moe-grouped-gemm"
    words += " --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --tokenizer-type NullTokenizer"
    words += " --vocab-size 512 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    # A plan has few choices then.
    words += " --use-tempo --tempo-activation recompute --tempo-linear-fc1 off --tempo-linear-qkv off"
    words += " --tempo-norm recompute --tempo-dropout off --tempo-attention flash --tempo-moe-permute off"
    environment = {**os.environ, "PYTHONPATH": str(unpack("megatron-core==0.19.2"))}
    padded = " --moe-expert-capacity-factor 1.2 --moe-pad-expert-input-to-capacity"
    commands = [
        f"{command} --world-size 2 -- pretrain_gpt.py {words}{more}".split()
        for command, more in (("estimate", padded), ("plan --recompute-allowed --gpu-memory 1GiB", ""))
    ]
    program = f"from tempo_megatron.cli import main; assert [main(each) for each in {commands}] == [0, 0]"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0 and "between steps" in ran.stdout and '{"tempo": ' in ran.stdout, ran.stderr


def test_no_option_that_is_read_is_passed_over() -> None:
    folder = Path(commands.__file__).parent.parent.parent
    words = set(re.findall(r"\w+", "\n".join(file.read_text() for file in folder.rglob("*.py"))))
    # What it needs or gives is asked for with the table.
    fields = {get_field(name) for name, option in READ.items() if not (option.gives or option.needs)}
    assert fields - words == set()

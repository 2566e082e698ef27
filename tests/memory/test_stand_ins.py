"""What Transformer Engine's modules keep, here a stand-in package's, names the estimate's stand-ins that are stale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tempo_megatron.cli import main
from tempo_megatron.memory.show.stand_ins import KeptByEngine, describe_stand_ins, read_engine

SUPPORT = Path(__file__).parents[1] / "support"
GPT: dict[str, Any] = {
    **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
}
MODELS = {
    "gpt": GPT,
    "swiglu": {**GPT, "normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False},
    "experts": {**GPT, "num_experts": 4, "moe_ffn_hidden_size": 64},
    "bert": {**GPT, "family": "bert"},
}


AGREES = "the stand-ins keep what Transformer Engine 2.6.0 on cpu keeps, within 1%"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("model")
    for name, sizes in MODELS.items():
        (folder / f"{name}.json").write_text(json.dumps(sizes))
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def measured(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On a CPU without dropout the stand-in package keeps what Transformer Engine's own modules are said to keep."""
    output = tmp_path_factory.mktemp("measured") / "kept.json"
    command = [sys.executable, "-W", "ignore", SUPPORT / "engine_cases.py", output, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return output


def test_a_stand_in_that_keeps_something_else_is_named(measured: Path, files: list[Path]) -> None:
    found, named = read_engine(measured), {file.stem: file for file in files}
    assert set(found.kept_bytes) == {"gpt", "swiglu"}
    assert describe_stand_ins(found, named) == AGREES
    of_gpt = found.kept_bytes["gpt"]
    other = KeptByEngine("2.99", "0.16.1", "a GPU", {"gpt": {**of_gpt, "mlp": of_gpt["mlp"] * 2}, "of another": of_gpt})
    text = describe_stand_ins(other, named)
    assert text.startswith("stale since Transformer Engine 2.99 on a GPU: the stand-in of mlp: ")
    assert text.endswith(f"{of_gpt['mlp']:,} bytes a layer of gpt, where {2 * of_gpt['mlp']:,} were measured")


def test_the_estimate_says_so_in_one_line(
    measured: Path, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = next(file for file in files if file.stem == "gpt")
    argv = ["estimate", f"--model={model}", "--vocab-size=256", f"--kept-bytes={measured}"]
    assert main(argv) == 0
    assert f"{AGREES}\n" in capsys.readouterr().out
    assert main([*argv, "--stock=local"]) == 2
    assert "of Transformer Engine's modules, and stock modules are local" in capsys.readouterr().err
    (tmp_path / "kept.json").write_text("{}")
    assert main([*argv, f"--kept-bytes={tmp_path / 'kept.json'}"]) == 2
    assert "give a file that tempo-megatron bench --kept-bytes wrote" in capsys.readouterr().err

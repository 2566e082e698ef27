"""Tempo in Megatron-DeepSpeed, beside its own source: MEGATRON_DEEPSPEED_ROOT names a checkout."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

_ROOT = os.environ.get("MEGATRON_DEEPSPEED_ROOT", "")
_SUPPORT = Path(__file__).parents[1] / "support"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _ROOT, reason="needs a Megatron-DeepSpeed checkout: set MEGATRON_DEEPSPEED_ROOT to one"),
]

_BASE = (
    "--num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3 "
    "--train-iters 2 --tokenizer-type NullTokenizer --vocab-size 127 --vocab-file unused --distributed-backend gloo "
    "--use-cpu-initialization --no-masked-softmax-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion "
    "--no-pipeline-parallel --seed 5"
)
_GELU = "--no-bias-gelu-fusion"
_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
_DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


@functools.cache
def run(
    arguments: str,
    *,
    tempo: str = "{}",
    world_size: int = 1,
    micro_batch: int = 4,
    pipe: bool = False,
    is_launched: bool = False,
    sides: tuple[str, ...] = ("tempo",),
) -> list[dict[str, Any]]:
    """What each rank found: {"stock": ..., "tempo": ..., "chosen": ..., "reasons": ...}.

    Stock's attention without flash takes one sample at a time only: it asks for views of what is no view.
    """
    words = [*_BASE.split(), *arguments.split(), "--micro-batch-size", str(micro_batch), "--global-batch-size", "4"]
    with tempfile.TemporaryDirectory(prefix="megatron-deepspeed-") as folder:
        request = Path(folder, "request.json")
        content = {"arguments": words, "tempo": json.loads(tempo), "pipe": pipe, "sides": sides}
        content["is_launched"] = is_launched
        request.write_text(json.dumps(content), encoding="utf-8")
        ranks = []
        for rank in range(world_size):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([_ROOT, *sys.path]),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "STORE": f"{folder}/store",
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
            }
            script = str(_SUPPORT / "megatron_deepspeed_child.py")
            command = [sys.executable, script, str(request), f"{folder}/{rank}.pt"]
            with Path(folder, f"{rank}.log").open("w") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        codes = [rank.wait(timeout=600) for rank in ranks]
        logs = "\n".join(Path(folder, f"{rank}.log").read_text("utf-8") for rank in range(world_size))
        if any(codes):
            raise RuntimeError(logs[-4000:])
        return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(world_size)]


def all_losses(ranks: list[dict[str, Any]], name: str = "tempo") -> torch.Tensor:
    """[4 samples, 32 tokens], data-parallel ranks one after the other in the order of the samples."""
    parts = [rank[name]["losses"] for rank in ranks]
    return torch.cat([part for step in zip(*parts, strict=True) for part in step])


@pytest.mark.parametrize(
    ("arguments", "world_size", "chosen"),
    [
        pytest.param(_GELU, 1, "activation=inplace norm=inplace", id="erf GELU"),
        pytest.param("", 1, "activation=inplace norm=inplace", id="fused tanh GELU"),
        pytest.param("--squared-relu", 1, "activation=inplace", id="squared ReLU"),
        pytest.param(
            "--swiglu --normalization rmsnorm --disable-bias-linear --use-rotary-position-embeddings "
            "--untie-embeddings-and-output-weights",
            1,
            "activation=recompute",
            id="Llama",
        ),
        pytest.param(f"{_GELU} --bf16", 1, "norm=inplace", id="bf16"),
        pytest.param(f"{_GELU} --tensor-model-parallel-size 2", 2, "norm=inplace", id="TP 2"),
        pytest.param(f"{_GELU} --recompute-granularity selective", 1, "attention=flash", id="selective"),
    ],
)
def test_losses_gradients_and_keys_are_those_of_stock(arguments: str, world_size: int, chosen: str) -> None:
    for rank in run(f"{_NO_DROPOUT} {arguments}", world_size=world_size, micro_batch=1, sides=("stock", "tempo")):
        assert chosen in rank["chosen"]
        stock, tempo = rank["stock"], rank["tempo"]
        tolerance = 3e-2 if "--bf16" in arguments else 3e-5
        assert tempo["keys"] == stock["keys"]
        for expected, found in zip(stock["losses"], tempo["losses"], strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert tempo["gradients"].keys() == stock["gradients"].keys() != set()
        for name, expected in stock["gradients"].items():
            error = (tempo["gradients"][name] - expected).abs().max()
            assert error <= tolerance * max(1.0, expected.abs().max().item()), name
        assert tempo["kept"] < 0.75 * stock["kept"]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        pytest.param("", {"micro_batch": 1}, id="micro batches of one sample"),
        pytest.param("--tensor-model-parallel-size 2", {"world_size": 2}, id="TP 2"),
        pytest.param("", {"world_size": 2, "micro_batch": 2}, id="DP 2"),
        pytest.param("--recompute-granularity full --recompute-method uniform", {}, id="full recomputation"),
        pytest.param("--recompute-granularity selective", {}, id="selective recomputation"),
        pytest.param("", {"pipe": True}, id="GPTModelPipe"),
    ],
)
def test_masks_do_not_depend_on_the_layout(arguments: str, options: dict[str, Any]) -> None:
    whole = run(f"{_GELU} {_DROPOUT}")
    found = run(f"{_GELU} {_DROPOUT} {arguments}", **options)
    losses = all_losses(found[:1] if "--tensor" in arguments else found)
    torch.testing.assert_close(losses, all_losses(whole), rtol=2e-6, atol=2e-6)
    if options == {}:
        for name, expected in whole[0]["tempo"]["gradients"].items():
            torch.testing.assert_close(found[0]["tempo"]["gradients"][name], expected, rtol=1e-4, atol=1e-6)


def test_dropout_is_drawn_at_all() -> None:
    assert (all_losses(run(f"{_GELU} {_DROPOUT}")) - all_losses(run(f"{_GELU} {_NO_DROPOUT}"))).abs().max() > 1e-2


def test_the_launcher_does_the_same_by_arguments_and_reports_it() -> None:
    (launched,) = run(f"{_GELU} {_DROPOUT} --use-tempo --tempo-norm off", is_launched=True)
    (called,) = run(f"{_GELU} {_DROPOUT}", tempo='{"norm": "off"}')
    torch.testing.assert_close(all_losses([launched]), all_losses([called]), rtol=0, atol=0)
    report = launched["report"]
    assert report["tempo"]["norm"] == report["tempo"]["loss"] == "off" and report["tempo"]["attention"] == "flash"
    assert list(report["reasons"]) == ["loss"]


def test_auto_says_why_it_took_less() -> None:
    (rank,) = run(f"{_NO_DROPOUT} --swiglu --normalization rmsnorm")
    assert rank["reasons"]["activation"].startswith("activation is swiglu")
    assert "loss head" in rank["reasons"]["loss"]


@pytest.mark.parametrize(
    ("arguments", "tempo", "sentence"),
    [
        ("--swiglu", '{"activation": "inplace"}', 'tempo.activation is "inplace", but activation is swiglu'),
        ("", '{"norm": "recompute"}', 'tempo.norm is "recompute", but Megatron-DeepSpeed\'s linears'),
        ("", '{"loss": "fused"}', 'tempo.loss is "fused", but Megatron-DeepSpeed\'s loss head'),
        ("--openai-gelu --no-bias-gelu-fusion", '{"activation": "inplace"}', "--openai-gelu has a formula of its own"),
    ],
)
def test_a_written_choice_that_cannot_be_had_is_refused(arguments: str, tempo: str, sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        run(f"{_NO_DROPOUT} {arguments}", tempo=tempo)

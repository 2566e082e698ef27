"""`--tempo-ledger` of the trainer: what a run keeps is what the ledger says of its shape; losses stay as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from covering import exhaustive
from training_job import Data, fork_beside, run, successful

from tempo_megatron.cli import main
from tempo_megatron.memory.tape.rows import format_size

LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 2 "
    "--position-embedding-type rope --untie-embeddings-and-output-weights"
).split()


def observe(data: Any, folder: Path, *extra: str, **settings: Any) -> dict[str, Any]:
    """The ledger of three steps, and their losses, written as bits."""
    argv, settings = ("--train-iters", "3", *extra), {"before": fork_beside, **settings}
    seen = successful(run(data, folder / "seen", *argv, "--tempo-ledger", str(folder / "found" / "led"), **settings))
    assert len(seen.losses_hex) == 3
    assert (folder / "found" / "led.stage0.png").stat().st_size > 10_000
    found: dict[str, Any] = json.loads((folder / "found" / "led.stage0.json").read_text())
    assert f"{found['kept_bytes']:,}" in seen.output
    step = json.loads((folder / "found" / "led.stage0.timeline.json").read_text())
    assert (folder / "found" / "led.stage0.timeline.png").stat().st_size > 10_000
    assert "memory at the peak" in (folder / "found" / "led.stage0.timeline.html").read_text()
    assert "kept for backward, one layer" in (folder / "found" / "led.stage0.html").read_text()
    for name in ("trace.json", "snapshot.pickle"):
        assert (folder / "found" / f"led.stage0.timeline.{name}").stat().st_size > 1000
    assert step["peak_bytes"] == max(map(sum, zip(*step["levels"].values(), strict=True)))
    assert format_size(step["peak_bytes"]) in seen.output and found["kept_bytes"] < step["peak_bytes"]
    return {**found, "losses": seen.losses_hex}


def rows_of(found: dict[str, Any]) -> dict[str, int]:
    (layers,) = found["layers"]
    return {**layers["rows"], **found["outside"]}


def predict(tmp_path: Path, sizes: dict[str, Any], *extra: str) -> dict[str, Any]:
    model, out = tmp_path / "model.json", tmp_path / "predicted.json"
    small = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 512}
    model.write_text(json.dumps({**small, "make_vocab_size_divisible_by": 64, **sizes}))
    argv = ["ledger", "--model", str(model), "--micro-batch-size", "2", "--dtype", "fp32", "--stock", "cpu"]
    argv += ["--json", str(out), *extra]
    assert main(argv) == 0
    predicted: dict[str, Any] = json.loads(out.read_text())
    return predicted


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CORE_ATTENTION = "--recompute-granularity selective --recompute-modules core_attn"
TP_2 = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "trained", "predicted", "settings"),
    [
        ("tempo", "--use-tempo", "", {"before": None}),  # what it calls beside itself is a new process
        ("stock", f"{FULL} {TP_2}", "--recompute full --tp 2 --sequence-parallel", {"world_size": 2}),
        *exhaustive(
            ("tempo", f"--use-tempo {TP_2}", "--tp 2 --sequence-parallel", {"world_size": 2}),
            ("stock", CORE_ATTENTION, "--recompute core_attn", {}),
        ),
    ],
    ids=["Tempo", "full, TP 2 + SP", "TP 2 + SP", "core_attn"],
)
def test_a_gpt_keeps_in_training_what_the_ledger_says(
    data: Data, tmp_path: Path, column: str, trained: str, predicted: str, settings: dict[str, Any]
) -> None:
    found = observe(data, tmp_path, *trained.split(), **settings)
    columns = predict(tmp_path, {}, *predicted.split())
    assert rows_of(found) == columns[column]["rows"] and found["kept_bytes"] == columns[column]["model_bytes"]
    if "--recompute" not in predicted:  # the run's column of stock is that without recomputation
        stock = {name: num_bytes for name, num_bytes in columns["stock"]["rows"].items() if name in found["stock"]}
        assert found["stock"] == stock
    assert not (tmp_path / "found" / "led.stage1.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("zero", [3, *exhaustive([1], [2])])
def test_zero_and_data_parallelism(data: Data, tmp_path: Path, zero: int) -> None:
    config = {"zero_optimization": {"stage": zero}, "bf16": {"enabled": True}}
    found = observe(data, tmp_path, "--use-tempo", world_size=2, config=config)
    if zero < 3:
        assert rows_of(found) == predict(tmp_path, {}, "--dtype", "bf16")["tempo"]["rows"]
    # Half of the float32 weights and of Adam's two states, on each of two ranks.
    num_parameters = found["standing"]["weights"] // 2 * (2 if zero == 3 else 1)
    assert found["standing"]["optimizer states"] == pytest.approx(12 * num_parameters / 2, rel=0.02)
    assert found["standing"]["gradients"] > 0


@pytest.mark.slow
def test_a_llama_in_which_layers_are_not_alike_and_two_send_rows_to_the_host(data: Data, tmp_path: Path) -> None:
    """Layer by layer and row by row; losses are bit for bit those of a run without a ledger."""
    others = '{"2": {"norm": "off", "attention": "off", "offload": "off"}}'
    layers = ["--use-tempo", "--tempo-offload", "self_attention+mlp", "--tempo-layers", others]
    argv = [*LLAMA, "--num-layers", "3", *layers]
    found = observe(data, tmp_path, *argv)
    assert found["losses"] == successful(run(data, tmp_path / "plain", "--train-iters", "3", *argv)).losses_hex
    sizes = {
        **{"activation": "swiglu", "normalization": "RMSNorm", "add_bias_linear": False, "num_query_groups": 2},
        **{"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True, "num_layers": 3},
    }
    predicted = predict(tmp_path, sizes, *layers)["tempo"]
    assert [(kind["layers"], kind["num_bytes"], kind["rows_on_host"]) for kind in found["layers"]] == [
        (kind["layers"], kind["layer_bytes"], kind["rows_on_host"]) for kind in predicted["layer_kinds"]
    ]
    first, last = found["layers"]
    assert (first["layers"], last["layers"]) == ("0-1", "2") and first["num_bytes"] > first["host_bytes"] > 0
    on_host = 2 * first["host_bytes"]
    assert last["host_bytes"] == 0 and found["host_pool_bytes"] == found["most_moving_bytes"] == on_host
    assert predicted["most_moving_bytes"] == on_host
    step = json.loads((tmp_path / "found" / "led.stage0.timeline.json").read_text())
    assert max(step["on_host"]) == on_host and step["on_host"][0] == step["on_host"][-1] == 0
    assert "on the host during the step" in (tmp_path / "found" / "led.stage0.timeline.html").read_text()
    assert ", on the host" in (tmp_path / "found" / "led.stage0.html").read_text()

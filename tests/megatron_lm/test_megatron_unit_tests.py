"""Megatron-LM's own unit tests with Tempo's slots in place: what passes with stock's modules passes with ours.

`--megatron-root` names the checkout; see megatron_unit_plugin.py for what stands in for a GPU. Left out are
test_transformer_block_custom_pgs.py and test_heterogeneous_gpt_model.py, whose sizes a CPU does not get through.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from training_job import free_port

_SUPPORT = Path(__file__).parents[1] / "support"
FILES = (
    "transformer/test_mlp.py",
    "transformer/test_transformer_layer.py",
    "transformer/test_transformer_block.py",
    "transformer/test_attention.py",
    "transformer/test_attention_no_rope.py",
    "transformer/test_attention_packed_seq.py",
    "transformer/test_spec_customization.py",
    "models/test_base_embedding.py",
    "models/test_bert_model.py",
    "models/test_gpt_model.py",
    "models/test_t5_model.py",
)
# Tests that stock passes and Tempo does not, and why that is right.
EXCEPTIONS: dict[str, str] = {}


def run_file(file: str, root: Path, folder: Path, *, with_slots: bool) -> dict[str, str]:
    """{test: "passed", "skipped", "failure" or "error", and its message}."""
    report = folder / f"{with_slots}.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(_SUPPORT), *sys.path]),
        "MEGATRON_LM_ROOT": str(root),
        "TEMPO_SLOTS": str(int(with_slots)),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "megatron_unit_plugin", "-o", "addopts=", "-W", "ignore", "-q"]
    command += [f"--junitxml={report}", f"tests/unit_tests/{file}"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=900)
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        text = "passed" if outcome is None else f"{outcome.tag}: {outcome.get('message', '')[:300]}"
        found[f"{case.get('classname')}::{case.get('name')}"] = text
    return found


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_what_passes_with_stocks_modules_passes_with_tempos(file: str, megatron_checkout: Path, tmp_path: Path) -> None:
    stock = run_file(file, megatron_checkout, tmp_path, with_slots=False)
    passed = {name for name, outcome in stock.items() if outcome == "passed"}
    if not passed:
        pytest.skip(
            f"none of the {len(stock)} tests passes with stock on a CPU: {next(iter(stock.values()), 'no test')}"
        )
    tempo = run_file(file, megatron_checkout, tmp_path, with_slots=True)
    assert tempo.keys() == stock.keys()
    broken = {name: tempo[name] for name in passed if tempo[name] != "passed" and name not in EXCEPTIONS}
    assert broken == {}

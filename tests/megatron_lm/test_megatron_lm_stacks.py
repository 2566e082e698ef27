"""Megatron-LM's unmodified pretrain_bert.py and pretrain_t5.py, stock beside --use-tempo."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_runs import Run, assert_equal_to_stock, run_all_sizes

pytestmark = pytest.mark.slow

_T5 = "--encoder-seq-length 32 --decoder-seq-length 16 --encoder-num-layers 2 --decoder-num-layers 2 "
# Script, arguments, and sizes that the script does not take.
_SCRIPTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "BERT": ("pretrain_bert.py", "--spec local", ()),
    "T5": ("pretrain_t5.py", f"{_T5} --vocab-extra-ids 20 --kv-channels 12", ("num-layers", "seq-length")),
}
_DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 --lr 0.01 --use-tempo"
# World size, arguments, and whether masks are written down.
_RUNS = {
    "stock": (1, "", False),
    "Tempo": (1, "--use-tempo", False),
    "dropout": (1, _DROPOUT, True),
    "micro batch 4": (1, f"{_DROPOUT} --micro-batch-size 4", True),
    "DP 2": (2, _DROPOUT, True),
}


def write_text(folder: Path) -> str:
    """A small indexed dataset of 200 documents of 4 to 10 sentences, and its vocabulary; the arguments for them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    vocabulary = [*special, *(f"word{i}" for i in range(100))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.int32)
    chance = random.Random(1234)
    for _ in range(200):
        for _ in range(chance.randint(4, 10)):
            words = chance.choices(range(len(special), len(vocabulary)), k=chance.randint(4, 12))
            builder.add_item(torch.tensor(words, dtype=torch.int32))
        builder.end_document()
    builder.finalize(str(folder / "text.idx"))
    return (
        f"--data-path {folder}/text --split 100,0,0 --legacy-tokenizer --tokenizer-type BertWordPieceLowerCase "
        f"--vocab-file {folder}/vocab.txt --data-cache-path {folder}/cache"
    )


@pytest.fixture(scope="module")
def results(megatron_checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By run and rank."""
    folder = tmp_path_factory.mktemp("text")
    data, runs = write_text(folder), []
    for name, (script, arguments, leaves_out) in _SCRIPTS.items():
        for kind, (world_size, more, records) in _RUNS.items():
            settings: dict[str, Any] = {"script": script, "data": data, "leaves_out": leaves_out}
            settings["changes"] = ("record_masks",) if records else ()
            runs.append((world_size, Run(f"{name}: {kind}", f"{arguments} {more}", **settings)))
    return run_all_sizes(megatron_checkout, runs, folder)


@pytest.mark.parametrize("name", _SCRIPTS)
def test_losses_and_every_gradient_equal_stock(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    tempo, stock = results[f"{name}: Tempo"], results[f"{name}: stock"]
    assert_equal_to_stock(tempo, stock, 3e-5)
    assert "slots replaced" in tempo[0]["printed"]


@pytest.mark.parametrize("layout", ["micro batch 4", "DP 2"])
@pytest.mark.parametrize("name", _SCRIPTS)
def test_masks_are_those_of_another_layout(results: dict[str, list[dict[str, Any]]], name: str, layout: str) -> None:
    (one,), other = results[f"{name}: dropout"], results[f"{name}: {layout}"]
    assert not one["error"] and not other[0]["error"]
    masks: dict[Any, int] = {}
    for rank in other:
        masks |= rank["masks"]
    assert len(masks) > 1000
    assert masks == one["masks"]
    # BERT's and T5's losses are means of micro batches' means over tokens, which their sizes change; the first step's
    # weights are the same, so that nothing else does.
    if layout == "DP 2":
        assert other[-1]["losses"][1] == pytest.approx(one["losses"][1], rel=2.5e-7)

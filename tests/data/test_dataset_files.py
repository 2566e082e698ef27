from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tempo_megatron.data.dataset_files import Sidecar, load_dataset_tokenizer, validate_dataset
from tempo_megatron.data.prepare_data import main


def megatron_data(prefix: Path, sequences: list[list[int]], dtype: type = np.uint16) -> str:
    """Data as Megatron-LM's own tool writes it: no PREFIX.json."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for ids in sequences:
        builder.add_item(torch.tensor(ids))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def prepared(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("some words, and some more words")
    prefix = str(tmp_path / "out")
    assert main(["--input", str(tmp_path / "a.txt"), "--output-prefix", prefix, "--vocab-size", "260"]) == 0
    return prefix


def test_prepared_data_fits_its_own_vocabulary_and_no_smaller_one(prepared: str, tmp_path: Path) -> None:
    validate_dataset(prepared, 260)
    validate_dataset(prepared, 300)
    with pytest.raises(ValueError, match="made with a vocabulary of 260, the model has 259"):
        validate_dataset(prepared, 259)
    megatron_data(Path(prepared), [[1, 2], [3]])
    with pytest.raises(ValueError, match=r"they belong to different data"):
        validate_dataset(prepared, 260)


def test_data_of_megatron_lm_is_checked_by_its_tokens(tmp_path: Path) -> None:
    prefix = megatron_data(tmp_path / "data", [[1, 2, 99], [3]])
    validate_dataset(prefix, 100)
    with pytest.raises(ValueError, match=r"has the token 99, the model's vocabulary of 99 ends at 98"):
        validate_dataset(prefix, 99)
    prefix = megatron_data(tmp_path / "negative", [[1, -2]], np.int32)
    with pytest.raises(ValueError, match="has the token -2"):
        validate_dataset(prefix, 100)


def test_every_token_is_looked_at_up_to_the_limit_and_a_sample_beyond(tmp_path: Path) -> None:
    for place in (0, 499, 777, 999):
        prefix = megatron_data(tmp_path / "data", [[5] * place + [50] + [5] * (999 - place)])
        for scan_bytes in (1 << 30, 2000):
            with pytest.raises(ValueError, match="has the token 50"):
                validate_dataset(prefix, 50, scan_bytes=scan_bytes)
    prefix = megatron_data(tmp_path / "data", [[5] * 500 + [50] + [5] * 499])
    validate_dataset(prefix, 50, scan_bytes=20)
    with pytest.raises(ValueError, match="has the token 5,"):
        validate_dataset(prefix, 5, scan_bytes=20)


def test_a_data_set_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    prefix = megatron_data(tmp_path / "data", [[1, 2], [3]])
    for suffix in (".idx", ".bin"):
        path = Path(prefix + suffix)
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises(ValueError, match=f"data{suffix} not found"):
            validate_dataset(prefix, 100)
        for size in (0, 5, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=r"not a whole index|do not belong together"):
                validate_dataset(prefix, 100)
        path.write_bytes(b"x" * len(whole))
        if suffix == ".idx":
            with pytest.raises(ValueError, match="not a whole index"):
                validate_dataset(prefix, 100)
        path.write_bytes(whole)
    validate_dataset(prefix, 60_000)
    with pytest.raises(ValueError, match=r"none.idx and .*none.bin not found; prepare the data, or check --data-path"):
        validate_dataset(str(tmp_path / "none"), 100)
    with pytest.raises(ValueError, match="has no documents"):
        validate_dataset(megatron_data(tmp_path / "empty", []), 100)


def test_a_json_file_of_another_program_is_no_description(tmp_path: Path) -> None:
    prefix = megatron_data(tmp_path / "data", [[1, 2]])
    for text in ('{"text": "a"}\n{"text": "b"}\n', "[1]", '{"text": "a"}'):
        Path(prefix + ".json").write_text(text)
        assert Sidecar.read(prefix) is None
        validate_dataset(prefix, 3)


@pytest.mark.parametrize("place", [shutil.move, lambda source, target: target.symlink_to(source)], ids=["move", "link"])
def test_the_tokenizer_is_found_beside_the_data_wherever_that_is(
    prepared: str, tmp_path: Path, place: Callable[[Path, Path], object]
) -> None:
    expected = load_dataset_tokenizer(prepared).unique_identifiers
    (tmp_path / "elsewhere").mkdir()
    for path in tmp_path.glob("out*"):
        place(path, tmp_path / "elsewhere" / path.name)
    assert load_dataset_tokenizer(str(tmp_path / "elsewhere" / "out")).unique_identifiers == expected


def test_a_tokenizer_given_by_hand_is_the_one_of_the_data(prepared: str, tmp_path: Path) -> None:
    files = prepared + "-vocab.json", prepared + "-merges.txt"
    assert load_dataset_tokenizer(prepared, *files).vocab_size == 260
    other = Path(shutil.copy(files[0], tmp_path / "other.json"))
    other.write_text(other.read_text() + " ")
    with pytest.raises(ValueError, match=r"other.json is not the file that .*out was made with"):
        load_dataset_tokenizer(prepared, str(other), files[1])
    without = megatron_data(tmp_path / "data", [[1, 2]])
    assert load_dataset_tokenizer(without, *files).vocab_size == 260


def test_no_tokenizer_or_half_of_one_is_refused(prepared: str, tmp_path: Path) -> None:
    without = megatron_data(tmp_path / "data", [[1, 2]])
    with pytest.raises(ValueError, match=r"data.json, .* is missing; give --vocab-file and --merge-file"):
        load_dataset_tokenizer(without)
    with pytest.raises(ValueError, match="--vocab-file is given without --merge-file"):
        load_dataset_tokenizer(prepared, prepared + "-vocab.json")
    Path(prepared + "-merges.txt").unlink()
    with pytest.raises(ValueError, match=r"cannot read the tokenizer file .*out-merges.txt"):
        load_dataset_tokenizer(prepared)


@pytest.mark.parametrize("key", ["vocab_file", "merge_file"])
@pytest.mark.parametrize("way", ["relative", "absolute", "link"])
def test_a_tokenizer_file_outside_of_the_data_sets_directory_is_refused(
    key: str, way: str, prepared: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, description = Path(prepared).parent, json.loads(Path(prepared + ".json").read_text())
    outside = Path(shutil.copy(folder / description[key], tmp_path_factory.mktemp("elsewhere") / "outside"))
    (folder / "link").symlink_to(outside)
    name = {"relative": os.path.relpath(outside, folder), "absolute": str(outside), "link": "link"}[way]
    Path(prepared + ".json").write_text(json.dumps({**description, key: name}))
    with pytest.raises(ValueError, match=f"names the tokenizer file {name}, which is outside of its directory"):
        load_dataset_tokenizer(prepared)
    assert load_dataset_tokenizer(prepared, prepared + "-vocab.json", prepared + "-merges.txt").vocab_size > 256


def test_a_description_edited_by_hand_is_refused(prepared: str) -> None:
    description = json.loads(Path(prepared + ".json").read_text())
    for key, value in {"note": "mine", "vocab_file": 5, "tokens": "5", "left_out": [], "vocab_size": None}.items():
        Path(prepared + ".json").write_text(json.dumps({**description, key: value}))
        for read in (load_dataset_tokenizer, lambda prefix: validate_dataset(prefix, 260)):
            with pytest.raises(ValueError, match="of another version or was edited by hand; prepare the data again"):
                read(prepared)

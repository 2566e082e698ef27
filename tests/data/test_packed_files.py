"""Compressed and columnar files give the data set of the same documents unpacked, whatever the pieces are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from tempo_megatron.data.prepare_data import main

TEXTS = [f"document {number} " + "word " * (number % 7 * 400) for number in range(600)]
LINES = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS).encode()


def write_parquet(path: Path, texts: list[str | None], kind: pyarrow.DataType | None = None) -> None:
    table = pyarrow.table({"number": list(range(len(texts))), "body": pyarrow.array(texts, kind)})
    parquet.write_table(table, path, row_group_size=50, use_dictionary=False, compression="none")


def prepare(folder: Path, *paths: Path, extra: tuple[str, ...] = ()) -> int:
    output = ["--output-prefix", str(folder / "out"), "--vocab-size", "300", "--workers", "1", "--overwrite"]
    return main(["--input", *map(str, paths), *output, "--json-key", "body", *extra])


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "lines.jsonl").write_bytes(LINES)
    assert prepare(folder, folder / "lines.jsonl") == 0
    return (folder / "out.bin").read_bytes() + (folder / "out.idx").read_bytes()


@pytest.mark.parametrize("name", ["lines.jsonl.gz", "lines.JSONL.zst", "table.parquet"])
def test_the_data_are_those_of_the_unpacked_file(
    name: str, tmp_path: Path, wanted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(LINES[:5000]) + gzip.compress(LINES[5000:]))  # as cat of two
    elif name.endswith(".zst"):
        compressed = [zstandard.compress(part) for part in (LINES[:5000], LINES[5000:])]
        (tmp_path / name).write_bytes(b"".join(compressed))
    else:
        monkeypatch.setattr("tempo_megatron.data.corpus._SMALLEST_PIECE", 100_000)
        write_parquet(tmp_path / name, list(TEXTS))
    assert prepare(tmp_path, tmp_path / name) == 0
    assert (tmp_path / "out.bin").read_bytes() + (tmp_path / "out.idx").read_bytes() == wanted


def test_rows_without_text_are_errors_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet(tmp_path / "table.parquet", ["one", None, "three", ""])
    assert prepare(tmp_path, tmp_path / "table.parquet") == 1
    assert "row 1 of " in capsys.readouterr().err
    assert prepare(tmp_path, tmp_path / "table.parquet", extra=("--skip-bad-lines",)) == 0
    said = capsys.readouterr().out
    assert "2 documents" in said and "1 bad lines" in said and "1 empty" in said


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet(tmp_path / "numbers.parquet", [1, 2], pyarrow.int64())  # type: ignore[list-item]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1, and nothing else")
    (tmp_path / "broken.jsonl.gz").write_bytes(gzip.compress(LINES)[:-20])
    (tmp_path / "broken.jsonl.zst").write_bytes(b"no zstd")
    sentences = {
        "numbers.parquet": "the column 'body' of ",
        "broken.parquet": "is damaged or not what its name says",
        "broken.jsonl.gz": "is damaged or not what its name says",
        "broken.jsonl.zst": "is damaged or not what its name says",
    }
    for name, sentence in sentences.items():
        assert prepare(tmp_path, tmp_path / name) == 1
        said = capsys.readouterr().err
        assert sentence in said and said.count("\n") == 1, said
    assert main(["--input", str(tmp_path / "numbers.parquet"), "--output-prefix", str(tmp_path / "x")]) == 1
    assert "has no column 'text' (its columns: number, body)" in capsys.readouterr().err

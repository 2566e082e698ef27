"""Compressed files, tables and data sets of the hub give the data set of the same documents as JSON lines."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from prepared_data import read_documents
from pyarrow import parquet

from tempo_megatron.data.prepare_data import main

TEXTS = [f'document {number}, "quoted",\n' + "word\t" * (number % 7 * 40) for number in range(600)]
LINES = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS).encode()


def compress(content: bytes) -> bytes:
    stream = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(stream, "zstd") as compressed:
        compressed.write(content)
    return stream.getvalue().to_pybytes()


def write(path: Path, texts: list[Any], column: str = "body") -> Path:
    """A file of the kind that its name says; "hub" is a folder that is read as a data set of the hub is."""
    kind, table = path.suffix.lower(), pyarrow.table({"number": list(range(len(texts))), column: texts})
    if kind == ".gz":
        path.write_bytes(gzip.compress(LINES[:5000]) + gzip.compress(LINES[5000:]))  # as cat of two
    elif kind == ".zst":
        path.write_bytes(compress(LINES[:5000]) + compress(LINES[5000:]))
    elif kind == ".arrow":
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    elif kind in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter="\t" if kind == ".tsv" else ",")
            writer.writerows([("number", column), *enumerate(texts)])
    else:
        if kind != ".parquet":
            path.mkdir()
        parquet.write_table(table, path if kind else path / "train-00000-of-00001.parquet", row_group_size=50)
    return path


def prepare(folder: Path, *paths: object, extra: tuple[str, ...] = (), option: str = "--input", **sizes: int) -> int:
    output = ["--output-prefix", str(folder / "out"), "--vocab-size", "300", "--overwrite"]
    workers = () if "--workers" in extra else ("--workers", "1")
    return main([option, *map(str, paths), *output, "--json-key", "body", *workers, *extra], **sizes)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "lines.jsonl").write_bytes(LINES)
    assert prepare(folder, folder / "lines.jsonl") == 0
    return (folder / "out.bin").read_bytes() + (folder / "out.idx").read_bytes()


@pytest.mark.parametrize(
    "name", ["lines.jsonl.gz", "lines.JSONL.zst", "table.parquet", "table.arrow", "table.csv", "TABLE.TSV", "hub"]
)
def test_the_data_are_those_of_the_unpacked_file(name: str, tmp_path: Path, wanted: bytes) -> None:
    option = "--input-hub" if name == "hub" else "--input"
    assert prepare(tmp_path, write(tmp_path / name, TEXTS), option=option, row_bytes=10_000) == 0
    assert (tmp_path / "out.bin").read_bytes() + (tmp_path / "out.idx").read_bytes() == wanted


def test_two_workers_and_other_files_around_a_table(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", TEXTS)
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.txt").write_text("last")
    files = [tmp_path / name for name in ("a.txt", "b.parquet", "c.txt")]
    assert prepare(tmp_path, *files, extra=("--workers", "2")) == 0
    assert read_documents(tmp_path / "out") == ["first", *TEXTS, "last"]
    assert prepare(tmp_path, *files, extra=("--max-bytes", "30")) == 0
    assert read_documents(tmp_path / "out") == ["first", TEXTS[0], TEXTS[1]]


def test_digits_and_na_of_a_csv_are_texts(tmp_path: Path) -> None:
    assert prepare(tmp_path, write(tmp_path / "a.csv", ["12", "NA", "null", "3.50"])) == 0
    assert read_documents(tmp_path / "out") == ["12", "NA", "null", "3.50"]


def test_a_csv_of_a_directory_tree_is_text(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.csv").write_text("a,b\n1,2\n")
    arguments = ["--input", str(tmp_path / "tree"), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert main([*arguments, "--vocab-size", "300"]) == 0
    assert read_documents(tmp_path / "out") == ["a,b\n1,2\n"]


def test_rows_without_text_are_errors_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(tmp_path / "table.parquet", ["one", None, "three", ""])
    assert prepare(tmp_path, table) == 1
    assert "row 1 of " in capsys.readouterr().err
    assert prepare(tmp_path, table, extra=("--skip-bad-lines",)) == 0
    said = capsys.readouterr().out
    assert "2 documents" in said and "1 bad lines" in said and "1 empty" in said


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "numbers.parquet", [1, 2])
    write(tmp_path / "other.csv", ["a"], column="title")
    contents = {
        "broken.parquet": b"PAR1, and nothing else",
        "broken.arrow": b"ARROW1",
        "broken.jsonl.gz": gzip.compress(LINES)[:-20],
        "broken.jsonl.zst": b"no zstd",
        "short.jsonl.zst": compress(LINES)[:-20],
    }
    sentences = {
        "numbers.parquet": "the column 'body' of ",
        "other.csv": "has no column 'body' (its columns: number, title); name that of the text by --json-key",
        **dict.fromkeys(contents, "is damaged or not what its name says"),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name, sentence in sentences.items():
        assert prepare(tmp_path, tmp_path / name) == 1
        said = capsys.readouterr().err
        assert sentence in said.splitlines()[-1] and "Traceback" not in said, said
    assert prepare(tmp_path, tmp_path / "none", option="--input-hub") == 1
    assert "cannot be read" in capsys.readouterr().err

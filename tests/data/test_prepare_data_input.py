"""What of the input is taken: bad lines, links, suffixes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from prepared_data import prepare, read_documents

from tempo_megatron.data import corpus
from tempo_megatron.data.dataset_files import Sidecar

GOOD = b"".join(json.dumps({"text": f"text {n}"}).encode() + b"\n" for n in range(4))
BAD_LINES = [b'{"text": "cut', b"plain", b'{"text": "\xe9"}', b'["text"]', b'{"body": 1}', b'{"text": 5}']


@pytest.mark.parametrize("piece_bytes", [1 << 20, 20])
def test_bad_json_lines_are_left_out_and_counted(
    piece_bytes: int,
    refuse: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpus, "_SMALLEST_PIECE", piece_bytes)
    path = tmp_path / "lines.jsonl"
    path.write_bytes(GOOD + b"\n".join(BAD_LINES) + b"\n" + GOOD)
    refuse("or leave out such lines with --skip-bad-lines", "--input", path)
    prepare(tmp_path / "out", "--input", path, "--skip-bad-lines")
    assert read_documents(tmp_path / "out") == [f"text {n}" for n in [*range(4), *range(4)]]
    assert f"6 bad lines (the first: {path} at offset {len(GOOD)})" in capsys.readouterr().out
    sidecar = Sidecar.read(str(tmp_path / "out"))
    assert sidecar is not None and sidecar.left_out == {"bad lines": 6}


def test_a_bad_byte_late_in_a_text_costs_its_line(
    refuse: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"first\r\n\n" + b"caf\xe9 and more\n" + "naïve".encode())
    refuse("byte 0xe9 at offset 11", "--input", path)
    prepare(tmp_path / "out", "--input", path, "--skip-bad-lines")
    assert read_documents(tmp_path / "out") == ["first\r\n\nnaïve"]
    assert f"1 bad lines (the first: {path} at offset 8)" in capsys.readouterr().out


def test_bad_lines_of_a_text_in_several_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_SMALLEST_PIECE", 10)
    lines = [b"good words %d\n" % n for n in range(9)]
    lines[0] = lines[4] = lines[8] = b"\xff\n"
    (tmp_path / "a.txt").write_bytes(b"".join(lines))
    (tmp_path / "b.txt").write_bytes(b"the next document")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    prepare(tmp_path / "out", "--input", *files, "--skip-bad-lines")
    good = b"".join(line for line in lines if line != b"\xff\n").decode()
    assert read_documents(tmp_path / "out") == [good, "the next document"]


def test_a_file_of_bad_lines_only_is_no_document(refuse: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\n\xff\n")
    message = "there is no document in the input; left out: 2 bad lines"
    refuse(message, "--input", tmp_path / "a.txt", "--skip-bad-lines")


def test_without_bad_lines_the_option_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_bytes(GOOD)
    (tmp_path / "a.txt").write_bytes("naïve\r\n\u2028\x0b\x85 x".encode())
    files = [tmp_path / "a.txt", tmp_path / "lines.jsonl"]
    prepare(tmp_path / "with", "--input", *files, "--skip-bad-lines")
    prepare(tmp_path / "without", "--input", *files)
    for suffix in (".bin", ".idx", "-vocab.json", "-merges.txt"):
        assert (tmp_path / f"with{suffix}").read_bytes() == (tmp_path / f"without{suffix}").read_bytes()


@pytest.mark.parametrize("name", ["lines.JSONL", "lines.JsonL", "lines.Json"])
def test_json_lines_are_known_in_capitals(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(GOOD)
    prepare(tmp_path / "out", "--input", tmp_path / name)
    assert read_documents(tmp_path / "out") == [f"text {n}" for n in range(4)]
    prepare(tmp_path / "out", "--input", tmp_path, "--extensions", ".json", ".JSONL")
    assert read_documents(tmp_path / "out") == [f"text {n}" for n in range(4)]


def test_links_are_not_followed_out_of_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    for folder in (tree / "sub", outside):
        folder.mkdir(parents=True)
    (outside / "secret.txt").write_text("secret")
    (tree / "a.txt").write_text("inside")
    (tree / "sub" / "b_link.txt").symlink_to("../a.txt")
    (tree / "c.txt").symlink_to(outside / "secret.txt")
    (tree / "d.txt").symlink_to("sub/../../outside/secret.txt")
    (tree / "e.txt").symlink_to("c.txt")  # out of the tree in two steps
    (tree / "folder").symlink_to(outside)
    (tree / "again").symlink_to("sub")
    prepare(tmp_path / "out", "--input", tree)
    assert read_documents(tmp_path / "out") == ["inside", "inside"]
    printed = capsys.readouterr().out
    assert f"3 links out of the tree (the first: {tree / 'c.txt'})" in printed
    assert f"2 links to directories (the first: {tree / 'again'})" in printed
    # What the user names himself is read, also through a link.
    os.symlink(tree, tmp_path / "link")
    prepare(tmp_path / "out", "--input", tmp_path / "link", tree / "c.txt")
    assert read_documents(tmp_path / "out") == ["inside", "inside", "secret"]

"""What a user can get wrong: one sentence on stderr, status 1, and what was there before is still there."""

from __future__ import annotations

import builtins
import bz2
import json
import os
import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from training_job import limit_file_size

from tempo_megatron.data.dataset_files import SUFFIXES, replace_dataset
from tempo_megatron.data.prepare_data import main

Refuse, Fail = Callable[..., None], Callable[..., str]


def file(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def write_input(folder: Path) -> list[str]:
    """The command that makes a data set of one text."""
    text = file(folder / "a.txt", "text")
    return ["--input", str(text), "--output-prefix", str(folder / "out"), "--workers", "1"]


def test_empty_input_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    empty = file(tmp_path / "empty.txt", "")
    refuse(f"there is no text in the input; left out: 1 empty (the first: {empty})", "--input", empty)
    (tmp_path / "tree").mkdir()
    refuse("there is no text in the input;", "--input", tmp_path / "tree")
    file(tmp_path / "tree" / "a.txt", "text")
    refuse("there is no text in the input;", "--input", tmp_path / "tree", "--extensions", ".md")
    lines = file(tmp_path / "lines.jsonl", '\n{"text": ""}\n\n')
    refuse(f"there is no document in the input; left out: 1 empty (the first: {lines})", "--input", lines)
    file(tmp_path / "tree" / "a.txt", b"\xff\xff")
    refuse("there is no document in the input; left out: 1 not UTF-8", "--input", tmp_path / "tree")


def test_what_is_no_text_file_is_refused_where_the_user_named_it(refuse: Refuse, tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        refuse(f"{name} is a binary file (it has NUL bytes)", "--input", file(tmp_path / name, b"GIF89a\0\0"))
    for name in ("lines.jsonl.bz2", "LINES.JSONL.BZ2"):
        packed = file(tmp_path / name, bz2.compress(b'{"text": "a"}\n'))
        refuse(f"{name} is compressed (unpack it first, or compress it with gzip or zstd)", "--input", packed)
    text = file(tmp_path / "text.txt", "text")
    no_key = "--json-key is for .json and .jsonl files and tables, and the input has none"
    refuse(no_key, "--input", text, "--json-key", "body")
    os.mkfifo(tmp_path / "pipe")
    refuse("pipe is neither a file nor a directory", "--input", tmp_path / "pipe")


def test_an_unreadable_file_is_refused(refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree").mkdir()
    link = tmp_path / "tree" / "link.txt"
    link.symlink_to(tmp_path / "gone.txt")
    for path in (link, link.parent):
        refuse("link.txt: No such file or directory (a link that leads nowhere)", "--input", path)
    refuse("none.txt: No such file or directory; repair it", "--input", tmp_path / "none.txt")
    secret = file(tmp_path / "secret.txt", "text")

    read = builtins.open

    def deny(path: Any, *how: Any, **more: Any) -> Any:
        if path == str(secret):
            raise PermissionError(13, "Permission denied", path)
        return read(path, *how, **more)

    monkeypatch.setattr(builtins, "open", deny)
    refuse("cannot read " + str(secret) + ": Permission denied", "--input", secret)


def test_a_file_that_becomes_shorter_is_refused(
    refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file(tmp_path / "log.txt", "many words")
    begin = IndexedDatasetBuilder.__init__

    def truncate(builder: IndexedDatasetBuilder, *arguments: Any, **options: Any) -> None:
        path.write_text("few")
        begin(builder, *arguments, **options)

    monkeypatch.setattr(IndexedDatasetBuilder, "__init__", truncate)
    refuse("log.txt became shorter while it was read", "--input", path)


def test_text_that_is_not_utf_8_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    path = file(tmp_path / "tree" / "latin.txt", ("word " * 20 + "café").encode("latin-1"))
    refuse("latin.txt is not UTF-8 (byte 0xe9 at offset 103)", "--input", path)
    # A document too large for one piece was begun before the bad byte is seen: it can no longer be left out.
    refuse("latin.txt is not UTF-8 (byte 0xe9 at offset 103)", "--input", tmp_path / "tree", piece_bytes=10)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "is not JSON (Unterminated string"),
        (b"plain text", "is not JSON (Expecting value"),
        (b'{"text": ' + b"[" * 100_000, "is not JSON (maximum recursion depth"),
        (b'{"text": ' + b"1" * 5000 + b"}", "is not JSON (Exceeds the limit"),
        (b'{"text": "\xe9"}', "is not UTF-8"),
        (b'["text"]', 'is a JSON list, not an object; expected {"text": TEXT}'),
        (b'{"body": "x", "id": 1}', "has no key 'text' (its keys: body, id); name the key of the text with --json-key"),
        (b'{"text": 5}', "has a value of type int under 'text', not a text"),
        (b'{"text": "\\ud83d"}', "has half of a surrogate pair"),
    ],
)
def test_a_bad_json_line_is_refused_with_its_number(line: bytes, message: str, refuse: Refuse, tmp_path: Path) -> None:
    path = file(tmp_path / "lines.jsonl", b'{"text": "good"}\n\n' * 5 + line + b"\n")
    for piece_bytes in (1 << 20, 20):  # of which the line is in another piece than the first
        refuse(f"line 11 of {path} {message}", "--input", path, piece_bytes=piece_bytes)


def test_a_pretty_printed_file_is_refused_before_a_vocabulary_is_trained(
    refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenizers.trainers.BpeTrainer", None)
    (tmp_path / "tree").mkdir()
    file(tmp_path / "tree" / "a.jsonl", '{"text": "good"}\n' * 100)
    pretty = file(tmp_path / "tree" / "b.json", "\ufeff\n\n" + json.dumps({"text": "good"}, indent=2))
    refuse(f"line 3 of {pretty} is not JSON (Expecting property name", "--input", tmp_path / "tree")


def test_a_vocabulary_that_does_not_fit_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    text, accented = file(tmp_path / "a.txt", "plain text"), file(tmp_path / "b.txt", "café")
    letters = {letter: n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyzĠ")}
    vocab = file(tmp_path / "letters.json", json.dumps({**letters, "<|endoftext|>": len(letters)}))
    files = ("--vocab-file", vocab, "--merge-file", file(tmp_path / "merges.txt", ""))
    assert main([*map(str, ("--input", text, *files, "--output-prefix", tmp_path / "good"))]) == 0
    refuse(f"{accented}: the vocabulary cannot express 'é'", "--input", text, accented, *files)
    refuse("cannot read the tokenizer file gone.json", "--input", text, "--vocab-file", "gone.json", *files[2:])
    refuse("--vocab-file is given without --merge-file", "--input", text, *files[:2])
    refuse("--merge-file is given without --vocab-file", "--input", text, *files[2:])


def test_an_output_that_cannot_be_written_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    text = file(tmp_path / "a.txt", "text")
    for prefix, message in {
        tmp_path / "none" / "out": f"there is no directory {tmp_path / 'none'}; make it first",
        tmp_path / "a.txt" / "out": f"there is no directory {text}",
        tmp_path: "is a directory; add the beginning of a file name",
        f"{tmp_path}/": "is a directory; add the beginning of a file name",
        "/proc/out": "cannot write in /proc (/proc/out.partial",
    }.items():
        refuse(message, "--input", text, "--output-prefix", prefix)
    (tmp_path / "folder.bin").mkdir()
    refuse("folder.bin is a directory", "--input", text, "--output-prefix", tmp_path / "folder")


def test_an_input_that_the_output_would_replace_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    for prefix, suffix in (("lines", ".json"), ("x", "-vocab.json")):
        lines = file(tmp_path / f"{prefix}{suffix}", '{"text": "a"}\n')
        refuse(f"{lines.name} is a file of the output", "--input", lines, "--output-prefix", tmp_path / prefix)
        assert lines.read_text() == '{"text": "a"}\n'


def test_a_second_process_with_the_same_prefix_is_refused(tmp_path: Path, fail: Fail) -> None:
    command = write_input(tmp_path)
    with suppress(FileNotFoundError), replace_dataset(str(tmp_path / "out"), SUFFIXES, overwrite=False):
        fail(f"another process is writing {tmp_path / 'out'}", *command)
    assert main(command) == 0


@pytest.mark.parametrize(
    ("room", "message"),
    [
        (1000, "cannot write the vocabulary"),
        (100_000, "out failed: File too large"),
        (None, "line 2 of {} is not JSON"),
    ],
)
def test_an_error_on_the_disk_or_in_the_input_leaves_the_old_output(
    room: int | None, message: str, tmp_path: Path, fail: Fail
) -> None:
    rng = random.Random(5)
    new = file(tmp_path / "b.txt", " ".join(str(rng.random()) for _ in range(20_000)))
    if room is None:
        new = file(tmp_path / "b.jsonl", '{"text": "a"}\n{')
    output = ["--vocab-size", "300", "--output-prefix", str(tmp_path / "out")]
    assert main(["--input", str(file(tmp_path / "a.txt", "text")), *output]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    with limit_file_size(room) if room else nullcontext():
        fail(message.format(new), "--input", str(new), *output)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == before


OF_MODEL = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to read; give --input PATH... or --input-stdlib"),
        (["--input-stdlib", "--tokenizer-type", "BertWordPieceCase"], "made of sentences; add --split-sentences"),
        (["--input-stdlib", "--workers", "0"], "--workers 0: expected at least 1"),
        (["--input-stdlib", "--vocab-size", "256"], "--vocab-size 256: expected at least 257"),
        (["--input-stdlib", "--vocab-size", "1000000000"], "--vocab-size 1000000000: expected at most 10000000"),
        (["--input-stdlib", "--max-bytes", "12 potatoes"], "'12 potatoes' is not a number of bytes"),
        (["--input-stdlib", "--max-bytes", "0"], "'0' is not a number of bytes"),
        (["--input-stdlib", "--extensions", ".py"], "--extensions chooses files of a directory tree"),
        (["--input", __file__, "--vocab-file", "v", "--merge-file", "m", "--vocab-size", "300"], "--vocab-size is for"),
        (["--input", __file__, "--vocab-file", "v", "--merge-file", "m", "--train-bytes", "3M"], "--train-bytes is f"),
        (["--input-stdlib", *OF_MODEL[:2]], "takes the tokenizer of --tokenizer-model; give that"),
        (["--input-stdlib", *OF_MODEL[2:]], "is for --tokenizer-type HuggingFaceTokenizer alone"),
        (["--input-stdlib", *OF_MODEL], "has no tokenizer.json"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--output-prefix", str(tmp_path / "out")])
    assert message in capsys.readouterr().err


# Only what prepare_data made is replaced or removed.


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json", "-vocab.json", "-merges.txt"])
def test_an_output_of_others_is_replaced_only_where_that_is_asked_for(suffix: str, tmp_path: Path, fail: Fail) -> None:
    command, theirs = write_input(tmp_path), file(tmp_path / f"out{suffix}", "theirs")
    assert "--overwrite" in fail(f"{theirs} exists and was not made by prepare_data", *command)
    assert theirs.read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir() if path.name != "a.txt"] == [theirs.name]
    assert main([*command, "--overwrite"]) == 0
    assert main(command) == 0  # by now they are its own


def test_data_of_megatron_under_the_name_of_a_prepared_data_set_is_not_overwritten(tmp_path: Path, fail: Fail) -> None:
    command = write_input(tmp_path)
    assert main(command) == 0
    builder = IndexedDatasetBuilder(str(tmp_path / "out.bin"))
    builder.add_document(torch.arange(99), [99])
    builder.finalize(str(tmp_path / "out.idx"))
    fail("out.bin exists and was not made by prepare_data", *command)


def test_a_file_that_appears_while_the_data_are_prepared_is_not_overwritten(
    tmp_path: Path, fail: Fail, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = write_input(tmp_path)
    finish = IndexedDatasetBuilder.finalize

    def finish_late(builder: IndexedDatasetBuilder, path: str) -> None:
        file(tmp_path / "out.bin", "theirs")
        finish(builder, path)

    monkeypatch.setattr(IndexedDatasetBuilder, "finalize", finish_late)
    fail("out.bin exists and was not made by prepare_data", *command)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out.bin"]
    assert (tmp_path / "out.bin").read_text() == "theirs"


@pytest.mark.parametrize("name", ["bin", "notes.txt", "sub/bin"])
def test_what_others_have_put_into_the_folder_stays(name: str, tmp_path: Path) -> None:
    path = tmp_path / "out.partial" / name
    path.parent.mkdir(parents=True)
    file(path, "theirs")
    assert main(write_input(tmp_path)) == 0
    assert path.read_text() == "theirs"
    assert list(path.parent.iterdir()) == [path]


def test_a_given_tokenizer_under_the_name_of_a_trained_one_is_not_replaced(tmp_path: Path, fail: Fail) -> None:
    command = write_input(tmp_path)
    assert main([*command, "--vocab-size", "300"]) == 0
    files = ["--vocab-file", str(tmp_path / "out-vocab.json"), "--merge-file", str(tmp_path / "out-merges.txt")]
    assert main([*command, *files]) == 0  # they are its own
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"out{suffix}").unlink()
    for more in ([], files):
        fail("out-vocab.json exists and was not made by prepare_data", *command, *more)

"""What of the input is taken, in which order, and that Megatron reads it back."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from prepared_data import prepare, read_documents

from tempo_megatron.data import corpus
from tempo_megatron.data.dataset_files import Sidecar

WORDS = ["the", "tensor", "keeps", "every", "naïve", "漢字", "value\n\n", "for", "", "backward\t1234", ""]
FILES = (".bin", ".idx", "-vocab.json", "-merges.txt")
GOOD = [f"text {n}" for n in range(4)]
BAD_LINES = [b'{"text": "cut', b"plain", b'{"text": "\xe9"}', b'["text"]', b'{"body": 1}', b'{"text": 5}']
Refuse = Callable[..., None]


def random_text(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + str(rng.randrange(50)) for _ in range(words))


def content(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in FILES]


def describe(prefix: Path) -> Sidecar:
    sidecar = Sidecar.read(str(prefix))
    assert sidecar is not None
    return sidecar


def write(folder: Path, files: dict[str, str | bytes]) -> list[Path]:
    for name, data in files.items():
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return [folder / name for name in files]


def to_lines(texts: Sequence[str], key: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts).encode()


def cut(*paths: Path, smallest: int) -> list[corpus.Piece]:
    return corpus.cut_pieces(corpus.list_files(map(str, paths), (), "", corpus.LeftOut()), smallest=smallest)


def test_text_files_round_trip_through_megatrons_reader(tmp_path: Path) -> None:
    texts = ["first\r\n", "\ufeffwith a byte order mark", "<|endoftext|> inside", " \n"]
    prepare(tmp_path / "out", "--input", *write(tmp_path, {f"{n}.txt": text for n, text in enumerate(texts)}))
    assert read_documents(tmp_path / "out") == texts
    sidecar, data = describe(tmp_path / "out"), IndexedDataset(str(tmp_path / "out"))
    assert (sidecar.documents, sidecar.sequences, sidecar.tokens) == (4, 4, data.sequence_lengths.sum())
    assert sidecar.dtype == data.index.dtype.__name__ == "uint16"
    assert sidecar.vocab_file == "out-vocab.json"
    keys = (
        "format vocab_file merge_file vocab_sha256 merge_sha256 vocab_size eod documents sequences tokens dtype "
        "source_bytes left_out fingerprint"
    )
    assert list(json.loads((tmp_path / "out.json").read_text())) == keys.split()
    assert sidecar.source_bytes == sum(len(text.encode()) for text in texts)


def test_json_lines_round_trip(tmp_path: Path) -> None:
    texts = ["one", "zwei ä\n", "三\u2028", "", "four"]
    lines = b"\xef\xbb\xbf" + to_lines(texts, key="body").replace(b"\n", b"\r\n\n").rstrip()
    (path,) = write(tmp_path, {"lines.Json": lines})
    for given in ([path], [tmp_path, "--extensions", ".JSON"]):
        prepare(tmp_path / "out", "--input", *given, "--json-key", "body")
        assert read_documents(tmp_path / "out") == [text for text in texts if text]


def test_a_directory_tree_is_read_in_sorted_order_and_says_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "tree"
    (tree / "b").mkdir(parents=True)
    (tree / ".git").mkdir()
    files: dict[str, str | bytes] = {
        "c.txt": "third",
        "a.md": "first",
        "b/z.txt": "sixth",
        "b/y.jsonl": '{"text": "fourth"}\n{"text": "fifth"}\n',
        "b.txt": "second",
        "picture.png": b"\x89PNG\0\0",
        "latin.txt": "café".encode("latin-1"),
        "nothing.txt": "",
        ".git/config": "hidden",
    }
    write(tree, files)
    prepare(tree / "out", "--input", tree)
    first = content(tree / "out")
    assert read_documents(tree / "out") == ["first", "second", "third", "fourth", "fifth", "sixth"]
    printed = capsys.readouterr().out
    for reason in ("1 binary (the first: ", "1 not UTF-8", "1 empty", "1 hidden"):
        assert reason in printed
    prepare(tree / "out", "--input", tree)  # the output of the first run lies in the tree by now
    assert "5 own output" in capsys.readouterr().out
    assert content(tree / "out") == first
    prepare(tmp_path / "md", "--input", tree, "--extensions", ".md")
    assert read_documents(tmp_path / "md") == ["first"]


def test_links_are_not_followed_out_of_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    for folder in (tree / "sub", outside):
        folder.mkdir(parents=True)
    write(tmp_path, {"outside/secret.txt": "secret", "tree/a.txt": "inside"})
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


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path) -> None:
    text, lines = random_text(1, 6000), [random_text(seed, 30) for seed in range(100)]
    paths = write(tmp_path, {"long.txt": text, "lines.jsonl": to_lines(lines)})
    assert len(cut(*paths, smallest=4000)) > 10
    prepare(tmp_path / "one", "--input", *paths, piece_bytes=4000)
    prepare(tmp_path / "two", "--input", *paths, "--workers", 2, piece_bytes=4000)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    description = (tmp_path / "one.json").read_text().replace('"one-', '"two-')
    assert description == (tmp_path / "two.json").read_text()
    assert read_documents(tmp_path / "one") == [text, *lines]


def test_a_large_document_in_parts_has_the_tokens_of_the_whole(tmp_path: Path) -> None:
    text = random_text(2, 2000) + "\u3000 \u2003\n\xa0\n\x85 x \r\n" * 200 + "漢" * 3000
    (path,) = write(tmp_path, {"text.txt": text})
    prepare(tmp_path / "whole", "--input", path)
    vocabulary = ("--vocab-file", tmp_path / "whole-vocab.json", "--merge-file", tmp_path / "whole-merges.txt")
    prepare(tmp_path / "parts", "--input", path, *vocabulary, piece_bytes=50)
    assert (tmp_path / "parts.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    sidecar = describe(tmp_path / "parts")
    assert sidecar.documents == 1 and sidecar.sequences > 100
    assert read_documents(tmp_path / "parts") == [text]


def test_max_bytes_takes_the_beginning_and_cuts_at_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write(tmp_path, {"a.txt": "one two", "b.txt": "three four five", "c.txt": "six"})
    prepare(tmp_path / "out", "--input", *paths, "--max-bytes", 14)
    assert read_documents(tmp_path / "out") == ["one two", "three four"]
    assert "1 beyond --max-bytes (the first: " in capsys.readouterr().out
    lines = to_lines(["one", "two", "three"])
    prepare(tmp_path / "out", "--input", *write(tmp_path, {"l.jsonl": lines}), "--max-bytes", len(lines) // 2)
    assert read_documents(tmp_path / "out") == ["one", "two"]


def test_the_standard_library_is_a_corpus(tmp_path: Path) -> None:
    prepare(tmp_path / "out", "--input-stdlib", "--max-bytes", "300k")
    texts = read_documents(tmp_path / "out")
    assert len(texts) > 5
    assert 300_000 <= sum(len(text.encode()) for text in texts) < 310_000
    files = corpus.list_stdlib(corpus.LeftOut())
    assert files == corpus.list_stdlib(corpus.LeftOut())
    assert not any("site-packages" in file.path or "/test/" in file.path for file in files)


def test_a_vocabulary_beyond_16_bits_is_written_in_32(tmp_path: Path) -> None:
    (path,) = write(tmp_path, {"a.txt": "abc"})
    prepare(tmp_path / "small", "--input", path)
    vocab = {**json.loads((tmp_path / "small-vocab.json").read_text()), "<|endoftext|>": 70_000}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    vocabulary = ("--vocab-file", tmp_path / "vocab.json", "--merge-file", tmp_path / "small-merges.txt")
    prepare(tmp_path / "large", "--input", path, *vocabulary)
    assert IndexedDataset(str(tmp_path / "large")).index.dtype.__name__ == "int32"
    assert read_documents(tmp_path / "large") == ["abc"]


def test_the_training_sample_is_bounded_and_spread(tmp_path: Path) -> None:
    pieces = cut(*write(tmp_path, {"a.txt": random_text(3, 10_000)}), smallest=1000)
    starts = [piece[0].start for piece in corpus.sample_pieces(pieces, 20_000)]
    total = pieces[-1][-1].end
    assert 10 <= len(starts) <= 20
    assert min(starts) < total / 5 and max(starts) > total * 4 / 5
    assert corpus.sample_pieces(pieces, 10) == pieces[:1]
    assert corpus.sample_pieces(pieces, total) == pieces


def test_skip_existing_keeps_what_was_made_from_the_same_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "a.txt", tmp_path / "out"
    source.write_text("some words")

    def is_kept(*arguments: object) -> bool:
        prepare(out, "--input", source, "--skip-existing", *arguments)
        return "is already there" in capsys.readouterr().out

    assert not is_kept()
    assert is_kept()
    assert not is_kept("--train-bytes", 5)
    assert not is_kept()
    source.write_text("other words")
    assert not is_kept()
    assert is_kept()
    (tmp_path / "out.idx").unlink()
    assert not is_kept()
    (tmp_path / "out-merges.txt").write_text("#version: 0.1\n")
    assert not is_kept()
    (tmp_path / "out.bin").write_bytes(b"")
    assert not is_kept()
    assert is_kept()


@pytest.mark.parametrize("piece_bytes", [1 << 20, 20])
def test_bad_json_lines_are_left_out_and_counted(
    piece_bytes: int, refuse: Refuse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = to_lines(GOOD)
    (path,) = write(tmp_path, {"lines.jsonl": good + b"\n".join(BAD_LINES) + b"\n" + good})
    refuse("or leave out such lines with --skip-bad-lines", "--input", path, piece_bytes=piece_bytes)
    prepare(tmp_path / "out", "--input", path, "--skip-bad-lines", piece_bytes=piece_bytes)
    assert read_documents(tmp_path / "out") == [*GOOD, *GOOD]
    assert f"6 bad lines (the first: {path} at offset {len(good)})" in capsys.readouterr().out
    assert describe(tmp_path / "out").left_out == {"bad lines": 6}


def test_a_bad_byte_late_in_a_text_costs_its_line(
    refuse: Refuse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "there is no document in the input; left out: 2 bad lines"
    refuse(message, "--input", *write(tmp_path, {"b.txt": b"\xff\n\xff\n"}), "--skip-bad-lines")
    (path,) = write(tmp_path, {"a.txt": b"first\r\n\n" + b"caf\xe9 and more\n" + "naïve".encode()})
    refuse("byte 0xe9 at offset 11", "--input", path)
    prepare(tmp_path / "out", "--input", path, "--skip-bad-lines")
    assert read_documents(tmp_path / "out") == ["first\r\n\nnaïve"]
    assert f"1 bad lines (the first: {path} at offset 8)" in capsys.readouterr().out


def test_bad_lines_of_a_text_in_several_pieces(tmp_path: Path) -> None:
    lines = [b"good words %d\n" % n for n in range(9)]
    lines[0] = lines[4] = lines[8] = b"\xff\n"
    files = write(tmp_path, {"a.txt": b"".join(lines), "b.txt": "the next document"})
    prepare(tmp_path / "out", "--input", *files, "--skip-bad-lines", piece_bytes=10)
    good = b"".join(line for line in lines if line != b"\xff\n").decode()
    assert read_documents(tmp_path / "out") == [good, "the next document"]

from __future__ import annotations

import json
import multiprocessing
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from prepared_data import prepare, read_documents

from tempo_megatron.data import corpus, documents
from tempo_megatron.data.dataset_files import Sidecar

WORDS = ["the", "tensor", "keeps", "every", "naïve", "漢字", "value\n\n", "for", "", "backward\t1234", ""]
FILES = (".bin", ".idx", ".json", "-vocab.json", "-merges.txt")


def random_text(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + str(rng.randrange(50)) for _ in range(words))


def content(prefix: Path) -> dict[str, bytes]:
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in FILES}


def write_jsonl(path: Path, texts: Sequence[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def test_text_files_round_trip_through_megatrons_reader(tmp_path: Path) -> None:
    texts = ["first\r\n", "\ufeffwith a byte order mark", "<|endoftext|> inside", " \n"]
    paths = [tmp_path / f"{n}.txt" for n in range(4)]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode("utf-8"))
    prepare(tmp_path / "out", "--input", *paths)
    assert read_documents(tmp_path / "out") == texts
    sidecar = Sidecar.read(str(tmp_path / "out"))
    assert sidecar is not None
    data = IndexedDataset(str(tmp_path / "out"))
    assert (sidecar.documents, sidecar.sequences, sidecar.tokens) == (4, 4, data.sequence_lengths.sum())
    assert sidecar.dtype == data.index.dtype.__name__ == "uint16"
    assert sidecar.vocab_file == "out-vocab.json"
    assert sidecar.source_bytes == sum(len(text.encode()) for text in texts)


def test_json_lines_round_trip(tmp_path: Path) -> None:
    texts = ["one", "zwei ä\n", "三\u2028", "", "four"]
    path = write_jsonl(tmp_path / "lines.jsonl", texts, key="body")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\n").rstrip())
    prepare(tmp_path / "out", "--input", path, "--json-key", "body")
    assert read_documents(tmp_path / "out") == [text for text in texts if text]


def test_a_directory_tree_is_read_in_sorted_order_and_says_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "tree"
    (tree / "b").mkdir(parents=True)
    (tree / ".git").mkdir()
    for name, data in {
        "c.txt": b"third",
        "a.md": b"first",
        "b/z.txt": b"sixth",
        "b/y.jsonl": b'{"text": "fourth"}\n{"text": "fifth"}\n',
        "b.txt": b"second",
        "picture.png": b"\x89PNG\0\0",
        "latin.txt": "café".encode("latin-1"),
        "nothing.txt": b"",
        ".git/config": b"hidden",
    }.items():
        (tree / name).write_bytes(data)
    prepare(tree / "out", "--input", tree)
    first = content(tree / "out")
    assert read_documents(tree / "out") == ["first", "second", "third", "fourth", "fifth", "sixth"]
    printed = capsys.readouterr().out
    for reason in ("1 binary (the first: ", "1 not UTF-8", "1 empty", "1 hidden"):
        assert reason in printed
    prepare(tree / "out", "--input", tree)  # the output of the first run lies in the tree by now
    assert "5 own output" in capsys.readouterr().out
    assert {k: v for k, v in content(tree / "out").items() if k != ".json"} == {
        k: v for k, v in first.items() if k != ".json"
    }
    prepare(tmp_path / "md", "--input", tree, "--extensions", ".md")
    assert read_documents(tmp_path / "md") == ["first"]


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_SMALLEST_PIECE", 4000)
    text = random_text(1, 6000)
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    lines = [random_text(seed, 30) for seed in range(100)]
    write_jsonl(tmp_path / "lines.jsonl", lines)
    inputs = ("--input", tmp_path / "long.txt", tmp_path / "lines.jsonl")
    assert len(corpus.cut_pieces(corpus.list_files(map(str, inputs[1:]), (), "", corpus.LeftOut()))) > 10
    prepare(tmp_path / "one", *inputs)
    prepare(tmp_path / "two", *inputs, "--workers", 2)
    one, two = content(tmp_path / "one"), content(tmp_path / "two")
    assert one[".json"].replace(b'"one-', b'"two-') == two[".json"]
    assert all(one[suffix] == two[suffix] for suffix in FILES if suffix != ".json")
    assert read_documents(tmp_path / "one") == [text, *lines]


def test_a_large_document_in_parts_has_the_tokens_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_text(2, 2000) + "\u3000 \u2003\n\xa0\n\x85 x \r\n" * 200 + "漢" * 3000
    (tmp_path / "text.txt").write_bytes(text.encode("utf-8"))
    prepare(tmp_path / "whole", "--input", tmp_path / "text.txt")
    monkeypatch.setattr(corpus, "_SMALLEST_PIECE", 50)
    monkeypatch.setattr(corpus, "_WINDOW", 20)
    vocabulary = ("--vocab-file", tmp_path / "whole-vocab.json", "--merge-file", tmp_path / "whole-merges.txt")
    prepare(tmp_path / "parts", "--input", tmp_path / "text.txt", *vocabulary)
    assert (tmp_path / "parts.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    sidecar = Sidecar.read(str(tmp_path / "parts"))
    assert sidecar is not None
    assert sidecar.documents == 1 and sidecar.sequences > 100
    assert read_documents(tmp_path / "parts") == [text]


def test_max_bytes_takes_the_beginning_and_cuts_at_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a.txt", "one two"), ("b.txt", "three four five"), ("c.txt", "six")):
        (tmp_path / name).write_text(text)
    prepare(tmp_path / "out", "--input", *(tmp_path / name for name in ("a.txt", "b.txt", "c.txt")), "--max-bytes", 14)
    assert read_documents(tmp_path / "out") == ["one two", "three four"]
    assert "1 beyond --max-bytes (the first: " in capsys.readouterr().out
    lines = write_jsonl(tmp_path / "lines.jsonl", ["one", "two", "three"])
    prepare(tmp_path / "out", "--input", lines, "--max-bytes", len(lines.read_bytes()) // 2)
    assert read_documents(tmp_path / "out") == ["one", "two"]


def test_the_standard_library_is_a_corpus(tmp_path: Path) -> None:
    prepare(tmp_path / "out", "--input-stdlib", "--max-bytes", "300k")
    texts = read_documents(tmp_path / "out")
    assert len(texts) > 5
    assert 300_000 <= sum(len(text.encode()) for text in texts) < 310_000
    files = corpus.list_stdlib(corpus.LeftOut())
    assert [file.path for file in files] == [file.path for file in corpus.list_stdlib(corpus.LeftOut())]
    assert not any("site-packages" in file.path or "/test/" in file.path for file in files)


def test_a_vocabulary_beyond_16_bits_is_written_in_32(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    prepare(tmp_path / "small", "--input", tmp_path / "a.txt")
    vocab = json.loads((tmp_path / "small-vocab.json").read_text())
    vocab["<|endoftext|>"] = 70_000
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    vocabulary = ("--vocab-file", tmp_path / "vocab.json", "--merge-file", tmp_path / "small-merges.txt")
    prepare(tmp_path / "large", "--input", tmp_path / "a.txt", *vocabulary)
    assert IndexedDataset(str(tmp_path / "large")).index.dtype.__name__ == "int32"
    assert read_documents(tmp_path / "large") == ["abc"]


def test_the_training_sample_is_bounded_and_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_SMALLEST_PIECE", 1000)
    (tmp_path / "a.txt").write_text(random_text(3, 10_000))
    pieces = corpus.cut_pieces(corpus.list_files([str(tmp_path / "a.txt")], (), "", corpus.LeftOut()))
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
    (tmp_path / "out.partial").mkdir()  # a run killed at its very end leaves this behind
    assert is_kept()
    assert not (tmp_path / "out.partial").exists()


def test_a_killed_worker_is_an_error_and_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_SMALLEST_PIECE", 1000)
    (tmp_path / "a.txt").write_text(random_text(4, 20_000))
    prepare(tmp_path / "out", "--input", tmp_path / "a.txt")
    pieces = corpus.cut_pieces(corpus.list_files([str(tmp_path / "a.txt")], (), "", corpus.LeftOut()))
    files = (f"{tmp_path / 'out'}-vocab.json", f"{tmp_path / 'out'}-merges.txt")
    results = documents.encode(pieces, documents.Encoding("GPT2BPETokenizer", files, "text", "uint16"), 2)
    next(results)
    for process in multiprocessing.active_children():
        process.kill()
    with pytest.raises(ValueError, match="a worker process was killed"):
        list(results)


def test_a_run_prints_no_warning(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words")
    code = "import sys; from tempo_megatron.data.prepare_data import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "out", "--workers", "2"]
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    assert result.stderr == ""

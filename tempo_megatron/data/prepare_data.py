"""Makes a data set that Megatron-LM and this repository's trainer read: of texts, JSON lines, trees and tables."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

from tempo_megatron.data import DataError, corpus
from tempo_megatron.data.dataset_files import (
    FORMAT,
    Sidecar,
    load_dataset_tokenizer,
    replace_dataset,
    validate_dataset,
)
from tempo_megatron.data.documents import Encoded, encode, read_texts
from tempo_megatron.data.sentences import RULE, WAYS
from tempo_megatron.data.tokenizer import FILES, LARGEST_VOCABULARY, TextTokenizer
from tempo_megatron.data.tokenizer_types import GPT2_BPE, HUGGING_FACE, MASKED_TYPES, TYPES, list_given_files
from tempo_megatron.extras import MissingExtraError

DESCRIPTION = "Tokenizes text, JSON-lines and directory trees into a data set of Megatron's format."
_TRAIN_BYTES = 32_000_000
# The bytes of a worker's piece at least, the bytes of a table's rows that it gets at once, and the seconds between two
# lines of progress in a log.
_SIZES = {"piece_bytes": corpus.SMALLEST_PIECE, "row_bytes": 1 << 20, "line_seconds": 5.0}
_LINE = "{desc}: {n_fmt}B of {total_fmt}B, {rate_fmt}, {elapsed} so far, {remaining} left"


def main(argv: list[str] | None = None, prog: str = "prepare_data", **sizes: Any) -> int:
    """Runs the command line as `prog`, with `sizes` for _SIZES; returns 0, or 1 after an error of one sentence."""
    options = _parse_arguments(argv, Namespace(prog=prog, **{**_SIZES, **sizes}))
    status = 1
    try:
        prepare(options)
        return 0
    except BrokenPipeError:  # the reader of stdout has left; the data set is made
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (DataError, MissingExtraError) as error:
        fault = str(error)
    except OSError as error:
        path = error.filename or corpus.format_path(options.output_prefix)
        fault = f"writing {path} failed: {error.strerror}; free some space, or choose another place"
    except KeyboardInterrupt:
        fault, status = "interrupted", 130
    print(f"{prog}: {fault}", file=sys.stderr)
    return status


def prepare(options: Namespace) -> None:
    """Makes the data set that the parsed arguments describe.

    Raises: DataError (a ValueError) if the input, the vocabulary or the output cannot be used; OSError if the disk
        fails. An old data set of the same prefix is then unchanged.
    """
    started = time.monotonic()
    prefix = options.output_prefix
    left_out = corpus.LeftOut()
    kind = TYPES[options.tokenizer_type]
    given = list_given_files(options.tokenizer_type, options.vocab_file, options.merge_file)
    files = _choose_input_files(options, left_out)
    tokenizer = kind(*given) if given else None
    fingerprint = _compute_fingerprint(options, tokenizer, files)
    if options.skip_existing and _is_current(prefix, fingerprint):
        print(
            f"{options.prog}: {corpus.format_path(prefix)} is already there, made from the same files in the "
            "same way; it is kept"
        )
        return
    with warnings.catch_warnings():  # of optional packages
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset  # which takes seconds

    pieces = corpus.cut_pieces(files, cuts_texts=kind.cuts_texts, smallest=options.piece_bytes)
    total_bytes = None if any(file.is_table for file in files) else sum(file.end for file in files)
    suffixes = (".json", *kind.suffixes, ".bin", ".idx")
    with (
        replace_dataset(prefix, suffixes, overwrite=options.overwrite) as locate,
        tempfile.TemporaryDirectory() as folder,
    ):
        if tokenizer is None:
            tokenizer = _train_tokenizer(options, pieces, folder)
        for path, suffix in zip(tokenizer.files, kind.suffixes, strict=True):
            shutil.copyfile(path, locate(suffix))
        dtype = indexed_dataset.DType.optimal_dtype(tokenizer.vocab_size)
        with show_progress(options, "tokenizing", total_bytes) as bar:
            builder = indexed_dataset.IndexedDatasetBuilder(locate(".bin"), dtype=dtype)
            written = _write(builder, locate(".idx"), encode(pieces, options, tokenizer, left_out), bar, left_out)
        vocab_file, merge_file = [*(os.path.basename(prefix) + suffix for suffix in kind.suffixes), ""][:2]
        sidecar = Sidecar(
            vocab_file=vocab_file,
            merge_file=merge_file,
            vocab_size=tokenizer.vocab_size,
            eod=-1 if tokenizer.eod is None else tokenizer.eod,
            dtype=dtype.__name__,
            left_out=dict(left_out.count),
            fingerprint=fingerprint,
            tokenizer_type=options.tokenizer_type,
            split_sentences=options.split_sentences or "",
            **{"merge_sha256": "", **tokenizer.digests},
            **written,
        )
        sidecar.write(locate(".json"))
    _report(options, sidecar, left_out, time.monotonic() - started)


def _choose_input_files(options: Namespace, left_out: corpus.LeftOut) -> list[corpus.Part]:
    files = corpus.list_files(options.input, options.extensions, options.output_prefix, left_out)
    files += corpus.list_hub_datasets(options.input_hub)
    if options.input_stdlib:
        files += corpus.list_stdlib(left_out)
    if options.max_bytes is not None:
        files = corpus.take_first_bytes(files, options.max_bytes, left_out)
    if not files:
        raise DataError(f"there is no text in the input{_format_left_out(left_out)}; give other files with --input")
    if not options.skip_bad_lines:
        for file in files:
            if file.kind != "text":  # read the first line or row, before long work would fail at it
                next(read_texts(corpus.cut_pieces([file])[0], options, corpus.LeftOut()), None)
    if options.json_key is not None and all(file.kind == "text" for file in files):
        raise DataError("--json-key is for .json and .jsonl files and tables, and the input has none; leave it out")
    return files


def _compute_fingerprint(options: Namespace, given: TextTokenizer | None, files: list[corpus.Part]) -> str:
    """Returns a digest of everything that the output depends on; files count by name, size and time of change."""
    vocabulary: list[Any] = [options.vocab_size, options.train_bytes] if given is None else [*given.digests.values()]
    if options.tokenizer_type != GPT2_BPE:
        vocabulary.append(options.tokenizer_type)
    if options.split_sentences is not None:
        vocabulary.append(f"sentences by {options.split_sentences}")
    paths = [file.path if file.kind == "hub" else os.path.abspath(file.path) for file in files]
    inputs = [(path, file.end, file.version, file.is_named) for path, file in zip(paths, files, strict=True)]
    content = json.dumps([FORMAT, vocabulary, options.text_key, inputs, *["bad lines"] * options.skip_bad_lines])
    return hashlib.sha256(content.encode("ascii")).hexdigest()


def _is_current(prefix: str, fingerprint: str) -> bool:
    with suppress(DataError):
        sidecar = Sidecar.read(prefix)
        if sidecar is not None and sidecar.fingerprint == fingerprint:
            validate_dataset(prefix, sidecar.vocab_size)
            load_dataset_tokenizer(prefix)
            return True
    return False


def _train_tokenizer(options: Namespace, pieces: list[corpus.Piece], folder: str) -> Any:
    chosen = corpus.sample_pieces(pieces, options.train_bytes)
    total = min(sum(part.end - part.start for piece in chosen for part in piece), options.train_bytes)
    with show_progress(options, "training the vocabulary", total or None) as bar:

        def read() -> Iterator[str]:
            budget = options.train_bytes
            for text in (text.text for piece in chosen for text in read_texts(piece, options, corpus.LeftOut())):
                content = text[:budget]  # characters, at most as many as bytes
                yield content
                num_bytes = len(content.encode("utf-8"))
                _advance(bar, num_bytes)
                budget -= num_bytes
                if budget <= 0:
                    break
            bar.set_description_str(f"{bar.desc}, learning its merges", refresh=False)

        return TYPES[options.tokenizer_type].train(read(), options.vocab_size, folder)


def _write(
    builder: Any, idx_path: str, encoded: Iterator[Encoded], bar: tqdm[Any], left_out: corpus.LeftOut
) -> dict[str, Any]:
    import torch

    written: Counter[str] = Counter()
    try:
        for piece in encoded:
            for ids, is_end in zip(piece.ids, piece.ends, strict=True):
                builder.add_item(torch.from_numpy(ids))
                if is_end:
                    builder.end_document()
            written.update(documents=sum(piece.ends), sequences=len(piece.ids))
            written.update(tokens=sum(map(len, piece.ids)), source_bytes=piece.source_bytes)
            for path in piece.empty:
                left_out.add("empty", path)
            _advance(bar, piece.source_bytes)
        if written["documents"] == 0:
            raise DataError(
                f"there is no document in the input{_format_left_out(left_out)}; give other files with --input"
            )
        builder.finalize(idx_path)
    finally:
        with suppress(OSError):  # a full disk has raised before
            builder.data_file.close()
    return dict(written)


def _format_left_out(left_out: corpus.LeftOut) -> str:
    reasons = [
        f"{count} {reason} (the first: {corpus.format_path(left_out.first[reason])})"
        for reason, count in sorted(left_out.count.items())
    ]
    return f"; left out: {', '.join(reasons)}" if reasons else ""


def _report(options: Namespace, sidecar: Sidecar, left_out: corpus.LeftOut, seconds: float) -> None:
    print(
        f"{options.prog}: {corpus.format_path(options.output_prefix)}: {sidecar.documents} documents, "
        f"{sidecar.source_bytes} bytes, {sidecar.tokens} tokens ({sidecar.dtype}, vocabulary {sidecar.vocab_size}) "
        f"in {seconds:.1f} s{_format_left_out(left_out)}"
    )
    if options.vocab_file is None and sidecar.vocab_size < options.vocab_size:
        print(
            f"{options.prog}: the vocabulary has {sidecar.vocab_size} tokens, not {options.vocab_size}: the text it "
            "was trained on has no more pairs that occur twice"
        )


@contextmanager
def show_progress(options: Namespace, what: str, total_bytes: int | None) -> Iterator[tqdm[Any]]:
    """Shows a bar on a terminal, else a line every few seconds, by a thread: one call may take minutes."""
    is_on_terminal = sys.stderr.isatty()
    bar = tqdm(
        total=total_bytes,
        unit="B",
        unit_scale=True,
        desc=what if is_on_terminal else f"{options.prog}: {what}",
        bar_format=None if is_on_terminal else _LINE,
        file=sys.stderr if is_on_terminal else io.StringIO(),
    )
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(0.2 if is_on_terminal else options.line_seconds):
            if is_on_terminal:
                bar.refresh()
            else:
                print(bar, file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield bar
    finally:
        ended.set()
        thread.join()
        bar.close()


def _advance(bar: tqdm[Any], num_bytes: int) -> None:
    bar.n = bar.n + num_bytes if bar.total is None else min(bar.n + num_bytes, bar.total)


def _parse_arguments(argv: list[str] | None, options: Namespace) -> Namespace:
    """Parses, checks and completes the command line; an error ends the process with status 2."""
    parser = _build_parser(options.prog)
    parser.parse_args(argv, options)
    _take_tokenizer_model(parser, options)
    _check(parser, options)
    options.text_key = "text" if options.json_key is None else options.json_key
    options.train_bytes = options.train_bytes or _TRAIN_BYTES
    if options.vocab_size is None:
        options.vocab_size = TYPES[options.tokenizer_type].default_size
    return options


def _take_tokenizer_model(parser: argparse.ArgumentParser, options: Namespace) -> None:
    folder, is_of_model = options.tokenizer_model, options.tokenizer_type == HUGGING_FACE
    if folder is None:
        if is_of_model and options.vocab_file is None:
            parser.error(f"--tokenizer-type {HUGGING_FACE} takes the tokenizer of --tokenizer-model; give that")
        return
    if not is_of_model or options.vocab_file is not None or options.merge_file is not None:
        parser.error(
            f"--tokenizer-model is for --tokenizer-type {HUGGING_FACE} alone, and brings its files; leave out "
            "--vocab-file and --merge-file, and give that type"
        )
    for name in FILES:
        if not os.path.isfile(os.path.join(folder, name)):
            parser.error(f"--tokenizer-model {folder} has no {name}; give a folder that transformers saved")
    options.vocab_file, options.merge_file = (os.path.join(folder, name) for name in FILES)


def _build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=DESCRIPTION)
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    paths = "text, .json/.jsonl (also as .gz or .zst), .parquet, .arrow, .csv, .tsv, directory trees"
    add("--input", **several, metavar="PATH", help=paths)
    names = "data sets of the Hugging Face hub, or folders of one: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT"
    add("--input-hub", **several, metavar="NAME", help=names)
    add("--input-stdlib", action="store_true", help="sources and texts of this Python's standard library")
    add("--output-prefix", required=True, metavar="P", help="writes P.bin, P.idx, P.json (and the tokenizer)")
    add("--json-key", help="key of the text in JSON-lines files, or its column in tables (default: text)")
    endings = "of directory trees take only files that end so, for example .txt .md"
    add("--extensions", nargs="+", default=[], metavar="EXT", help=endings)
    add("--max-bytes", type=_parse_byte_count, metavar="N", help="use the first N bytes only; 12M, 1.5GiB")
    ways = "store each sentence as a sequence of its own, as BERT and RoBERTa need: found by rule, or the lines"
    add("--split-sentences", nargs="?", const=RULE, choices=WAYS, help=ways)
    kinds = "RobertaBPETokenizer is GPT-2's with RoBERTa's special tokens (default: %(default)s)"
    add("--tokenizer-type", choices=TYPES, default=GPT2_BPE, help=kinds)
    model = f"with {HUGGING_FACE}: a model's folder with tokenizer.json and tokenizer_config.json"
    add("--tokenizer-model", metavar="FOLDER", help=model)
    add("--vocab-file", help="vocab.json, or BERT's vocab.txt; without it a vocabulary is trained")
    add("--merge-file", help="GPT-2's merges.txt")
    sizes = ", ".join(f"{kind.default_size} for {name}" for name, kind in TYPES.items() if kind.default_size)
    add("--vocab-size", type=int, help=f"tokens of the trained vocabulary (default: {sizes})")
    add("--train-bytes", type=_parse_byte_count, help="text to train the vocabulary on (default: 32M)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="threads (default: one per core)")
    bad = "leave out, and count, lines that are not UTF-8 or not a JSON object with a text"
    add("--skip-bad-lines", action="store_true", help=bad)
    add("--overwrite", action="store_true", help="replace files named like the output that prepare_data did not make")
    add("--skip-existing", action="store_true", help="keep P where it was made from the same files in the same way")
    return parser


def _check(parser: argparse.ArgumentParser, options: Namespace) -> None:
    if not options.input and not options.input_hub and not options.input_stdlib:
        parser.error("nothing to read; give --input PATH... or --input-stdlib")
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: expected at least 1")
    if options.extensions and not any(os.path.isdir(path) for path in options.input):
        parser.error("--extensions chooses files of a directory tree, but --input has no directory; leave it out")
    for name in ("vocab_size", "train_bytes"):
        if options.vocab_file is not None and getattr(options, name) is not None:
            parser.error(f"--{name.replace('_', '-')} is for training a vocabulary, but --vocab-file gives one; choose")
    if options.tokenizer_type in MASKED_TYPES and options.split_sentences is None:
        parser.error(
            f"--tokenizer-type {options.tokenizer_type} is for masked language models, whose samples are made of "
            "sentences; add --split-sentences"
        )
    if options.vocab_size is None:
        return
    smallest, reason = TYPES[options.tokenizer_type].smallest_size
    if options.vocab_size < smallest:
        parser.error(f"--vocab-size {options.vocab_size}: expected at least {smallest} ({reason})")
    if options.vocab_size > LARGEST_VOCABULARY:
        parser.error(f"--vocab-size {options.vocab_size}: expected at most {LARGEST_VOCABULARY}; GPT-2 has 50257")


def _parse_byte_count(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kKMGT])(i?))?B?", text.strip())
    size = 0
    if match:
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index((unit or " ").upper()))
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; write 12000000, 12M or 1.5GiB")
    return size

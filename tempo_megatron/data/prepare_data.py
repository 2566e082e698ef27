"""Makes a data set that Megatron-LM and this repository's trainer read: of texts, JSON lines, trees and tables."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from tqdm import tqdm

from tempo_megatron.data import DataError, corpus
from tempo_megatron.data.dataset_files import (
    FORMAT,
    Sidecar,
    is_inside,
    load_dataset_tokenizer,
    validate_dataset,
)
from tempo_megatron.data.dataset_writer import SUFFIXES, DatasetWriter, PartialOutput, choose_token_dtype
from tempo_megatron.data.documents import Encoded, Encoding, check_first_texts, encode, read_texts
from tempo_megatron.data.prepare_arguments import PrepareOptions, parse_prepare_arguments
from tempo_megatron.data.tokenizer import TextTokenizer
from tempo_megatron.data.tokenizer_types import GPT2_BPE, TYPES, list_given_files

_SECONDS_BETWEEN_LINES = 5.0
_LINE = "{desc}: {n_fmt}B of {total_fmt}B, {rate_fmt}, {elapsed} so far, {remaining} left"
_SMALL_DATA_SET = 100  # sequences; below it, a few per cent of --split may hold none


def main(argv: list[str] | None = None, prog: str = "prepare_data") -> int:
    """Runs the command line under the name `prog`; returns 0, or 1 after an error of one sentence on stderr."""
    options = parse_prepare_arguments(argv, prog)
    try:
        prepare(options)
    except DataError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of stdout has left; the data set is made
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(
            f"{prog}: writing {error.filename or corpus.format_path(options.output_prefix)} failed: {error.strerror}; "
            "free some space, or choose another place",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    return 0


def prepare(options: PrepareOptions) -> None:
    """Makes the data set that the parsed arguments describe.

    Raises: DataError (a ValueError) if the input, the vocabulary or the output cannot be used; OSError if the disk
        fails. An old data set of the same prefix is then unchanged.
    """
    started = time.monotonic()
    prefix = options.output_prefix
    left_out = corpus.LeftOut()
    list_given_files(options.tokenizer_type, options.vocab_file, options.merge_file)
    files = _choose_input_files(options, left_out)
    fingerprint = _compute_fingerprint(options, files)
    if options.skip_existing and _is_current(prefix, fingerprint):
        if os.path.isdir(prefix + ".partial"):  # left by a run that was killed at its very end
            with suppress(DataError), PartialOutput(prefix):
                pass
        print(
            f"{options.prog}: {corpus.format_path(prefix)} is already there, made from the same files in the "
            "same way; it is kept"
        )
        return
    pieces = corpus.cut_pieces(files, cuts_texts=TYPES[options.tokenizer_type].cls.cuts_texts)
    has_tables = any(file.is_table for file in files)
    kept = _find_kept_files(options)
    suffixes = [suffix for suffix in SUFFIXES if suffix in (".bin", ".json", ".idx") or kept.get(suffix, "") is None]
    obsolete = sorted({suffix for kind in TYPES.values() for suffix in kind.suffixes} - kept.keys())
    with PartialOutput(prefix, suffixes, obsolete=obsolete, overwrite=options.overwrite) as output:
        tokenizer, tokenizer_files = _load_or_train_tokenizer(options, kept, pieces, output)
        dtype = choose_token_dtype(tokenizer.vocab_size)
        workers = options.workers if has_tables else max(1, min(options.workers, len(pieces)))
        encoding = Encoding(
            options.tokenizer_type,
            tokenizer_files,
            options.text_key,
            dtype,
            options.skip_bad_lines,
            options.split_sentences,
        )
        total_bytes = None if has_tables else sum(file.size for file in files)
        progress = Progress(options.prog, "tokenizing", total_bytes)
        written = _write(output, encode(pieces, encoding, workers), dtype, progress, left_out)
        names = [name or os.path.basename(prefix) + suffix for suffix, name in kept.items()]
        sidecar = Sidecar(
            vocab_file=names[0],
            merge_file=names[1] if len(names) > 1 else "",
            vocab_sha256=tokenizer.unique_identifiers["vocab_sha256"],
            merge_sha256=tokenizer.unique_identifiers.get("merge_sha256", ""),
            vocab_size=tokenizer.vocab_size,
            eod=-1 if tokenizer.eod is None else tokenizer.eod,
            dtype=dtype.__name__,
            left_out=dict(left_out.count),
            fingerprint=fingerprint,
            tokenizer_type=options.tokenizer_type,
            split_sentences=options.split_sentences or "",
            **written,
        )
        sidecar.write(output.locate(".json"))
        output.publish()
    _report(options, sidecar, left_out, time.monotonic() - started)


def _choose_input_files(options: PrepareOptions, left_out: corpus.LeftOut) -> list[corpus.InputFile]:
    files = corpus.list_files(options.input, options.extensions, options.output_prefix, left_out)
    files += corpus.list_hub_datasets(options.input_hub)
    if options.input_stdlib:
        files += corpus.list_stdlib(left_out)
    if options.max_bytes is not None:
        files = corpus.take_first_bytes(files, options.max_bytes, left_out)
    if not files:
        raise DataError(f"there is no text in the input{_format_left_out(left_out)}; give other files with --input")
    if not options.skip_bad_lines:
        check_first_texts(files, options.text_key)
    if options.json_key is not None and not any(file.is_json or file.is_table for file in files):
        raise DataError("--json-key is for .json and .jsonl files and tables, and the input has none; leave it out")
    return files


def _compute_fingerprint(options: PrepareOptions, files: list[corpus.InputFile]) -> str:
    """Returns a digest of everything that the output depends on; files count by name, size and time of change."""
    if paths := list_given_files(options.tokenizer_type, options.vocab_file, options.merge_file):
        identifiers = TYPES[options.tokenizer_type].cls.load(*paths).unique_identifiers
        vocabulary: list[Any] = [value for key, value in identifiers.items() if key.endswith("sha256")]
    else:
        vocabulary = [options.vocab_size, options.train_bytes]
    if options.tokenizer_type != GPT2_BPE:
        vocabulary.append(options.tokenizer_type)
    if options.split_sentences is not None:
        vocabulary.append(f"sentences by {options.split_sentences}")
    paths_of_input = [file.path if file.is_on_hub else os.path.abspath(file.path) for file in files]
    inputs = [(path, file.size, file.version, file.is_named) for path, file in zip(paths_of_input, files, strict=True)]
    content = json.dumps([FORMAT, vocabulary, options.text_key, inputs, *["bad lines"] * options.skip_bad_lines])
    return hashlib.sha256(content.encode("ascii")).hexdigest()


def _is_current(prefix: str, fingerprint: str) -> bool:
    try:
        sidecar = Sidecar.read(prefix)
        if sidecar is None or sidecar.fingerprint != fingerprint:
            return False
        validate_dataset(prefix, sidecar.vocab_size)
        load_dataset_tokenizer(prefix)
    except DataError:
        return False
    return True


def _load_or_train_tokenizer(
    options: PrepareOptions, kept: Mapping[str, str | None], pieces: list[corpus.Piece], output: PartialOutput
) -> tuple[TextTokenizer, tuple[str, ...]]:
    """Returns the tokenizer and its files: those that the user named, or new ones among the output.

    A named file that is not below the directory of the output is copied there: a data set keeps its tokenizer.
    """
    kind = TYPES[options.tokenizer_type].cls
    if options.vocab_file is not None:
        given = list_given_files(options.tokenizer_type, options.vocab_file, options.merge_file)
        paths = tuple(
            path if name is not None else shutil.copyfile(path, output.locate(suffix))
            for path, (suffix, name) in zip(given, kept.items(), strict=True)
        )
        return kind.load(*paths), paths
    chosen = corpus.sample_pieces(pieces, options.train_bytes)
    sizes = [part.end - part.start for piece in chosen for part in piece]
    with Progress(options.prog, "training the vocabulary", min(sum(sizes), options.train_bytes) or None) as progress:
        texts = _read_training_texts(chosen, options, progress)
        tokenizer = kind.train(texts, options.vocab_size, output.folder)
    return tokenizer, tuple(map(output.locate, kept))


def _find_kept_files(options: PrepareOptions) -> dict[str, str | None]:
    """Maps the suffix of each tokenizer file to the name of the user's own file, if that can stay where it is.

    The name is relative to the data set's directory. None means that the file is written among the output.
    """
    given = (options.vocab_file, options.merge_file)
    suffixes = TYPES[options.tokenizer_type].suffixes
    return {
        suffix: _name_beside(options.output_prefix, path, suffix) for path, suffix in zip(given, suffixes, strict=False)
    }


def _read_training_texts(pieces: Iterable[corpus.Piece], options: PrepareOptions, progress: Progress) -> Iterator[str]:
    """Yields the first --train-bytes of the pieces' texts."""
    budget = options.train_bytes
    texts = (
        text.text
        for piece in pieces
        for text in read_texts(piece, options.text_key, corpus.LeftOut(), options.skip_bad_lines)
    )
    while budget > 0 and (text := next(texts, None)) is not None:
        content = text[:budget]  # characters, at most as many as bytes
        yield content
        num_bytes = len(content.encode("utf-8"))
        progress.update(num_bytes)
        budget -= num_bytes
    progress.begin_unmeasured("learning its merges")


def _write(
    output: PartialOutput,
    encoded: Iterable[Encoded],
    dtype: type[np.integer],
    progress: Progress,
    left_out: corpus.LeftOut,
) -> dict[str, Any]:
    """Writes what the workers encode; counts documents, sequences, tokens and source_bytes."""
    written: Counter[str] = Counter()
    with DatasetWriter(output.locate(".bin"), dtype) as writer, progress:
        for piece in encoded:
            writer.add(piece.ids, piece.lengths, piece.ends)
            written.update(documents=sum(piece.ends), sequences=len(piece.lengths))
            written.update(tokens=piece.ids.size, source_bytes=piece.source_bytes)
            left_out.update(piece.left_out)
            progress.update(piece.source_bytes)
        if written["documents"] == 0:
            raise DataError(
                f"there is no document in the input{_format_left_out(left_out)}; give other files with --input"
            )
        writer.finish(output.locate(".idx"))
    return dict(written)


def _name_beside(prefix: str, given: str | None, suffix: str) -> str | None:
    """Returns a named tokenizer file's path relative to the data set's directory; None if it is not below that."""
    folder = os.path.dirname(os.path.abspath(prefix))
    if given is None or not is_inside(given, folder):
        return None
    name = os.path.relpath(os.path.abspath(given), folder)
    if name.startswith(os.pardir + os.sep):  # it is below only through a link
        name = os.path.relpath(os.path.realpath(given), os.path.realpath(folder))
    # "./" marks the user's own file of the same name as a trained one, which no later run may replace.
    return os.path.join(os.curdir, name) if name == os.path.basename(prefix) + suffix else name


def _format_left_out(left_out: corpus.LeftOut) -> str:
    """Formats what was left out for a message: '; left out: 2 binary (the first: a.png)'."""
    reasons = [
        f"{count} {reason} (the first: {corpus.format_path(left_out.first[reason])})"
        for reason, count in sorted(left_out.count.items())
    ]
    return f"; left out: {', '.join(reasons)}" if reasons else ""


def _report(options: PrepareOptions, sidecar: Sidecar, left_out: corpus.LeftOut, seconds: float) -> None:
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
    if sidecar.sequences < _SMALL_DATA_SET:
        print(
            f"{options.prog}: {sidecar.sequences} sequences are few: a share of --split below "
            f"{100 / sidecar.sequences:.1f} % holds none"
        )


class Progress:
    """Shows the progress of `what`: a bar on a terminal, else a line every few seconds. A context manager.

    A thread prints, so that lines also appear while one call takes minutes.
    """

    def __init__(self, prog: str, what: str, total_bytes: int | None):
        self._ended = threading.Event()
        self._is_on_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total_bytes,
            unit="B",
            unit_scale=True,
            desc=what if self._is_on_terminal else f"{prog}: {what}",
            bar_format=None if self._is_on_terminal else _LINE,
            file=sys.stderr if self._is_on_terminal else io.StringIO(),
        )
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._bar.close()

    def update(self, num_bytes: int) -> None:
        done = self._bar.n + num_bytes
        self._bar.n = done if self._bar.total is None else min(done, self._bar.total)

    def begin_unmeasured(self, phase: str) -> None:
        """Shows from now on, when everything is read, `phase`, whose duration is unknown."""
        self._bar.set_description_str(f"{self._bar.desc}, {phase}", refresh=False)

    def format_line(self) -> str:
        """Returns the line of a log."""
        return str(self._bar)

    def _report(self) -> None:
        while not self._ended.wait(0.2 if self._is_on_terminal else _SECONDS_BETWEEN_LINES):
            if self._is_on_terminal:
                self._bar.refresh()
            else:
                print(self.format_line(), file=sys.stderr, flush=True)

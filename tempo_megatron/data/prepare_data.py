"""Makes a data set that Megatron-LM and this repository's trainer read: of texts, JSON lines, trees and tables."""

from __future__ import annotations

import hashlib
import io
import json
import os
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
    PartialOutput,
    Sidecar,
    load_dataset_tokenizer,
    validate_dataset,
)
from tempo_megatron.data.documents import Encoded, check_first_texts, encode, read_texts
from tempo_megatron.data.prepare_arguments import parse_prepare_arguments
from tempo_megatron.data.tokenizer_types import GPT2_BPE, TYPES, list_given_files

_SECONDS_BETWEEN_LINES = 5.0
_LINE = "{desc}: {n_fmt}B of {total_fmt}B, {rate_fmt}, {elapsed} so far, {remaining} left"


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
    fingerprint = _compute_fingerprint(options, tokenizer and tokenizer.unique_identifiers, files)
    if options.skip_existing and _is_current(prefix, fingerprint):
        if os.path.isdir(prefix + ".partial"):  # left by a run that was killed at its very end
            with suppress(DataError), PartialOutput(prefix):
                pass
        print(
            f"{options.prog}: {corpus.format_path(prefix)} is already there, made from the same files in the "
            "same way; it is kept"
        )
        return
    with warnings.catch_warnings():  # of optional packages
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset  # which takes seconds

    pieces = corpus.cut_pieces(files, cuts_texts=kind.cuts_texts)
    total_bytes = None if any(file.is_table for file in files) else sum(file.end for file in files)
    suffixes = (".json", *kind.suffixes, ".bin", ".idx")
    with (
        PartialOutput(prefix, suffixes, overwrite=options.overwrite) as output,
        tempfile.TemporaryDirectory() as folder,
    ):
        if tokenizer is None:
            tokenizer = _train_tokenizer(options, pieces, folder)
            given = tuple(os.path.join(folder, suffix[1:]) for suffix in kind.suffixes)
        for path, suffix in zip(given, kind.suffixes, strict=True):
            shutil.copyfile(path, output.locate(suffix))
        dtype = indexed_dataset.DType.optimal_dtype(tokenizer.vocab_size)
        with show_progress(options.prog, "tokenizing", total_bytes) as bar:
            builder = indexed_dataset.IndexedDatasetBuilder(output.locate(".bin"), dtype=dtype)
            written = _write(builder, output.locate(".idx"), encode(pieces, options, tokenizer), bar, left_out)
        names = [os.path.basename(prefix) + suffix for suffix in kind.suffixes]
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
        check_first_texts(files, options)
    if options.json_key is not None and not any(file.is_json or file.is_table for file in files):
        raise DataError("--json-key is for .json and .jsonl files and tables, and the input has none; leave it out")
    return files


def _compute_fingerprint(options: Namespace, given: dict[str, str] | None, files: list[corpus.Part]) -> str:
    """Returns a digest of everything that the output depends on; files count by name, size and time of change.

    `given` are the unique_identifiers of the tokenizer that the user named.
    """
    vocabulary: list[Any] = [options.vocab_size, options.train_bytes]
    if given is not None:
        vocabulary = [value for key, value in given.items() if key.endswith("sha256")]
    if options.tokenizer_type != GPT2_BPE:
        vocabulary.append(options.tokenizer_type)
    if options.split_sentences is not None:
        vocabulary.append(f"sentences by {options.split_sentences}")
    paths = [file.path if file.is_on_hub else os.path.abspath(file.path) for file in files]
    inputs = [(path, file.end, file.version, file.is_named) for path, file in zip(paths, files, strict=True)]
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


def _train_tokenizer(options: Namespace, pieces: list[corpus.Piece], folder: str) -> Any:
    """Trains a vocabulary on the first --train-bytes of a sample of the pieces' texts."""
    chosen = corpus.sample_pieces(pieces, options.train_bytes)
    total = min(sum(part.end - part.start for piece in chosen for part in piece), options.train_bytes)
    with show_progress(options.prog, "training the vocabulary", total or None) as bar:

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
) -> dict[str, int]:
    """Writes what the workers encode and its index; counts documents, sequences, tokens and source_bytes."""
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
            left_out.update(piece.left_out)
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
    """Formats what was left out for a message: '; left out: 2 binary (the first: a.png)'."""
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
def show_progress(prog: str, what: str, total_bytes: int | None) -> Iterator[tqdm[Any]]:
    """Shows the progress of `what`: a bar on a terminal, else a line every few seconds.

    A thread prints, so that lines also appear while one call takes minutes.
    """
    is_on_terminal = sys.stderr.isatty()
    bar = tqdm(
        total=total_bytes,
        unit="B",
        unit_scale=True,
        desc=what if is_on_terminal else f"{prog}: {what}",
        bar_format=None if is_on_terminal else _LINE,
        file=sys.stderr if is_on_terminal else io.StringIO(),
    )
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(0.2 if is_on_terminal else _SECONDS_BETWEEN_LINES):
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

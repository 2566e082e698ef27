"""Reads the documents of a data set's pieces, and tokenizes them in threads: the library lets others run meanwhile."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from tempo_megatron.data import DataError, corpus
from tempo_megatron.data.corpus import LeftOut, Part, Piece, format_path
from tempo_megatron.data.sentences import LONGEST_SENTENCE, split_sentences
from tempo_megatron.data.tokenizer import TextTokenizer
from tempo_megatron.extras import check_installed

_ROWS_AT_ONCE = 1024


class Text(NamedTuple):
    """A document, or a part of one; `where` names its place in a message."""

    text: str
    is_end: bool
    where: str
    is_start: bool = True


class Encoded(NamedTuple):
    """The tokens of some texts. A sequence is a sentence, a document, or the piece's part of a larger document."""

    ids: list[np.ndarray]
    """int32, of each sequence; the end-of-document id, if the tokenizer has one, follows each document."""
    ends: list[bool]
    """Whether the sequence ends its document."""
    empty: list[str]
    """Where documents without a token come from."""
    source_bytes: int


def read_texts(piece: Piece, options: Namespace, left_out: LeftOut) -> Iterator[Text]:
    """Yields the documents of a piece, in order, and counts in left_out what it leaves out.

    Raises: DataError (a ValueError) if a file cannot be read, if one that the user named is not UTF-8, or for a bad
        line without --skip-bad-lines.
    """
    for part in piece:
        read = _read_rows if part.is_table else _read_json_lines if part.kind == "json" else _read_text
        try:
            yield from read(part, options, left_out)
        except (EOFError, OSError, zlib.error) as error:
            raise corpus.describe_fault(part.path, error) from error


def _open(part: Part) -> Any:
    if part.is_compressed and part.path.lower().endswith(".gz"):
        return gzip.open(part.path, "rb")
    if part.is_compressed:
        check_installed(part.path, "data", "datasets")
        import pyarrow  # which `datasets` brings

        return io.BufferedReader(pyarrow.input_stream(part.path, compression="zstd"))
    with open(part.path, "rb") as stream:
        stream.seek(part.start)
        content = stream.read(part.end - part.start)
    if len(content) < part.end - part.start:
        raise DataError(f"{format_path(part.path)} became shorter while it was read; start again")
    return io.BytesIO(content)


def _read_text(part: Part, options: Namespace, left_out: LeftOut) -> Iterator[Text]:
    with _open(part) as stream:
        content = stream.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        if options.skip_bad_lines:
            # If a line is divided between two pieces, only its bad part is left out: a piece does not know the next.
            text = _decode_good_lines(part, content, left_out)
            if not text and not (part.start > 0 and part.is_last):  # a document that began in another piece must end
                return
        # A part of a document that began in another piece can no longer be left out.
        elif part.is_named or part.start > 0 or not part.is_last:
            raise DataError(
                f"{format_path(part.path)} is not UTF-8 (byte 0x{content[error.start]:02x} at offset "
                f"{part.start + error.start}); convert it, for example with iconv, or leave out such lines with "
                "--skip-bad-lines"
            ) from error
        else:
            left_out.add("not UTF-8", part.path)
            return
    yield Text(text, part.is_last, format_path(part.path), part.start == 0)


def _decode_good_lines(part: Part, content: bytes, left_out: LeftOut) -> str:
    good, offset = "", part.start
    for line in content.splitlines(keepends=True):
        try:
            good += line.decode("utf-8")
        except UnicodeDecodeError:
            left_out.add("bad lines", f"{part.path} at offset {offset}")
        offset += len(line)
    return good


def _read_json_lines(part: Part, options: Namespace, left_out: LeftOut) -> Iterator[Text]:
    path, end = format_path(part.path), part.start
    with _open(part) as lines:
        for index, line in enumerate(lines, 1):
            start, end = end, end + len(line)
            if start == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                text = _parse_json_text(line.removesuffix(b"\n"), options.text_key)
            except DataError as error:
                if options.skip_bad_lines:
                    left_out.add("bad lines", f"{part.path} at offset {start}")
                    continue
                number = _count_lines_before(part) + index
                raise DataError(
                    f"line {number} of {path} {error}, or leave out such lines with --skip-bad-lines"
                ) from error
            if text:
                yield Text(text, True, path)
            else:
                left_out.add("empty", part.path)


def _parse_json_text(line: bytes, key: str) -> str:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError("is not UTF-8; convert the file, for example with iconv") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"is not JSON ({error}); .json and .jsonl files hold one JSON object a line, rename a file that does not"
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"is a JSON {type(value).__name__}, not an object; expected {{{json.dumps(key)}: TEXT}}")
    if key not in value:
        keys = ", ".join(sorted(value)[:8]) or "none"
        raise DataError(f"has no key {key!r} (its keys: {keys}); name the key of the text with --json-key")
    text = value[key]
    if not isinstance(text, str):
        raise DataError(f"has a value of type {type(text).__name__} under {key!r}, not a text; see --json-key")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"has half of a surrogate pair ({error.reason}), which is no character; repair it") from error
    return text


def _count_lines_before(part: Part) -> int:
    number = 0
    with open(part.path, "rb") as stream:
        while stream.tell() < part.start:
            stream.readline()
            number += 1
    return number


def _read_rows(part: Part, options: Namespace, left_out: LeftOut) -> Iterator[Text]:
    path, num_bytes = format_path(part.path), 0
    for row, text in enumerate(_stream_column(part, options.text_key)):
        if text:
            yield Text(text, True, path)
            num_bytes += len(text.encode("utf-8"))
            if not part.is_last and num_bytes >= part.end:
                return
        elif text is not None:
            left_out.add("empty", part.path)
        elif options.skip_bad_lines:
            left_out.add("bad lines", f"{part.path} at row {row}")
        else:
            raise DataError(
                f"row {row} of {path} has no text under {options.text_key!r}; leave out such rows with --skip-bad-lines"
            )


def _stream_column(part: Part, column: str) -> Iterator[str | None]:
    """Yields the text of `column` in each row, in order; None is a missing text. Nothing is stored on the disk."""
    check_installed(part.path, "data", "datasets")
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error says it
    path = part.path
    only: dict[str, Any] = {}  # what keeps the other columns from being read
    if part.kind == "hub":
        where: dict[str, Any] = dict(zip(("path", "name", "split"), corpus.split_hub_name(path), strict=True))
    else:
        kind, how = corpus.TABLES[os.path.splitext(path)[1].lower()]
        where = {"path": kind, "data_files": [path], "split": "train", **how}
        if kind == "parquet":
            only = {"columns": [column]}
        elif kind == "csv":
            only = {"usecols": [column], "converters": {column: str}}
    try:
        table = datasets.load_dataset(**where, streaming=True)
        columns = table.column_names or list(next(iter(table), {column: ""}))
        if column not in columns:
            names = ", ".join(columns[:8])
            raise DataError(
                f"{path} has no column {column!r} (its columns: {names}); name that of the text by --json-key"
            )
        table = datasets.load_dataset(**where, **only, streaming=True).select_columns([column])
        for text in (text for batch in table.iter(_ROWS_AT_ONCE) for text in batch[column]):
            if text is not None and not isinstance(text, str):
                found = type(text).__name__
                raise DataError(f"the column {column!r} of {path} holds {found}, not text; see --json-key")
            yield text
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise corpus.describe_fault(path, error, is_on_hub=part.kind == "hub") from error


def encode(
    pieces: Iterable[Piece], options: Namespace, tokenizer: TextTokenizer, left_out: LeftOut
) -> Iterator[Encoded]:
    """Reads all pieces and tokenizes them in --workers threads; yields their tokens in order."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one core per thread
    executor = ThreadPoolExecutor(options.workers)
    ahead: deque[Future[Encoded]] = deque()
    try:
        for texts, source_bytes in _read_batches(pieces, options, left_out):
            ahead.append(executor.submit(_encode_texts, tokenizer, texts, options.split_sentences, source_bytes))
            if len(ahead) > options.workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)


def _read_batches(pieces: Iterable[Piece], options: Namespace, left_out: LeftOut) -> Iterator[tuple[list[Text], int]]:
    """Yields the texts of each piece with their bytes in the file, of a table some rows at a time."""
    for piece in pieces:
        texts: list[Text] = []
        num_bytes = 0 if piece[0].is_table else sum(part.end - part.start for part in piece)
        for text in read_texts(piece, options, left_out):
            texts.append(text)
            if piece[0].is_table:
                num_bytes += len(text.text.encode("utf-8"))
                if num_bytes >= options.row_bytes:
                    yield texts, num_bytes
                    texts, num_bytes = [], 0
        yield texts, num_bytes


def _encode_texts(tokenizer: TextTokenizer, texts: list[Text], way: str | None, source_bytes: int) -> Encoded:
    empty: list[str] = []
    if way is None:
        ids, ends = _tokenize(tokenizer, texts), [text.is_end for text in texts]
    else:
        ids, ends = _tokenize_sentences(tokenizer, texts, way, empty)
    if tokenizer.eod is not None:
        end = np.array([tokenizer.eod], dtype=np.int32)
        ids = [np.concatenate([own, end]) if is_end else own for own, is_end in zip(ids, ends, strict=True)]
    return Encoded(ids, ends, empty, source_bytes)


def _tokenize_sentences(
    tokenizer: TextTokenizer, texts: list[Text], way: str, empty: list[str]
) -> tuple[list[np.ndarray], list[bool]]:
    """Tokenizes every sentence and cuts long ones; returns their ids, and whether each is the last of its document."""
    sentences = [[text._replace(text=sentence) for sentence in split_sentences(text.text, way)] for text in texts]
    tokens = iter(_tokenize(tokenizer, [sentence for own in sentences for sentence in own]))
    ids: list[np.ndarray] = []
    ends: list[bool] = []
    for text, own in zip(texts, sentences, strict=True):
        parts = [
            sentence[start : start + LONGEST_SENTENCE]
            for sentence in islice(tokens, len(own))
            for start in range(0, sentence.size, LONGEST_SENTENCE)
        ]
        if not parts and text.is_end:
            if text.is_start:
                empty.append(text.where)
            else:
                parts = [np.empty(0, np.int32)]  # an empty sequence that ends the document begun in an earlier piece
        ids += parts
        ends += [text.is_end and number == len(parts) - 1 for number in range(len(parts))]
    return ids, ends


def _tokenize(tokenizer: TextTokenizer, texts: list[Text]) -> list[np.ndarray]:
    try:
        return tokenizer.tokenize_batch([text.text for text in texts])
    except DataError:
        for text in texts:  # again, one at a time, to find the place
            try:
                tokenizer.tokenize(text.text)
            except DataError as error:
                raise DataError(f"{text.where}: {error}") from error
        raise

"""Reads and tokenizes the documents of a data set's pieces, in worker processes."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import signal
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import wait
from typing import Any, BinaryIO, cast

import numpy as np

from tempo_megatron.beside import first_line
from tempo_megatron.data import DataError
from tempo_megatron.data.corpus import InputFile, LeftOut, Part, Piece, cut_pieces, format_path
from tempo_megatron.data.sentences import LONGEST_SENTENCE, split_sentences
from tempo_megatron.data.tables import stream_column
from tempo_megatron.data.tokenizer import TextTokenizer
from tempo_megatron.data.tokenizer_types import TYPES

_BYTES_OF_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a piece. A sequence is a sentence, a document, or the piece's part of a larger document."""

    ids: np.ndarray
    """[sum of lengths]; the end-of-document id, if the tokenizer has one, follows each document."""
    lengths: list[int]
    """Tokens of each sequence."""
    ends: list[bool]
    """Whether the sequence ends its document."""
    source_bytes: int
    left_out: LeftOut


@dataclass(frozen=True, slots=True)
class Text:
    """A document, or a part of one; `where` names its place in a message."""

    text: str
    is_end: bool
    where: str
    is_start: bool = True


@dataclass(frozen=True, slots=True)
class Rows:
    """Documents of a table, about a MiB of them, which one process reads for all."""

    texts: list[Text]
    source_bytes: int
    left_out: LeftOut


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the documents of a data set are read and tokenized."""

    tokenizer_type: str
    tokenizer_files: tuple[str, ...]
    json_key: str
    dtype: Any
    skip_bad_lines: bool = False
    sentences: str | None = None
    """How documents are split into sentences (see sentences.py); None does not split them."""


def read_texts(piece: Piece, json_key: str, left_out: LeftOut, skip_bad_lines: bool = False) -> Iterator[Text]:
    """Yields the documents of a piece, in order, and counts in left_out what it leaves out.

    It leaves out a file of a directory tree that is not UTF-8. With skip_bad_lines it leaves out bad lines: those that
    are not UTF-8, and in JSON files those that are not an object with a text under json_key.

    Raises: DataError (a ValueError) if a file cannot be read, if one that the user named is not UTF-8, or for a bad
        line without skip_bad_lines.
    """
    for part in piece:
        read = _read_table if part.file.is_table else _read_json_texts if part.file.is_json else _read_text
        try:
            yield from read(part, json_key, left_out, skip_bad_lines)
        except (EOFError, OSError, zlib.error) as error:
            path = format_path(part.file.path)
            if isinstance(error, OSError) and error.errno is not None:
                raise DataError(f"cannot read {path}: {error.strerror}") from error
            raise DataError(
                f"{path} is damaged or not what its name says ({first_line(error)}); get it again"
            ) from error


def _open(part: Part) -> BinaryIO:
    """Opens a part, unpacked. Raises: DataError (a ValueError), or OSError, if it cannot be read."""
    path = part.file.path
    unpacked: Any
    if part.file.is_compressed and path.lower().endswith(".gz"):
        unpacked = gzip.open(path, "rb")  # noqa: SIM115 (closed by who reads it)
        return cast(BinaryIO, unpacked)
    if part.file.is_compressed:
        import pyarrow  # which `datasets` brings

        unpacked = pyarrow.input_stream(path, compression="zstd")
        return io.BufferedReader(unpacked)
    with open(path, "rb") as stream:
        stream.seek(part.start)
        content = stream.read(part.end - part.start)
    if len(content) < part.end - part.start:
        raise DataError(f"{format_path(path)} became shorter while it was read; start again")
    return io.BytesIO(content)


def _read_table(part: Part, json_key: str, left_out: LeftOut, skip_bad_lines: bool) -> Iterator[Text]:
    file = part.file
    path = format_path(file.path)
    num_bytes = 0
    for row, text in enumerate(stream_column(file.path, json_key, is_on_hub=file.is_on_hub)):
        if text:
            yield Text(text, True, path)
            num_bytes += len(text.encode("utf-8"))
            if file.limit is not None and num_bytes >= file.limit:
                return
        elif text is not None:
            left_out.add("empty", file.path)
        elif skip_bad_lines:
            left_out.add("bad lines", f"{file.path} at row {row}")
        else:
            raise DataError(
                f"row {row} of {path} has no text under {json_key!r}; leave out such rows with --skip-bad-lines"
            )


def _read_tables(pieces: Iterable[Piece], encoding: Encoding) -> Iterator[Piece | Rows]:
    """Yields the pieces, of tables their documents."""
    for piece in pieces:
        if not piece[0].file.is_table:
            yield piece
            continue
        left_out = LeftOut()
        texts: list[Text] = []
        num_bytes = 0
        for text in read_texts(piece, encoding.json_key, left_out, encoding.skip_bad_lines):
            texts.append(text)
            num_bytes += len(text.text.encode("utf-8"))
            if num_bytes >= _BYTES_OF_ROWS:
                yield Rows(texts, num_bytes, LeftOut())
                texts, num_bytes = [], 0
        yield Rows(texts, num_bytes, left_out)


def _read_text(part: Part, json_key: str, left_out: LeftOut, skip_bad_lines: bool) -> Iterator[Text]:
    path = format_path(part.file.path)
    with _open(part) as stream:
        content = stream.read()
    if skip_bad_lines:
        # If a line is divided between two pieces, only its bad part is left out: a piece does not know the next one.
        text = _decode_good_lines(part, content, left_out)
        if text or (part.start > 0 and part.is_last):  # a document that began in another piece must end
            yield Text(text, part.is_last, path, part.start == 0)
        return
    try:
        yield Text(content.decode("utf-8"), part.is_last, path, part.start == 0)
    except UnicodeDecodeError as error:
        # A part of a document that began in another piece can no longer be left out.
        if part.file.is_named or part.start > 0 or not part.is_last:
            raise DataError(
                f"{path} is not UTF-8 (byte 0x{content[error.start]:02x} at offset {part.start + error.start}); "
                "convert it, for example with iconv, or leave out such lines with --skip-bad-lines"
            ) from error
        left_out.add("not UTF-8", part.file.path)


def _decode_good_lines(part: Part, content: bytes, left_out: LeftOut) -> str:
    """Returns the content without the lines that are not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        pass
    good: list[str] = []
    offset = part.start
    for line in content.splitlines(keepends=True):
        try:
            good.append(line.decode("utf-8"))
        except UnicodeDecodeError:
            left_out.add("bad lines", f"{part.file.path} at offset {offset}")
        offset += len(line)
    return "".join(good)


def _read_json_texts(part: Part, json_key: str, left_out: LeftOut, skip_bad_lines: bool) -> Iterator[Text]:
    with _open(part) as lines:
        yield from _parse_lines(lines, part, json_key, left_out, skip_bad_lines)


def _parse_lines(
    lines: Iterable[bytes], part: Part, json_key: str, left_out: LeftOut, skip_bad_lines: bool
) -> Iterator[Text]:
    path = format_path(part.file.path)
    offset = part.start
    for index, whole_line in enumerate(lines):
        line, start = whole_line.removesuffix(b"\n"), offset
        offset += len(whole_line)
        if start == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            text = _parse_json_text(line, json_key)
        except DataError as error:
            if skip_bad_lines:
                left_out.add("bad lines", f"{part.file.path} at offset {start}")
                continue
            number = _count_newlines_before(part) + index + 1
            raise DataError(
                f"line {number} of {path} {error}, or leave out such lines with --skip-bad-lines"
            ) from error
        if text:
            yield Text(text, True, path)
        else:
            left_out.add("empty", part.file.path)


def check_first_texts(files: list[InputFile], json_key: str) -> None:
    """Raises DataError if the first line or row of a file holds no text, before long work would fail at it."""
    for file in files:
        if file.is_json or file.is_table:
            next(read_texts(cut_pieces([file])[0], json_key, LeftOut()), None)


def _parse_json_text(line: bytes, json_key: str) -> str:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError("is not UTF-8; convert the file, for example with iconv") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"is not JSON ({error}); .json and .jsonl files hold one JSON object a line, rename a file that does not"
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"is a JSON {type(value).__name__}, not an object; expected {{{json.dumps(json_key)}: TEXT}}")
    if json_key not in value:
        keys = ", ".join(sorted(value)[:8]) or "none"
        raise DataError(f"has no key {json_key!r} (its keys: {keys}); name the key of the text with --json-key")
    text = value[json_key]
    if not isinstance(text, str):
        raise DataError(f"has a value of type {type(text).__name__} under {json_key!r}, not a text; see --json-key")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"has half of a surrogate pair ({error.reason}), which is no character; repair it") from error
    return text


def _count_newlines_before(part: Part) -> int:
    with open(part.file.path, "rb") as stream:
        blocks = iter(lambda: stream.read(min(1 << 20, part.start - stream.tell())), b"")
        return sum(block.count(b"\n") for block in blocks)


def encode_piece(tokenizer: TextTokenizer, piece: Piece | Rows, encoding: Encoding) -> Encoded:
    """Reads and tokenizes one piece. Raises DataError as read_texts and tokenize_batch do."""
    if isinstance(piece, Rows):
        texts, left_out, source_bytes = piece.texts, piece.left_out, piece.source_bytes
    else:
        left_out = LeftOut()
        texts = list(read_texts(piece, encoding.json_key, left_out, encoding.skip_bad_lines))
        source_bytes = sum(part.end - part.start for part in piece)
    if encoding.sentences is None:
        ids, ends = _tokenize(tokenizer, texts), [text.is_end for text in texts]
    else:
        ids, ends = _tokenize_sentences(tokenizer, texts, encoding.sentences, left_out)
    if tokenizer.eod is not None:
        end = np.array([tokenizer.eod], dtype=np.int32)
        ids = [np.concatenate([own, end]) if is_end else own for own, is_end in zip(ids, ends, strict=True)]
    return Encoded(
        ids=np.concatenate(ids).astype(encoding.dtype) if ids else np.empty(0, encoding.dtype),
        lengths=[own.size for own in ids],
        ends=ends,
        source_bytes=source_bytes,
        left_out=left_out,
    )


def _tokenize_sentences(
    tokenizer: TextTokenizer, texts: list[Text], way: str, left_out: LeftOut
) -> tuple[list[np.ndarray], list[bool]]:
    """Tokenizes every sentence and cuts long ones; returns their ids, and whether each is the last of its document."""
    sentences = [split_sentences(text.text, way) for text in texts]
    flat = [replace(text, text=sentence) for text, own in zip(texts, sentences, strict=True) for sentence in own]
    tokens = iter(_tokenize(tokenizer, flat))
    ids: list[np.ndarray] = []
    ends: list[bool] = []
    for text, own in zip(texts, sentences, strict=True):
        parts = [part for sentence in islice(tokens, len(own)) for part in _cut_sentence(sentence)]
        if not parts and text.is_end:
            if text.is_start:
                left_out.add("empty", text.where)
            else:
                parts = [np.empty(0, np.int32)]  # an empty sequence that ends the document begun in an earlier piece
        ids += parts
        ends += [text.is_end and number == len(parts) - 1 for number in range(len(parts))]
    return ids, ends


def _cut_sentence(ids: np.ndarray) -> list[np.ndarray]:
    return [ids[start : start + LONGEST_SENTENCE] for start in range(0, ids.size, LONGEST_SENTENCE)]


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


def encode(pieces: Iterable[Piece], encoding: Encoding, workers: int) -> Iterator[Encoded]:
    """Yields encode_piece of all pieces, in order.

    `workers` processes are a few pieces ahead of the reader; 1 works in this process.

    Raises: DataError (a ValueError) as encode_piece does, and if a worker was killed.
    """
    if workers == 1:
        tokenizer = TYPES[encoding.tokenizer_type].cls.load(*encoding.tokenizer_files)
        yield from (encode_piece(tokenizer, piece, encoding) for piece in _read_tables(pieces, encoding))
        return
    # A forkserver's children inherit no threads or locks of this process, and import nothing again.
    executor = ProcessPoolExecutor(workers, multiprocessing.get_context("forkserver"), _start_worker, (encoding,))
    try:
        rest = _read_tables(pieces, encoding)
        ahead: deque[Future[Encoded]] = deque(
            executor.submit(_encode_in_worker, piece) for piece in islice(rest, 3 * workers)
        )
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(executor.submit(_encode_in_worker, piece) for piece in islice(rest, 1))
    except BrokenProcessPool as error:
        raise DataError("a worker process was killed, perhaps for want of memory; use fewer --workers") from error
    finally:
        executor.shutdown(cancel_futures=True)


_worker: tuple[TextTokenizer, Encoding] | None = None


def _start_worker(encoding: Encoding) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent reports the interruption
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker = TYPES[encoding.tokenizer_type].cls.load(*encoding.tokenizer_files), encoding


def _leave_with_parent() -> None:
    """Ends this process when its parent has ended, since a killed parent cannot stop its waiting workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(piece: Piece | Rows) -> Encoded:
    assert _worker is not None
    tokenizer, encoding = _worker
    return encode_piece(tokenizer, piece, encoding)

"""Reads and tokenizes the documents of a data set's pieces, in worker processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from tempo_megatron.data import DataError
from tempo_megatron.data.corpus import InputFile, LeftOut, Part, Piece, format_path
from tempo_megatron.data.packed_files import decompress, read_rows
from tempo_megatron.data.sentences import LONGEST_SENTENCE, split_sentences
from tempo_megatron.data.tokenizer import TextTokenizer
from tempo_megatron.data.tokenizer_types import TYPES

_LONGEST_CHECKED_LINE = 1 << 20


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
        try:
            if part.file.is_parquet:
                yield from _read_parquet_texts(part, json_key, left_out, skip_bad_lines)
                continue
            content = _read_content(part)
        except OSError as error:
            raise DataError(f"cannot read {format_path(part.file.path)}: {error.strerror}") from error
        yield from (_read_json_texts if part.file.is_json else _read_text)(
            part, content, json_key, left_out, skip_bad_lines
        )


def _read_content(part: Part) -> bytes:
    if part.file.is_compressed:
        return decompress(part.file.path)
    with open(part.file.path, "rb") as stream:
        stream.seek(part.start)
        content = stream.read(part.end - part.start)
    if len(content) < part.end - part.start:
        raise DataError(f"{format_path(part.file.path)} became shorter while it was read; start again")
    return content


def _read_parquet_texts(part: Part, json_key: str, left_out: LeftOut, skip_bad_lines: bool) -> Iterator[Text]:
    path = format_path(part.file.path)
    for row, text in read_rows(part.file.path, json_key, part.start, part.end):
        if text:
            yield Text(text, True, path)
        elif text is not None:
            left_out.add("empty", part.file.path)
        elif skip_bad_lines:
            left_out.add("bad lines", f"{part.file.path} at row {row}")
        else:
            raise DataError(
                f"row {row} of {path} has no text under {json_key!r}; leave out such rows with --skip-bad-lines"
            )


def _read_text(part: Part, content: bytes, json_key: str, left_out: LeftOut, skip_bad_lines: bool) -> Iterator[Text]:
    path = format_path(part.file.path)
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


def _read_json_texts(
    part: Part, content: bytes, json_key: str, left_out: LeftOut, skip_bad_lines: bool
) -> Iterator[Text]:
    path = format_path(part.file.path)
    offset = part.start
    for index, whole_line in enumerate(content.split(b"\n")):
        line, start = whole_line, offset
        offset += len(whole_line) + 1
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


def check_first_lines(files: Iterable[InputFile], json_key: str) -> None:
    """Raises DataError if the first line of a JSON file holds no text, before long work would fail at it.

    It does not check a line of more than a MiB.
    """
    for file in files:
        if file.is_parquet:
            next(_read_parquet_texts(Part(file, 0, file.size, is_last=True), json_key, LeftOut(), False), None)
        if not file.is_json:
            continue
        content = b""
        with suppress(OSError):  # read_texts reports the error
            if file.is_compressed:
                content = decompress(file.path, _LONGEST_CHECKED_LINE)
            else:
                with open(file.path, "rb") as stream:
                    content = stream.read(min(file.size, _LONGEST_CHECKED_LINE))
        first = len(content) - len(content.lstrip(b"\xef\xbb\xbf \t\r\n"))
        end = content.find(b"\n", first)
        if end < 0 and len(content) < _LONGEST_CHECKED_LINE:
            end = len(content)
        if end > 0:
            part = Part(file, 0, end, is_last=True)
            for _ in _read_json_texts(part, content[:end], json_key, LeftOut(), skip_bad_lines=False):
                pass


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


def encode_piece(tokenizer: TextTokenizer, piece: Piece, encoding: Encoding) -> Encoded:
    """Reads and tokenizes one piece. Raises DataError as read_texts and tokenize_batch do."""
    left_out = LeftOut()
    texts = list(read_texts(piece, encoding.json_key, left_out, encoding.skip_bad_lines))
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
        source_bytes=sum(part.end - part.start for part in piece),
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
        yield from (encode_piece(tokenizer, piece, encoding) for piece in pieces)
        return
    # A forkserver's children inherit no threads or locks of this process, and import nothing again.
    executor = ProcessPoolExecutor(workers, multiprocessing.get_context("forkserver"), _start_worker, (encoding,))
    try:
        rest = iter(pieces)
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


def _encode_in_worker(piece: Piece) -> Encoded:
    assert _worker is not None
    tokenizer, encoding = _worker
    return encode_piece(tokenizer, piece, encoding)

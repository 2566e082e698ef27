"""Reads, checks and replaces a data set: Megatron's PREFIX.bin and .idx, and PREFIX.json, which says how it was made.

Data made by Megatron-LM has no PREFIX.json; it is read with the tokenizer files that the user names.
"""

from __future__ import annotations

import difflib
import fcntl
import glob
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from tempo_megatron.data import DataError
from tempo_megatron.data.tokenizer_types import GPT2_BPE, TYPES, list_given_files
from tempo_megatron.disk import flush_to_disk

_FORMAT_NAME = "tempo-megatron data set"
FORMAT = f"{_FORMAT_NAME} 1"
# The files of a data set, in the order of the renames.
SUFFIXES = (
    *(".json", "-vocab.txt", "-vocab.json", "-merges.txt", "-tokenizer.json", "-tokenizer_config.json"),
    *(".bin", ".idx"),
)
_LOCK = "prepare_data.lock"
_OPTIONAL = {"tokenizer_type": GPT2_BPE, "split_sentences": ""}

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document borders
_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sidecar:
    """The content of PREFIX.json. File names are relative to its own directory, and never lead out of it.

    A tokenizer without merges has "" for their file and digest. A field with a default is written only if it differs.
    """

    format: str = FORMAT
    vocab_file: str
    merge_file: str
    vocab_sha256: str
    merge_sha256: str
    vocab_size: int
    eod: int
    documents: int
    sequences: int
    tokens: int
    dtype: str
    source_bytes: int
    left_out: dict[str, int]
    fingerprint: str
    tokenizer_type: str = _OPTIONAL["tokenizer_type"]
    split_sentences: str = _OPTIONAL["split_sentences"]
    """How the documents were split into sentences; "" if they were not."""

    @classmethod
    def read(cls, prefix: str) -> Sidecar | None:
        content = _read_description(prefix)
        if content is None:
            return None
        types = {field.name: str(field.type).partition("[")[0] for field in fields(cls)}
        content = {**_OPTIONAL, **content}
        if content["format"] != FORMAT or types != {name: type(value).__name__ for name, value in content.items()}:
            raise DataError(f"{prefix}.json is of another version or was edited by hand; prepare the data again")
        if content["tokenizer_type"] not in TYPES:
            raise DataError(
                f"{prefix}.json names the tokenizer {content['tokenizer_type']}, which is not known here; expected one "
                f"of {', '.join(TYPES)}, prepare the data again"
            )
        return cls(**content)

    def write(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as stream:
            content = {name: value for name, value in asdict(self).items() if _OPTIONAL.get(name) != value}
            json.dump(content, stream, indent=2)
            stream.write("\n")

    def find_tokenizer_files(self, prefix: str) -> tuple[str, ...]:
        """Returns the paths of the tokenizer's files. A data set must not choose files outside of its own directory."""
        folder = os.path.dirname(prefix)
        homes = [folder, os.path.dirname(os.path.realpath(prefix + ".json"))]  # the prefix may be a link
        names = (self.vocab_file, self.merge_file)[: len(TYPES[self.tokenizer_type].suffixes)]
        files = tuple(os.path.join(folder, name) for name in names)
        for name, path in zip(names, files, strict=True):
            if not any(is_inside(path, home) for home in homes):
                raise DataError(
                    f"{prefix}.json names the tokenizer file {name}, which is outside of its directory; give "
                    f"{' and '.join(('--vocab-file', '--merge-file')[: len(names)])}, or prepare the data again"
                )
        return files


def is_inside(path: str, folder: str) -> bool:
    """Whether `path`, its links followed, is in `folder` or below."""
    root = os.path.realpath(folder)
    return os.path.commonpath([root, os.path.realpath(path)]) == root


def load_dataset_tokenizer(
    prefix: str, vocab_file: str | None = None, merge_file: str | None = None, types: Sequence[str] | None = None
) -> Any:
    """Loads the tokenizer of a data set from the files that the user named, else from those that PREFIX.json names.

    `types` are the allowed types of tokenizer; None allows all. For data without PREFIX.json it is the first type that
    has as many files as were named.

    Raises: DataError (a ValueError) if no files are named, if one is missing, broken or not the one that the data set
        was made with, or if the type is not allowed.
    """
    sidecar = Sidecar.read(prefix)
    allowed = tuple(TYPES) if types is None else tuple(types)
    number = sum(file is not None for file in (vocab_file, merge_file))
    by_number = next((name for name in allowed if len(TYPES[name].suffixes) == number), allowed[0])
    name = by_number if sidecar is None else sidecar.tokenizer_type
    if name not in allowed:
        raise DataError(
            f"{prefix} was made with a {name}; expected {' or '.join(allowed)}, prepare the data with "
            f"--tokenizer-type {allowed[0]}"
        )
    paths = list_given_files(name, vocab_file, merge_file)
    if not paths:
        if sidecar is None:
            has_merges = any(len(TYPES[name].suffixes) == 2 for name in allowed)
            options = "--vocab-file and --merge-file" if has_merges else "--vocab-file"
            raise DataError(f"{prefix}.json, which names the tokenizer of the data, is missing; give {options}")
        paths = sidecar.find_tokenizer_files(prefix)
    tokenizer = TYPES[name](*paths)
    for path, (key, digest) in zip(tokenizer.files, tokenizer.digests.items(), strict=True):
        if sidecar is not None and digest != getattr(sidecar, key):
            raise DataError(
                f"{path} is not the file that {prefix} was made with (its sha256 differs from the one in "
                f"{prefix}.json); give the right one, or prepare the data again"
            )
    return tokenizer


def validate_dataset(prefix: str, vocab_size: int, *, scan_bytes: int = 1 << 30) -> None:
    """Checks that PREFIX.bin and PREFIX.idx are whole and that a model of vocab_size tokens has a row for each token.

    It compares the vocabulary of PREFIX.json or, without that file, the token ids: all of them up to scan_bytes, else
    evenly spaced blocks of scan_bytes in total.

    Raises: DataError (a ValueError) if they are not.
    """
    dtype, tokens = _check_index(prefix)
    sidecar = Sidecar.read(prefix)
    if sidecar is not None:
        if sidecar.tokens != tokens:
            raise DataError(
                f"{prefix}.json counts {sidecar.tokens} tokens, {prefix}.idx {tokens}: they belong to different "
                f"data; prepare the data again, or remove {prefix}.json"
            )
        if sidecar.vocab_size > vocab_size:
            raise DataError(
                f"{prefix} was made with a vocabulary of {sidecar.vocab_size}, the model has {vocab_size}; give the "
                "model the vocabulary of its data"
            )
        return
    block = min(tokens, max(1, min(scan_bytes, 1 << 24) // dtype.itemsize))
    blocks = max(1, min(-(-tokens // block), scan_bytes // (block * dtype.itemsize)))
    content = np.memmap(prefix + ".bin", dtype, "r")
    for start in np.linspace(0, tokens - block, blocks, dtype=np.int64):
        part = content[start : start + block]
        wrong = int(part.min() if part.min() < 0 else part.max())
        if wrong < 0 or wrong >= vocab_size:
            raise DataError(
                f"{prefix}.bin has the token {wrong}, the model's vocabulary of {vocab_size} ends at {vocab_size - 1}; "
                "give the tokenizer that the data was made with"
            )


def _read_description(prefix: str) -> dict[str, Any] | None:
    try:
        with open(prefix + ".json", "rb") as stream:
            content = json.load(stream)
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as error:
        raise DataError(f"cannot read {prefix}.json: {error.strerror}; check it") from error
    is_ours = isinstance(content, dict) and str(content.get("format")).startswith(_FORMAT_NAME)
    return content if is_ours else None


def check_presence(prefix: str) -> None:
    """Raises DataError if PREFIX.idx or PREFIX.bin is missing; it names the nearest data set in the folder."""
    missing = [prefix + suffix for suffix in (".idx", ".bin") if not os.path.isfile(prefix + suffix)]
    if not missing:
        return
    stem, suffix = os.path.splitext(prefix)
    there = [path[: -len(".idx")] for path in glob.glob(os.path.join(glob.escape(os.path.dirname(prefix)), "*.idx"))]
    near = [stem] if suffix in (".idx", ".bin") else difflib.get_close_matches(prefix, there, n=1)
    raise DataError(
        f"{' and '.join(missing)} not found; prepare the data, or check --data-path"
        + (f": there is {near[0]}" if near and near[0] in there else "")
    )


def _check_index(prefix: str) -> tuple[Any, int]:
    check_presence(prefix)
    try:
        index = Path(prefix + ".idx").read_bytes()
        bin_size = os.path.getsize(prefix + ".bin")
    except OSError as error:
        raise DataError(f"cannot read {prefix}.idx or .bin: {error.strerror}") from error
    try:
        magic, version, code, sequences, borders = _INDEX_HEADER.unpack_from(index)
        dtype = np.dtype(_DTYPES[code])
        at = _INDEX_HEADER.size
        lengths = np.frombuffer(index, np.int32, sequences, at)
        places = np.frombuffer(index, np.int64, sequences, at + 4 * sequences)
        documents = np.frombuffer(index, np.int64, borders, at + 12 * sequences)
        ends = np.cumsum(lengths, dtype=np.int64)
        # The sequences follow one another without gaps, and the documents are runs of them.
        is_whole = magic == _INDEX_MAGIC and version == 1 and (lengths >= 0).all()
        is_whole &= np.array_equal(places, (ends - lengths) * dtype.itemsize)
        is_whole &= documents[0] == 0 and documents[-1] == sequences and (np.diff(documents) >= 0).all()
    except (struct.error, KeyError, ValueError, IndexError, OverflowError):
        is_whole = False
    if not is_whole:
        raise DataError(f"{prefix}.idx is not a whole index of Megatron's format; prepare the data again")
    tokens = int(lengths.sum(dtype=np.int64))
    if tokens == 0:
        raise DataError(f"{prefix} has no documents; prepare the data again")
    if tokens * dtype.itemsize != bin_size:
        raise DataError(
            f"{prefix}.bin has {bin_size} bytes, {prefix}.idx counts {tokens} tokens of {dtype.itemsize} bytes: they "
            "do not belong together; prepare the data again"
        )
    return dtype, tokens


@contextmanager
def replace_dataset(prefix: str, suffixes: Sequence[str], *, overwrite: bool) -> Iterator[Callable[[str], str]]:
    """Yields where to write the file of each suffix, in the folder PREFIX.partial; renames them all at the end.

    A kill at any time leaves the old data set, the new one, or none: nothing loads without the index, which is removed
    first and renamed last. PREFIX.json says that the other files are ours. It is renamed first, so that the next run
    may replace what a killed one has renamed. Of SUFFIXES, what prepare_data made of the others is removed.

    Raises: DataError if the place cannot be written, if another process writes there, or, without `overwrite`, if it
        holds files that prepare_data did not make.
    """
    parent, name = os.path.split(prefix)
    if not name or os.path.isdir(prefix):
        raise DataError(f"--output-prefix {prefix} is a directory; add the beginning of a file name to it")
    if not os.path.isdir(parent or "."):
        raise DataError(f"--output-prefix {prefix}: there is no directory {parent}; make it first")
    if folders := [prefix + suffix for suffix in SUFFIXES if os.path.isdir(prefix + suffix)]:
        raise DataError(f"--output-prefix {prefix}: {folders[0]} is a directory; choose another prefix")
    folder = prefix + ".partial"
    try:
        lock = _lock(prefix, folder)
    except OSError as error:
        raise DataError(
            f"--output-prefix {prefix}: cannot write in {parent or '.'} ({error.filename or folder}: "
            f"{error.strerror}); choose another place"
        ) from error

    def locate(suffix: str) -> str:
        return os.path.join(folder, f"prepare_data-{suffix[1:]}")  # no reader of data sets looks for such a name

    def empty() -> None:
        for suffix in SUFFIXES:
            with suppress(OSError):
                os.remove(locate(suffix))

    try:
        empty()  # what a killed process left
        _refuse_foreign_files(prefix, suffixes, overwrite)
        yield locate
        _refuse_foreign_files(prefix, suffixes, overwrite)  # again, because writing may have taken hours
        for suffix in suffixes:
            flush_to_disk(locate(suffix))
        obsolete = [suffix for suffix in SUFFIXES if suffix not in suffixes]
        kept = _find_foreign_files(prefix, obsolete)
        for path in (prefix + ".idx", *(prefix + suffix for suffix in obsolete)):
            if os.path.lexists(path) and path not in kept:
                os.remove(path)
                flush_to_disk(parent or ".")
        for suffix in sorted(suffixes, key=SUFFIXES.index):
            os.replace(locate(suffix), prefix + suffix)
            flush_to_disk(parent or ".")
    finally:
        empty()
        with suppress(OSError):
            os.remove(os.path.join(folder, _LOCK))
            os.rmdir(folder)
        os.close(lock)


def _find_foreign_files(prefix: str, suffixes: Iterable[str]) -> list[str]:
    content = _read_description(prefix)
    own: set[str] = set()
    if content is not None:
        own = {".json", ".bin", ".idx"}
        with suppress(DataError):  # they are not whole
            if _check_index(prefix)[1] != content.get("tokens"):
                own = {".json"}
        named = {content.get("vocab_file"), content.get("merge_file")}
        own |= {suffix for suffix in suffixes if os.path.basename(prefix) + suffix in named}
    return [prefix + suffix for suffix in suffixes if os.path.lexists(prefix + suffix) and suffix not in own]


def _refuse_foreign_files(prefix: str, suffixes: Sequence[str], overwrite: bool) -> None:
    if not overwrite and (foreign := _find_foreign_files(prefix, suffixes)):
        raise DataError(
            f"{foreign[0]} exists and was not made by prepare_data; choose another --output-prefix, or replace it with "
            "--overwrite"
        )


def _lock(prefix: str, folder: str) -> int:
    """Makes the folder and locks it for this process; returns the lock's file descriptor."""
    path = os.path.join(folder, _LOCK)
    while True:
        os.makedirs(folder, exist_ok=True)
        try:
            lock = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path), os.fstat(lock)):
                return lock
            os.close(lock)
        except FileNotFoundError:
            continue  # another process has just removed the folder
        except BlockingIOError as error:
            os.close(lock)
            raise DataError(
                f"another process is writing {prefix}; wait for it, or choose another --output-prefix"
            ) from error

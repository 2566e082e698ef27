"""Reads and checks a data set: Megatron's PREFIX.bin and PREFIX.idx, and PREFIX.json, which says how it was made.

Data made by Megatron-LM has no PREFIX.json; it is read with the tokenizer files that the user names.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from tempo_megatron.data import DataError
from tempo_megatron.data.tokenizer_types import GPT2_BPE, TYPES, list_given_files

_FORMAT_NAME = "tempo-megatron data set"
FORMAT = f"{_FORMAT_NAME} 1"

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document borders
_OPTIONAL = {"tokenizer_type": GPT2_BPE, "split_sentences": ""}
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


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
        """Reads PREFIX.json; returns None if it is missing or of another program.

        Raises: DataError (a ValueError) if it cannot be read or is not of this version.
        """
        content = _load_json(prefix + ".json")
        if not _is_ours(content):
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
        """Returns the paths of the tokenizer's files.

        Raises: DataError (a ValueError) if PREFIX.json names a file outside of its own directory: a data set may come
            from somebody else, and must not choose which files are read.
        """
        folder = os.path.dirname(prefix)
        # If the prefix is a link, the files may be beside its target.
        homes = [folder, os.path.dirname(os.path.realpath(prefix + ".json"))]
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


def find_foreign_files(prefix: str, suffixes: Iterable[str]) -> list[str]:
    """Lists the files PREFIX + suffix that exist and that do not belong to the PREFIX.json of prepare_data.

    Raises: DataError (a ValueError) if PREFIX.json cannot be read.
    """
    content = _load_json(prefix + ".json")
    own: set[str] = set()
    if _is_ours(content):
        own = {".json"} if _has_other_data(prefix, content.get("tokens")) else {".json", ".bin", ".idx"}
        named = {content.get("vocab_file"), content.get("merge_file")}
        own |= {suffix for suffix in suffixes if os.path.basename(prefix) + suffix in named}
    return [prefix + suffix for suffix in suffixes if os.path.lexists(prefix + suffix) and suffix not in own]


def _has_other_data(prefix: str, tokens: object) -> bool:
    """Whether PREFIX.bin and PREFIX.idx are whole and hold another number of tokens than PREFIX.json says."""
    try:
        return _check_index(prefix)[1] != tokens
    except DataError:
        return False


def load_dataset_tokenizer(
    prefix: str, vocab_file: str | None = None, merge_file: str | None = None, types: Sequence[str] | None = None
) -> Any:
    """Loads the tokenizer of a data set from the files that the user named, else from those that PREFIX.json names.

    Args:
        prefix: of the data set.
        vocab_file, merge_file: named by the user.
        types: the allowed types of tokenizer; None allows all. For data without PREFIX.json it is the first type that
            has as many files as were named.

    Raises: DataError (a ValueError) if no files are named, if one is missing, broken or not the one that the data set
        was made with, or if the type is not allowed.
    """
    sidecar = Sidecar.read(prefix)
    allowed = tuple(TYPES) if types is None else tuple(types)
    if sidecar is None:
        return _load_given_tokenizer(prefix, vocab_file, merge_file, allowed)
    name = sidecar.tokenizer_type
    if name not in allowed:
        raise DataError(
            f"{prefix} was made with a {name}; expected {' or '.join(allowed)}, prepare the data with "
            f"--tokenizer-type {allowed[0]}"
        )
    paths = list_given_files(name, vocab_file, merge_file) or sidecar.find_tokenizer_files(prefix)
    tokenizer = TYPES[name].cls.load(*paths)
    for path, key in zip(paths, ("vocab_sha256", "merge_sha256"), strict=False):
        if tokenizer.unique_identifiers[key] != getattr(sidecar, key):
            raise DataError(
                f"{path} is not the file that {prefix} was made with (its sha256 differs from the one in "
                f"{prefix}.json); give the right one, or prepare the data again"
            )
    return tokenizer


def _load_given_tokenizer(prefix: str, vocab_file: str | None, merge_file: str | None, types: Sequence[str]) -> Any:
    """Loads the tokenizer of data that another program made."""
    counts = {name: len(TYPES[name].suffixes) for name in types}
    number = sum(file is not None for file in (vocab_file, merge_file))
    name = next((name for name in types if counts[name] == number), types[0])
    paths = list_given_files(name, vocab_file, merge_file)
    if not paths:
        options = "--vocab-file and --merge-file" if 2 in counts.values() else "--vocab-file"
        raise DataError(f"{prefix}.json, which names the tokenizer of the data, is missing; give {options}")
    return TYPES[name].cls.load(*paths)


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
    smallest, largest = _find_token_range(prefix, dtype, tokens, scan_bytes)
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise DataError(
            f"{prefix}.bin has the token {wrong}, the model's vocabulary of {vocab_size} ends at {vocab_size - 1}; "
            "give the tokenizer that the data was made with"
        )


def _load_json(path: str) -> Any:
    """Reads a JSON file; returns None if it is missing or not JSON."""
    try:
        with open(path, "rb") as stream:
            return json.load(stream)
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check it") from error


def _is_ours(content: Any) -> bool:
    return isinstance(content, dict) and str(content.get("format")).startswith(_FORMAT_NAME)


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
    """Checks that a data set is whole; returns the dtype and the number of its tokens."""
    check_presence(prefix)
    broken = f"{prefix}.idx is not a whole index of Megatron's format; prepare the data again"
    try:
        with open(prefix + ".idx", "rb") as stream:
            header = stream.read(INDEX_HEADER.size)
        size, bin_size = os.path.getsize(prefix + ".idx"), os.path.getsize(prefix + ".bin")
    except OSError as error:
        raise DataError(f"cannot read {prefix}.idx or .bin: {error.strerror}") from error
    if len(header) < INDEX_HEADER.size:
        raise DataError(broken)
    magic, version, code, sequences, borders = INDEX_HEADER.unpack(header)
    if magic != INDEX_MAGIC or version != 1 or code not in DTYPES:
        raise DataError(broken)
    if size < INDEX_HEADER.size + 12 * sequences + 8 * borders:
        raise DataError(broken)
    lengths = np.fromfile(prefix + ".idx", np.int32, sequences, offset=INDEX_HEADER.size)
    tokens = int(lengths.sum(dtype=np.int64))
    if not _has_whole_tables(prefix, lengths, borders, np.dtype(DTYPES[code]).itemsize):
        raise DataError(broken)
    if tokens == 0:
        raise DataError(f"{prefix} has no documents; prepare the data again")
    if tokens * np.dtype(DTYPES[code]).itemsize != bin_size:
        raise DataError(
            f"{prefix}.bin has {bin_size} bytes, {prefix}.idx counts {tokens} tokens of "
            f"{np.dtype(DTYPES[code]).itemsize} bytes: they do not belong together; prepare the data again"
        )
    return DTYPES[code], tokens


def _has_whole_tables(prefix: str, lengths: Any, borders: int, itemsize: int) -> bool:
    """Whether the sequences of an index follow one another without gaps, and its documents are runs of them."""
    with open(prefix + ".idx", "rb") as stream:
        stream.seek(INDEX_HEADER.size + lengths.nbytes)
        places = np.fromfile(stream, np.int64, len(lengths))
        documents = np.fromfile(stream, np.int64, borders)
    if len(places) < len(lengths) or len(documents) < borders or (lengths < 0).any():
        return False
    ends = np.cumsum(lengths, dtype=np.int64) * itemsize
    lies_in_a_row = not len(places) or (places[0] == 0 and bool((places[1:] == ends[:-1]).all()))
    if not lies_in_a_row or not borders:
        return False
    steps = np.diff(documents)
    return bool(documents[0] == 0 and documents[-1] == len(lengths) and (steps >= 0).all())


def _find_token_range(prefix: str, dtype: Any, tokens: int, scan_bytes: int) -> tuple[int, int]:
    itemsize = np.dtype(dtype).itemsize
    block = min(tokens, max(1, min(scan_bytes, 1 << 24) // itemsize))
    blocks = max(1, min(-(-tokens // block), scan_bytes // (block * itemsize)))
    smallest, largest = np.iinfo(np.int64).max, -1
    for start in np.linspace(0, tokens - block, blocks, dtype=np.int64):
        part = np.fromfile(prefix + ".bin", dtype, block, offset=int(start) * itemsize)
        smallest, largest = min(smallest, int(part.min())), max(largest, int(part.max()))
    return smallest, largest

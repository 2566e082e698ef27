"""Lists the documents of a data set in order, and cuts them into pieces of about equal size for the workers.

The result depends on the files alone, never on the number of workers. A text file is one document; so is a line of a
JSON-lines file and a row of a table.
"""

from __future__ import annotations

import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tempo_megatron.data import DataError
from tempo_megatron.data.dataset_files import is_inside
from tempo_megatron.data.dataset_writer import SUFFIXES
from tempo_megatron.data.tables import TABLE_SUFFIXES, check_package, describe_hub_dataset

JSON_SUFFIXES = (".json", ".jsonl")  # suffixes are compared without regard to case
COMPRESSED_SUFFIXES = (".gz", ".zst")
_OTHER_COMPRESSION = (".bz2", ".xz", ".zip")
STDLIB_SUFFIXES = (".py", ".txt")
# Tests contain broken encodings and tables of data; the other folders hold other packages, or no text.
_STDLIB_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}

# Why a file of a directory tree is left out -> how the error describes such a file if the user named it.
_REFUSED = {
    "binary": "a binary file (it has NUL bytes)",
    "not a regular file": "neither a file nor a directory",
}

_HEAD_BYTES = 8192  # like git: a NUL byte in the first 8 KiB makes a file binary
_FILES_PER_PIECE = 256
_SMALLEST_PIECE, _LARGEST_PIECE = 1 << 20, 8 << 20
_WINDOW = 1 << 16

# A text may be cut before a space or newline that does not follow white space (Unicode's, in UTF-8). A pretoken ends
# there, so the parts have the tokens of the whole. JSON lines are cut after the newline.
_TEXT_CUT = re.compile(
    rb"(?<![\t-\r\x1c-\x20])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])"
    rb"(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80)(?=[ \n])"
)
_JSON_CUT = re.compile(rb"(?<=\n)")
_LOOKBEHIND = 3


@dataclass(frozen=True, slots=True)
class InputFile:
    """The first `size` bytes of a file, or a table.

    What cannot be used in it is an error if the user named the file (is_named). If it was found in a directory tree, it
    is counted and left out.
    """

    path: str
    """Of a data set of the hub its name, as --input-hub has it."""
    size: int
    """Of a data set of the hub 0 if it is unknown."""
    version: int | str
    """The time of the last change in ns; of a data set of the hub its digest."""
    is_named: bool
    is_on_hub: bool = False
    limit: int | None = None
    """Of a table: bytes of text after which its reader ends."""

    @property
    def is_json(self) -> bool:
        name = self.path.lower()
        for suffix in COMPRESSED_SUFFIXES:
            name = name.removesuffix(suffix)
        return name.endswith(JSON_SUFFIXES) and not self.is_on_hub

    @property
    def is_compressed(self) -> bool:
        return self.path.lower().endswith(COMPRESSED_SUFFIXES) and not self.is_on_hub

    @property
    def is_table(self) -> bool:
        return self.is_on_hub or _names_table(self.path, self.is_named)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [start, end) of a file; is_last says whether the file ends there. A compressed file or a table is one."""

    file: InputFile
    start: int
    end: int
    is_last: bool


Piece = tuple[Part, ...]


@dataclass(slots=True)
class LeftOut:
    """Counts the files that are left out for each reason, and remembers the first of each."""

    count: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, path: str) -> None:
        self.count[reason] += 1
        self.first.setdefault(reason, path)

    def update(self, other: LeftOut) -> None:
        self.count.update(other.count)
        self.first = {**other.first, **self.first}


def format_path(path: str) -> str:
    """Returns `path` for a message, even if it is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def list_files(
    inputs: Iterable[str], extensions: tuple[str, ...], output_prefix: str, left_out: LeftOut
) -> list[InputFile]:
    """Lists the files of `inputs` that can be text: files as they are given, directory trees in sorted order.

    It leaves out links of a tree, except those to files of the same tree, and the output of an earlier run with the
    same prefix.

    Raises: DataError (a ValueError) if a file is missing or unreadable, or if the user named a binary file or one of
        the output.
    """
    files: list[InputFile] = []
    extensions = tuple(extension.lower() for extension in extensions)
    for path in inputs:
        if os.path.isdir(path):
            for found in _walk(path, left_out):
                if _is_output(found, output_prefix):
                    left_out.add("own output", found)
                elif extensions and not found.lower().endswith(extensions):
                    continue
                elif os.path.islink(found) and os.path.exists(found) and not is_inside(found, path):
                    left_out.add("links out of the tree", found)
                else:
                    files.extend(_take_usable(found, is_named=False, left_out=left_out))
        elif _is_output(path, output_prefix):
            raise DataError(f"{format_path(path)} is a file of the output; choose another --output-prefix")
        else:
            files.extend(_take_usable(path, is_named=True, left_out=left_out))
    return files


def list_hub_datasets(names: Iterable[str]) -> list[InputFile]:
    """Lists data sets of the Hugging Face hub. Raises: DataError (a ValueError) if one cannot be reached."""
    described = [(name, *describe_hub_dataset(name)) for name in names]
    return [InputFile(name, size, digest, is_named=True, is_on_hub=True) for name, digest, size in described]


def list_stdlib(left_out: LeftOut) -> list[InputFile]:
    """Lists the sources and texts of this Python's standard library, without tests and installed packages."""
    root = sysconfig.get_path("stdlib")
    files: list[InputFile] = []
    for path in _walk(root, left_out, _STDLIB_LEFT_OUT):
        # Some distributions link to files of packages that are not installed.
        if path.endswith(STDLIB_SUFFIXES) and os.path.exists(path):
            files.extend(_take_usable(path, is_named=False, left_out=left_out))
    if not files:
        raise DataError(f"--input-stdlib: this Python has no sources in {root}; give files or directories with --input")
    return files


def take_first_bytes(files: list[InputFile], max_bytes: int, left_out: LeftOut) -> list[InputFile]:
    """Takes files up to max_bytes in total; cuts the last one at the first end of a word, line or row after the limit.

    A data set of the hub whose size is unknown counts as the rest.
    """
    taken: list[InputFile] = []
    budget = max_bytes
    for file in files:
        if budget <= 0:
            left_out.add("beyond --max-bytes", file.path)
            continue
        if file.is_table and not 0 < file.size <= budget:
            file = replace(file, size=budget, limit=budget)
        elif file.size > budget:
            file = replace(file, size=next(_find_cuts(file, budget), file.size))
        taken.append(file)
        budget -= file.size
    return taken


def cut_pieces(files: list[InputFile], *, cuts_texts: bool = True) -> list[Piece]:
    """Cuts and groups the files, in order, into pieces of 1 to 8 MiB: the more data, the larger. A table is one piece.

    Without `cuts_texts` a text file is not cut, whatever its size.
    """
    piece_bytes = min(_LARGEST_PIECE, max(_SMALLEST_PIECE, sum(file.size for file in files) >> 12))
    result: list[Piece] = []
    group: list[Part] = []
    group_bytes = 0
    for file in files:
        offsets = [0, *(_find_cuts(file, piece_bytes) if cuts_texts or file.is_json else ()), file.size]
        if file.is_table and group:
            result.append(tuple(group))
            group, group_bytes = [], 0
        for start, end in pairwise(offsets):
            group.append(Part(file, start, end, is_last=end == file.size))
            group_bytes += end - start
            if group_bytes >= piece_bytes or len(group) >= _FILES_PER_PIECE or file.is_table:
                result.append(tuple(group))
                group, group_bytes = [], 0
    if group:
        result.append(tuple(group))
    return result


def sample_pieces(all_pieces: list[Piece], max_bytes: int) -> list[Piece]:
    """Samples evenly spread pieces of max_bytes in total, or one if none is that small; of a table its beginning."""
    sizes = [sum(part.end - part.start for part in piece) for piece in all_pieces]
    share = min(1.0, max_bytes / max(1, sum(sizes)))
    chosen: list[Piece] = []
    seen = taken = 0
    for piece, size in zip(all_pieces, sizes, strict=True):
        seen += size
        if share < 1.0 and piece[0].file.is_table:
            part = piece[0]
            beginning = int(size * share) or max_bytes
            chosen.append((replace(part, file=replace(part.file, limit=beginning)),))
            taken += beginning
        elif taken + size <= seen * share:
            chosen.append(piece)
            taken += size
    return chosen or all_pieces[:1]


def _walk(root: str, left_out: LeftOut, names_left_out: Iterable[str] = ()) -> Iterator[str]:
    def stop(error: OSError) -> None:
        raise DataError(f"cannot read the directory {format_path(error.filename)}: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=stop):
        for name in [name for name in folders + names if name.startswith(".")]:
            left_out.add("hidden", os.path.join(folder, name))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in names_left_out)
        for name in [name for name in folders if os.path.islink(os.path.join(folder, name))]:
            left_out.add("links to directories", os.path.join(folder, name))
        yield from (os.path.join(folder, name) for name in sorted(names) if not name.startswith("."))


def _names_table(path: str, is_named: bool) -> bool:
    """Whether a file is read row by row: in a tree, whose files have no columns in common, only a .parquet file."""
    return path.lower().endswith(TABLE_SUFFIXES if is_named else ".parquet")


def _is_output(path: str, prefix: str) -> bool:
    if os.path.basename(prefix) not in path:  # a quick test that nearly always suffices
        return False
    rest = os.path.realpath(path).removeprefix(os.path.realpath(prefix))
    return rest in SUFFIXES or rest.startswith(".partial" + os.sep)


def _take_usable(path: str, is_named: bool, left_out: LeftOut) -> list[InputFile]:
    """Returns a list with the file, or an empty one if it is left out."""
    reason = ""
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            reason = "not a regular file"
        elif info.st_size == 0:
            reason = "empty"
        elif _names_table(path, is_named) or path.lower().endswith(".zst"):
            check_package(path)
        elif path.lower().endswith(".gz"):
            pass
        else:
            with open(path, "rb", 0) as stream:
                reason = "binary" if b"\0" in stream.read(_HEAD_BYTES) else ""
    except OSError as error:
        link = " (a link that leads nowhere)" if os.path.islink(path) and not os.path.exists(path) else ""
        raise DataError(
            f"cannot read {format_path(path)}: {error.strerror}{link}; repair it, or choose other files with --input "
            "or --extensions"
        ) from error
    if is_named and reason in _REFUSED:
        what = _REFUSED[reason]
        if reason == "binary" and path.lower().endswith(_OTHER_COMPRESSION):
            what = "compressed (unpack it first, or compress it with gzip or zstd)"
        raise DataError(
            f"{format_path(path)} is {what}; --input takes UTF-8 text and JSON-lines, also as .gz or .zst, and "
            ".parquet, .arrow, .csv and .tsv"
        )
    if reason:
        left_out.add(reason, path)
        return []
    return [InputFile(path, info.st_size, info.st_mtime_ns, is_named)]


def _find_cuts(file: InputFile, step: int) -> Iterator[int]:
    """Yields the offsets at which to cut a file: each the first possible one at least `step` bytes after the last."""
    if file.size <= step or file.is_compressed or file.is_table:
        return
    pattern = _JSON_CUT if file.is_json else _TEXT_CUT
    try:
        with open(file.path, "rb") as stream:
            position = step
            while position < file.size:
                before = min(_LOOKBEHIND, position)
                stream.seek(position - before)
                window = stream.read(_WINDOW)
                if len(window) <= before:
                    return  # the file became shorter, which its reader reports
                match = pattern.search(window, before)
                if match is None:
                    position += len(window) - before
                    continue
                cut = position - before + match.start()
                if cut >= file.size:
                    return
                yield cut
                position = cut + step
    except OSError as error:
        raise DataError(f"cannot read {format_path(file.path)}: {error.strerror}") from error

"""Lists the documents of a data set in order, and cuts them into pieces of about equal size for the workers.

The result depends on the files alone, never on the number of workers. A text file is one document; so is a line of a
JSON-lines file and a row of a table.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from tempo_megatron.beside import first_line
from tempo_megatron.data import DataError
from tempo_megatron.data.dataset_files import SUFFIXES, is_inside
from tempo_megatron.extras import check_installed

JSON_SUFFIXES = (".json", ".jsonl")  # suffixes are compared without regard to case
COMPRESSED_SUFFIXES = (".gz", ".zst")
_OTHER_COMPRESSION = (".bz2", ".xz", ".zip")
# Suffix -> kind and options of Hugging Face `datasets`. "NA" and "null" are texts, and so is a column of digits.
TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".csv": ("csv", {"na_filter": False}),
    ".tsv": ("csv", {"na_filter": False, "sep": "\t"}),
}
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
SMALLEST_PIECE, _LARGEST_PIECE = 1 << 20, 8 << 20

# A text may be cut before a space or newline that does not follow white space (Unicode's, in UTF-8). A pretoken ends
# there, so the parts have the tokens of the whole. JSON lines are cut after the newline.
_TEXT_CUT = re.compile(
    rb"(?<![\t-\r\x1c-\x20])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])"
    rb"(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80)(?=[ \n])"
)
_JSON_CUT = re.compile(rb"(?<=\n)(?=[\x00-\xff])")


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [start, end) of a file. A compressed file and a table are one part.

    What cannot be used in it is an error if the user named the file (is_named). If it was found in a directory tree, it
    is counted and left out.
    """

    path: str
    """Of a data set of the hub its name, as --input-hub has it."""
    end: int
    """Of a data set of the hub 0 if its size is unknown."""
    version: int | str
    """The time of the last change in ns; of a data set of the hub its digest."""
    is_named: bool
    kind: str
    """text, json (one object a line), table, or hub: a data set of the hub, which is a table too."""
    start: int = 0
    is_last: bool = True
    """Whether the file ends here. A table of which that is not so ends after `end` bytes of text."""

    @property
    def is_compressed(self) -> bool:
        return self.kind in ("text", "json") and self.path.lower().endswith(COMPRESSED_SUFFIXES)

    @property
    def is_table(self) -> bool:
        return self.kind in ("table", "hub")


Piece = list[Part]


@dataclass(slots=True)
class LeftOut:
    """Counts the files that are left out for each reason, and remembers the first of each."""

    count: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, path: str) -> None:
        self.count[reason] += 1
        self.first.setdefault(reason, path)


def format_path(path: str) -> str:
    """Returns `path` for a message, even if it is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def list_files(inputs: Iterable[str], extensions: Iterable[str], output_prefix: str, left_out: LeftOut) -> list[Part]:
    """Lists the files of `inputs` that can be text: files as they are given, directory trees in sorted order.

    Raises: DataError (a ValueError) if a file is missing or unreadable, or if the user named a binary file or one of
        the output.
    """
    files: list[Part] = []
    endings = tuple(extension.lower() for extension in extensions)
    for path in inputs:
        if not os.path.isdir(path):
            if _is_output(path, output_prefix):
                raise DataError(f"{format_path(path)} is a file of the output; choose another --output-prefix")
            files.extend(_take_usable(path, is_named=True, left_out=left_out))
            continue
        for found in _walk(path, left_out):
            if _is_output(found, output_prefix):
                left_out.add("own output", found)
            elif endings and not found.lower().endswith(endings):
                continue
            elif os.path.islink(found) and os.path.exists(found) and not is_inside(found, path):
                left_out.add("links out of the tree", found)
            else:
                files.extend(_take_usable(found, is_named=False, left_out=left_out))
    return files


def list_hub_datasets(names: Iterable[str]) -> list[Part]:
    """Lists data sets of the Hugging Face hub.

    Raises: DataError (a ValueError) if one cannot be reached; MissingExtraError without `datasets`.
    """
    found = []
    for name in names:
        check_installed(name, "data", "datasets")
        import datasets

        path, config, _ = split_hub_name(name)
        try:
            builder = datasets.load_dataset_builder(path, config)
        except (OSError, ValueError, RuntimeError) as error:
            raise describe_fault(name, error, is_on_hub=True) from error
        found.append(Part(name, builder.info.dataset_size or 0, str(builder.hash), is_named=True, kind="hub"))
    return found


def split_hub_name(name: str) -> tuple[str, str | None, str]:
    path, config, split = [*name.split(":", 2), "", ""][:3]
    return path, config or None, split or "train"


def describe_fault(path: str, error: Exception, *, is_on_hub: bool = False) -> DataError:
    if is_on_hub:
        return DataError(f"the data set {path} cannot be read ({first_line(error)}); check its name and the network")
    if isinstance(error, OSError) and error.errno is not None:
        return DataError(f"cannot read {format_path(path)}: {error.strerror}")
    return DataError(f"{format_path(path)} is damaged or not what its name says ({first_line(error)}); get it again")


def list_stdlib(left_out: LeftOut) -> list[Part]:
    """Lists the sources and texts of this Python's standard library, without tests and installed packages."""
    root = sysconfig.get_path("stdlib")
    files: list[Part] = []
    for path in _walk(root, left_out, _STDLIB_LEFT_OUT):
        # Some distributions link to files of packages that are not installed.
        if path.endswith(STDLIB_SUFFIXES) and os.path.exists(path):
            files.extend(_take_usable(path, is_named=False, left_out=left_out))
    if not files:
        raise DataError(f"--input-stdlib: this Python has no sources in {root}; give files or directories with --input")
    return files


def take_first_bytes(files: list[Part], max_bytes: int, left_out: LeftOut) -> list[Part]:
    """Takes files up to max_bytes in total; cuts the last one at the first end of a word, line or row after that."""
    taken: list[Part] = []
    budget = max_bytes
    for file in files:
        if budget <= 0:
            left_out.add("beyond --max-bytes", file.path)
            continue
        if file.is_table and not 0 < file.end <= budget:
            file = replace(file, end=budget, is_last=False)
        elif file.end > budget:
            file = replace(file, end=next(_find_cuts(file, budget), file.end))
        taken.append(file)
        budget -= file.end
    return taken


def cut_pieces(files: list[Part], *, cuts_texts: bool = True, smallest: int = SMALLEST_PIECE) -> list[Piece]:
    """Cuts and groups the files, in order, into pieces of 1 to 8 MiB, larger of more data. A table is one piece."""
    piece_bytes = min(_LARGEST_PIECE, max(smallest, sum(file.end for file in files) >> 12))
    pieces: list[Piece] = []
    num_bytes = piece_bytes  # of the last piece
    for file in files:
        offsets = [0, *(_find_cuts(file, piece_bytes) if cuts_texts or file.kind == "json" else ()), file.end]
        for start, end in pairwise(offsets):
            if file.is_table or num_bytes >= piece_bytes or len(pieces[-1]) >= _FILES_PER_PIECE:
                pieces.append([])
                num_bytes = 0
            pieces[-1].append(replace(file, start=start, end=end, is_last=file.is_last and end == file.end))
            num_bytes += piece_bytes if file.is_table else end - start
    return pieces


def sample_pieces(all_pieces: list[Piece], max_bytes: int) -> list[Piece]:
    """Samples evenly spread pieces of max_bytes in total, or one if none is that small; of a table its beginning."""
    sizes = [sum(part.end - part.start for part in piece) for piece in all_pieces]
    share = min(1.0, max_bytes / max(1, sum(sizes)))
    chosen: list[Piece] = []
    seen = taken = 0
    for piece, size in zip(all_pieces, sizes, strict=True):
        seen += size
        if share < 1.0 and piece[0].is_table:
            beginning = int(size * share) or max_bytes
            chosen.append([replace(piece[0], end=beginning, is_last=False)])
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


def _get_kind(path: str, is_named: bool) -> str:
    name = path.lower()
    # The files of a tree have no columns in common: there, only a .parquet file is read row by row.
    if name.endswith(tuple(TABLES) if is_named else ".parquet"):
        return "table"
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return "json" if name.endswith(JSON_SUFFIXES) else "text"


def _is_output(path: str, prefix: str) -> bool:
    if os.path.basename(prefix) not in path:  # a quick test that nearly always suffices
        return False
    rest = os.path.realpath(path).removeprefix(os.path.realpath(prefix))
    return rest in SUFFIXES or rest.startswith(".partial" + os.sep)


def _take_usable(path: str, is_named: bool, left_out: LeftOut) -> list[Part]:
    reason = ""
    try:
        info = os.stat(path)
        file = Part(path, info.st_size, info.st_mtime_ns, is_named, _get_kind(path, is_named))
        if not stat.S_ISREG(info.st_mode):
            reason = "not a regular file"
        elif info.st_size == 0:
            reason = "empty"
        elif not file.is_table and not file.is_compressed:
            with open(path, "rb", 0) as stream:
                reason = "binary" if b"\0" in stream.read(_HEAD_BYTES) else ""
    except OSError as error:
        link = " (a link that leads nowhere)" if os.path.islink(path) and not os.path.exists(path) else ""
        raise DataError(
            f"cannot read {format_path(path)}: {error.strerror}{link}; repair it, or choose other files with --input "
            "or --extensions"
        ) from error
    if is_named and reason in _REFUSED:
        is_packed = reason == "binary" and path.lower().endswith(_OTHER_COMPRESSION)
        what = "compressed (unpack it first, or compress it with gzip or zstd)" if is_packed else _REFUSED[reason]
        raise DataError(
            f"{format_path(path)} is {what}; --input takes UTF-8 text and JSON-lines, also as .gz or .zst, and "
            ".parquet, .arrow, .csv and .tsv"
        )
    if reason:
        left_out.add(reason, path)
    return [] if reason else [file]


def _find_cuts(file: Part, step: int) -> Iterator[int]:
    """Yields the offsets at which to cut a file: each the first possible one at least `step` bytes after the last."""
    if file.end <= step or file.is_compressed or file.is_table:
        return
    pattern = _JSON_CUT if file.kind == "json" else _TEXT_CUT
    position = step
    try:
        with open(file.path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            while match := pattern.search(content, position, file.end):
                yield match.start()
                position = match.start() + step
    except OSError as error:
        raise DataError(f"cannot read {format_path(file.path)}: {error.strerror}") from error
    except ValueError:
        return  # the file became empty, which its reader reports

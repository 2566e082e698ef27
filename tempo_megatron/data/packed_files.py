"""Reads files that are compressed (.gz, .zst) or columnar (.parquet), by Python's gzip, zstandard and pyarrow."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import Any

from tempo_megatron.beside import first_line
from tempo_megatron.data import DataError
from tempo_megatron.extras import check_installed

COMPRESSED_SUFFIXES = (".gz", ".zst")
PARQUET_SUFFIX = ".parquet"
_ROWS_AT_ONCE = 1024


def strip_compression(path: str) -> str:
    """Returns the name, in small letters, that the file has when it is unpacked."""
    name = path.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def decompress(path: str, most: int = -1) -> bytes:
    """Reads the content of a compressed file, or its first `most` bytes.

    Raises: DataError (a ValueError) if it is damaged, or if zstandard is missing; OSError if it cannot be read.
    """
    if path.lower().endswith(".gz"):
        try:
            with gzip.open(path, "rb") as stream:
                return stream.read(most)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _describe_damage(path, error) from error
    check_packages(path)
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    try:
        with open(path, "rb") as file, decompressor.stream_reader(file, read_across_frames=True) as unpacked:
            content: bytes = unpacked.read(most)
            return content
    except zstandard.ZstdError as error:
        raise _describe_damage(path, error) from error


def check_packages(path: str) -> None:
    """Raises DataError if a package is missing that reads this file."""
    name = path.lower()
    package = "pyarrow" if name.endswith(PARQUET_SUFFIX) else "zstandard" if name.endswith(".zst") else None
    if package is None:
        return
    try:
        check_installed(path, "data", package)
    except ModuleNotFoundError as error:
        raise DataError(str(error)) from error


def _describe_damage(path: str, error: Exception) -> DataError:
    return DataError(f"{path} is damaged or not what its name says ({first_line(error)}); get it again")


def _open_parquet(path: str) -> Any:
    check_packages(path)
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise _describe_damage(path, error) from error


def list_row_groups(path: str) -> list[int]:
    """Returns the offset in a .parquet file of each of its row groups, in order. Raises as read_rows does."""
    with _open_parquet(path) as file:
        return _list_offsets(file.metadata)


def _list_offsets(metadata: Any) -> list[int]:
    columns = (metadata.row_group(number).column(0) for number in range(metadata.num_row_groups))
    return [
        column.data_page_offset
        if column.dictionary_page_offset is None
        else min(column.dictionary_page_offset, column.data_page_offset)
        for column in columns
    ]


def read_rows(path: str, key: str, start: int, end: int) -> Iterator[tuple[int, str | None]]:
    """Yields (row, text) of the column `key`, of the row groups that begin in [start, end); None is a missing text.

    Raises: DataError (a ValueError) if the file is damaged, has no column `key` or one without text, or if pyarrow is
        missing; OSError if it cannot be read.
    """
    with _open_parquet(path) as file:
        import pyarrow

        names = file.schema_arrow.names
        if key not in names:
            columns = ", ".join(names[:8])
            raise DataError(
                f"{path} has no column {key!r} (its columns: {columns}); name that of the text by --json-key"
            )
        kind = file.schema_arrow.field(key).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"the column {key!r} of {path} holds {kind}, not text; see --json-key")
        offsets = _list_offsets(file.metadata)
        sizes = [file.metadata.row_group(number).num_rows for number in range(len(offsets))]
        groups = [number for number, offset in enumerate(offsets) if start <= offset < end]
        row = sum(sizes[: groups[0]]) if groups else 0
        try:
            for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=groups, columns=[key]):
                for value in batch.column(0):
                    yield row, value.as_py()
                    row += 1
        except pyarrow.ArrowException as error:
            raise _describe_damage(path, error) from error

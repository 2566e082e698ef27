"""Streams documents from tables by Hugging Face `datasets`: .parquet, .arrow, .csv and .tsv files, and its hub.

A document is a row's text in one column. Nothing is converted, and nothing is stored on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from tempo_megatron.beside import first_line
from tempo_megatron.data import DataError
from tempo_megatron.extras import check_installed

# "NA" and "null" are texts, and so is a column of digits.
_CSV = {"na_filter": False}
_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".csv": ("csv", _CSV),
    ".tsv": ("csv", {**_CSV, "sep": "\t"}),
}
TABLE_SUFFIXES = tuple(_FORMATS)
_ROWS_AT_ONCE = 1024


def check_package(what: str) -> None:
    """Raises DataError if `datasets`, which reads `what`, is not installed."""
    try:
        check_installed(what, "data", "datasets")
    except ModuleNotFoundError as error:
        raise DataError(str(error)) from error


def describe_hub_dataset(name: str) -> tuple[str, int]:
    """Returns the digest of the version of a data set of the hub, and its bytes, 0 if they are unknown.

    Raises: DataError (a ValueError) as stream_column does.
    """
    check_package(name)
    import datasets

    path, config, _ = _split_hub_name(name)
    try:
        builder = datasets.load_dataset_builder(path, config)
    except (OSError, ValueError, RuntimeError) as error:
        raise _describe_fault(name, error) from error
    return str(builder.hash), builder.info.dataset_size or 0


def stream_column(path: str, column: str, *, is_on_hub: bool = False) -> Iterator[str | None]:
    """Yields the text of `column` in each row, in order; None is a missing text.

    Args:
        path: of a file of TABLE_SUFFIXES; of the hub NAME, NAME:CONFIG or NAME:CONFIG:SPLIT.
        column: its name.
        is_on_hub: whether the path is a name of the hub.

    Raises: DataError (a ValueError) if the table cannot be read, has no such column, or one that holds no text.
    """
    check_package(path)
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error says it
    try:
        yield from _stream(path, column, is_on_hub)
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _describe_fault(path, error, is_on_hub=is_on_hub) from error


def _stream(path: str, column: str, is_on_hub: bool) -> Iterator[str | None]:
    from datasets import load_dataset

    only: dict[str, Any] = {}  # what keeps the other columns from being read
    if is_on_hub:
        name, config, split = _split_hub_name(path)
        where: dict[str, Any] = {"path": name, "name": config, "split": split}
    else:
        kind, options = _FORMATS[os.path.splitext(path)[1].lower()]
        where = {"path": kind, "data_files": [path], "split": "train", **options}
        if kind == "parquet":
            only = {"columns": [column]}
        elif kind == "csv":
            only = {"usecols": [column], "converters": {column: str}}
    table = load_dataset(**where, streaming=True)
    columns = table.column_names or list(next(iter(table), {column: ""}))
    if column not in columns:
        names = ", ".join(columns[:8])
        raise DataError(f"{path} has no column {column!r} (its columns: {names}); name that of the text by --json-key")
    for batch in load_dataset(**where, **only, streaming=True).select_columns([column]).iter(_ROWS_AT_ONCE):
        for text in batch[column]:
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                raise DataError(f"the column {column!r} of {path} holds {kind}, not text; see --json-key")
            yield text


def _split_hub_name(name: str) -> tuple[str, str | None, str]:
    path, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    return path, config or None, split or "train"


def _describe_fault(path: str, error: Exception, *, is_on_hub: bool = True) -> DataError:
    if is_on_hub:
        return DataError(f"the data set {path} cannot be read ({first_line(error)}); check its name and the network")
    return DataError(f"{path} is damaged or not what its name says ({first_line(error)}); get it again")

"""The files in which Megatron's datasets keep the order of their samples, with a digest of each beside it.

megatron-core takes a file that exists for the one that it would write. One that was cut off, or in which a single bit
has changed, would be another order of the samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from glob import escape, glob
from pathlib import Path
from typing import Any

import numpy as np

from tempo_megatron.training.checkpoint_files.integrity import hash_file

_SUFFIX = ".sha256"


def name_folder(dataset_class: type, prefix: str, path_to_cache: str | None) -> str:
    """Where the files of one data set are, as in megatron-core."""
    return path_to_cache or os.path.join(prefix, "cache", f"{dataset_class.__name__}_indices")


def remove_cut_off(folder: str) -> None:
    """Delete what a killed run wrote in part, which could not even be loaded."""
    for path in glob(os.path.join(escape(folder), "*.npy")):
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError):
            os.remove(path)


def list_files(folders: Iterable[str]) -> set[str]:
    """Every file of this kind in some folders."""
    return {path for folder in folders for path in glob(os.path.join(escape(folder), "*.npy"))}


def list_files_of(*datasets: Any) -> Iterator[str]:
    """Those that built datasets read: MegatronDatasets, BlendedDatasets of them, or None."""
    for dataset in datasets:
        if dataset is None:
            continue
        if parts := getattr(dataset, "datasets", None):
            yield from list_files_of(*parts)
            folder = dataset.config.path_to_cache
        else:
            folder = name_folder(type(dataset), dataset.dataset.path_prefix, dataset.config.path_to_cache)
        if folder:
            yield from glob(os.path.join(escape(folder), f"{dataset.unique_description_hash}-*.npy"))


def write_digest(path: str) -> None:
    Path(path + _SUFFIX).write_text(hash_file(Path(path)) + "\n", encoding="utf-8")


def is_as_written(path: str) -> bool:
    """Whether a file has the digest that was written with it; False where there is none."""
    try:
        digest = Path(path + _SUFFIX).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    return digest.strip() == hash_file(Path(path))

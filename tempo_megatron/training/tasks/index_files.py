"""Seals the index files, in which Megatron's datasets store the order of their samples, with a digest beside each.

megatron-core uses any index file that exists. One that was cut off or changed would give another order of the samples.
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
    """Returns the folder in which megatron-core stores the index files of a data set."""
    return path_to_cache or os.path.join(prefix, "cache", f"{dataset_class.__name__}_indices")


def remove_cut_off(folder: str) -> None:
    """Deletes index files that cannot be loaded because a run was killed while it wrote them."""
    for path in glob(os.path.join(escape(folder), "*.npy")):
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError):
            os.remove(path)


def list_files(folders: Iterable[str]) -> set[str]:
    """Lists the index files in some folders."""
    return {path for folder in folders for path in glob(os.path.join(escape(folder), "*.npy"))}


def list_files_of(*datasets: Any) -> Iterator[str]:
    """Yields the index files that datasets read: MegatronDatasets, BlendedDatasets of them, or None."""
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
    """Whether a file has the digest that was written with it; False if there is none."""
    try:
        digest = Path(path + _SUFFIX).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    return digest.strip() == hash_file(Path(path))

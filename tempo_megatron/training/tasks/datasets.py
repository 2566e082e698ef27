"""Builds training and validation samples: a dataset of megatron-core, in an order that no layout changes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from glob import escape, glob
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

from tempo_megatron.data.dataset_files import Sidecar, check_presence, load_dataset_tokenizer, validate_dataset
from tempo_megatron.models.layout import pad_vocab_size
from tempo_megatron.training.checkpoint_files.folder import hash_file
from tempo_megatron.training.ranks import gather, ignore_stop_signals
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.task import Batch, Collate, Task, Vocabulary


def load_vocabulary(run: RunConfig, task: Task) -> Vocabulary:
    """Loads the tokenizer that all data sets of `--data-path` were made with, and sizes the embedding.

    Raises ValueError if a data set is broken, has another tokenizer or one that the task cannot use, or does not fit
    the vocabulary.
    """
    prefixes = run.blend[0]
    for prefix in prefixes:
        check_presence(prefix)
    loaded = [load_dataset_tokenizer(each, run.vocab_file, run.merge_file, task.tokenizer_types) for each in prefixes]
    for prefix, other in zip(prefixes, loaded, strict=True):
        if other.unique_identifiers != loaded[0].unique_identifiers:
            raise ValueError(
                f"{prefix} was made with another tokenizer than {prefixes[0]}; prepare both with the same one"
            )
    tokenizer = task.extend_tokenizer(loaded[0], run)
    vocab_size = run.model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size} is below the tokenizer's {tokenizer.vocab_size} tokens; raise it or remove it"
        )
    padded = pad_vocab_size(vocab_size, run.model.make_vocab_size_divisible_by, run.vocab_padding_tp)
    if padded % run.tensor_model_parallel_size:
        raise ValueError(
            f"the checkpoint has {padded} rows of vocabulary, padding included, which the run keeps and "
            f"--tensor-model-parallel-size {run.tensor_model_parallel_size} does not divide; give one that does"
        )
    files = _describe_tokenizer_files(run, tokenizer)
    for prefix in prefixes:
        validate_dataset(prefix, vocab_size)
        task.check_split(prefix, _name_parts(run), run)
    return Vocabulary(tokenizer, vocab_size, padded, files)


def _name_parts(run: RunConfig) -> dict[str, tuple[float, float]]:
    """Returns the parts of a data set that the run reads, with their borders as fractions."""
    train, valid, _ = run.split_weights
    parts = {"training": (0.0, train)}
    if run.eval_iters:
        parts["validation"] = (train, train + valid)
    if run.test_iters:
        parts["test"] = (train + valid, 1.0)
    return parts


@dataclasses.dataclass(frozen=True)
class Datasets:
    """The samples of a run."""

    train: Any
    valid: Any
    """None without validation."""
    test: Any
    """None without --test-iters."""
    sample_parts: tuple[int, ...]
    """The number of samples in each part of `train`, which a resumed run needs for the same order."""


def build_datasets(run: RunConfig, task: Task, tokenizer: Any) -> Datasets:
    """Builds the samples on rank 0; the other ranks then read its index files.

    Megatron shuffles the epochs of a run together, so that a data set built for more samples has another order from
    the first sample on. A run that is resumed for more steps than planned keeps its order and appends a part with an
    order of its own: run.sample_parts, the samples of each part, comes from the checkpoint, and the result's
    sample_parts includes the new part.

    Raises ValueError if the folder for the index files cannot be written.
    """
    if int(os.environ["RANK"]) == 0:
        for prefix in run.blend[0]:
            _remove_cut_off_indices(_name_index_folder(task.dataset_class, prefix, run.data_cache_path))
    needed = run.batch_sizes.count_samples(run.train_iters)
    others = [run.global_batch_size * number for number in (run.eval_iters, run.test_iters)]
    sample_parts = run.sample_parts or (needed,)
    first, valid, test = _build_part(run, task, tokenizer, run.seed, (sample_parts[0], *others))
    parts = [first]

    def append(samples: int) -> None:
        parts.append(_build_part(run, task, tokenizer, (run.seed + len(parts)) % 2**32, (samples, 0, 0))[0])

    for samples in sample_parts[1:]:
        append(samples)
    if (missing := needed - sum(map(len, parts))) > 0:
        append(missing)
        sample_parts = (*sample_parts, missing)
    train = first if len(parts) == 1 else torch.utils.data.ConcatDataset(parts)
    return Datasets(train, valid, test, sample_parts)


def _build_part(run: RunConfig, task: Task, tokenizer: Any, seed: int, sizes: Sequence[int]) -> list[Any]:
    """Builds training, validation and test samples, so many of each; None where there are none."""
    prefixes, weights = run.blend
    config = task.make_dataset_config(
        run,
        tokenizer,
        seed,
        blend=(list(prefixes), None if weights is None else list(weights)),
        split=run.split,
        path_to_cache=run.data_cache_path,
    )
    assert config.split_matrix is not None
    # Build no part without samples; Megatron has no argument for that.
    for number, samples in enumerate(sizes):
        if not samples:
            config.split_matrix[number] = None
    folders = [_name_index_folder(task.dataset_class, prefix, run.data_cache_path) for prefix in prefixes]
    for _ in range(2):
        before = {path for folder in folders for path in glob(os.path.join(escape(folder), "*.npy"))}
        try:
            builder = BlendedMegatronDatasetBuilder(task.dataset_class, list(sizes), lambda: True, config)
            built: list[Any] = builder.build()
            if not _remove_changed_indices(before, _list_indices_of(*built)):
                return built
        except Exception as error:
            cause = error.__cause__ or error
            if not isinstance(cause, OSError):
                raise
            raise ValueError(
                f"the sample indices cannot be written ({cause}); give --data-cache-path a folder"
            ) from error
    raise ValueError(
        f"the sample indices in {' '.join(folders)} are not as this run wrote them a moment ago; where another run "
        "writes them, too, give --data-cache-path a folder of its own"
    )


def _remove_changed_indices(before: Collection[str], used: Iterable[str]) -> bool:
    """Deletes changed index files and seals new ones, on rank 0; returns on every rank whether any was deleted.

    `before` are the index files that existed before the datasets were built, `used` those that the datasets read.
    """
    changed: list[str] = []
    if dist.get_rank() == 0:
        for path in used:
            if path not in before:
                Path(path + _SUFFIX).write_text(hash_file(Path(path)) + "\n", encoding="utf-8")
            elif not _is_as_written(path):
                changed.append(path)
                os.remove(path)
        if changed:
            print(f"{', '.join(changed)}: not as this trainer wrote it, or of another program; made again", flush=True)
    return any(gather(bool(changed)))


def shard_batches(first: int, last: int, micro_batch_size: int, rank: int, data_parallel_size: int) -> Iterator[range]:
    """Yields the samples in [first, last) of one data-parallel rank, micro batch by micro batch.

    Micro batch k of rank r begins at sample first + (k * data_parallel_size + r) * micro_batch_size.
    """
    for start in range(first + rank * micro_batch_size, last, micro_batch_size * data_parallel_size):
        yield range(start, start + micro_batch_size)


class BatchStream:
    """The micro batches of this rank, on `device`: of `num_samples` global samples without the first consumed ones.

    `rank` and `data_parallel_size` are of the data-parallel group. All ranks of a tensor-parallel group read the same.
    """

    def __init__(
        self,
        dataset: Any,
        run: RunConfig,
        collate: Collate,
        device: torch.device,
        *,
        consumed_samples: int,
        num_samples: int,
        rank: int,
        data_parallel_size: int,
    ) -> None:
        self.device = device
        self.micro_batch_size, self.rank, self.data_parallel_size = run.micro_batch_size, rank, data_parallel_size
        batches = shard_batches(consumed_samples, num_samples, self.micro_batch_size, rank, data_parallel_size)
        self._loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=batches,  # type: ignore[arg-type]
            num_workers=run.num_workers,
            collate_fn=collate,
            worker_init_fn=ignore_stop_signals,
            pin_memory=device.type == "cuda",
            # The loader draws from a generator, which must not be the run's.
            generator=torch.Generator(),
        )
        self._batches = iter(self._loader)

    def take_next(self) -> Batch:
        batch = next(self._batches)
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}

    def find_first_sample(self, consumed_samples: int, micro_batch: int) -> int:
        """Returns the global index of the first sample in a micro batch of the step that begins at consumed_samples."""
        return consumed_samples + (micro_batch * self.data_parallel_size + self.rank) * self.micro_batch_size


def _describe_tokenizer_files(run: RunConfig, tokenizer: Any) -> dict[str, dict[str, str]]:
    """Returns path and sha256 of the tokenizer's files, which are exported with the weights."""
    prefix = run.blend[0][0]
    paths: tuple[str, ...] = tuple(path for path in (run.vocab_file, run.merge_file) if path is not None)
    if not paths:
        sidecar = Sidecar.read(prefix)
        assert sidecar is not None  # load_dataset_tokenizer has read it
        paths = sidecar.find_tokenizer_files(prefix)
    return {
        f"{kind}_file": {"path": os.path.abspath(path), "sha256": tokenizer.unique_identifiers[f"{kind}_sha256"]}
        for kind, path in zip(("vocab", "merge"), paths, strict=False)
    }


# A digest beside each index file, in which Megatron's datasets store the order of their samples: megatron-core uses any
# index file that exists, and one that was cut off or changed would give another order.
_SUFFIX = ".sha256"


def _name_index_folder(dataset_class: type, prefix: str, path_to_cache: str | None) -> str:
    """Returns the folder in which megatron-core stores the index files of a data set."""
    return path_to_cache or os.path.join(prefix, "cache", f"{dataset_class.__name__}_indices")


def _remove_cut_off_indices(folder: str) -> None:
    """Deletes index files that cannot be loaded because a run was killed while it wrote them."""
    for path in glob(os.path.join(escape(folder), "*.npy")):
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError):
            os.remove(path)


def _list_indices_of(*datasets: Any) -> Iterator[str]:
    """Yields the index files that datasets read: MegatronDatasets, BlendedDatasets of them, or None."""
    for dataset in datasets:
        if dataset is None:
            continue
        if parts := getattr(dataset, "datasets", None):
            yield from _list_indices_of(*parts)
            folder = dataset.config.path_to_cache
        else:
            folder = _name_index_folder(type(dataset), dataset.dataset.path_prefix, dataset.config.path_to_cache)
        if folder:
            yield from glob(os.path.join(escape(folder), f"{dataset.unique_description_hash}-*.npy"))


def _is_as_written(path: str) -> bool:
    """Whether a file has the digest that was written with it; False if there is none."""
    try:
        digest = Path(path + _SUFFIX).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    return digest.strip() == hash_file(Path(path))

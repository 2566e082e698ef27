"""Defines a task: data, forward step and losses of a family of models, all that the trainer knows of a model."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tempo_megatron.training.run.run_config import RunConfig

Batch = dict[str, Tensor]
Collate = Callable[[Sequence[Mapping[str, Any]]], Batch]
"""Makes one batch of samples of the dataset, on the CPU. A DataLoader's worker calls it."""

LOSS = "loss"
"""The loss that is trained; the others that a ForwardStep returns are parts of it, for the log."""


class ForwardStep(abc.ABC):
    """Computes the losses of a micro batch."""

    @abc.abstractmethod
    def run_model(self, model: Any, batch: Mapping[str, Tensor]) -> Any:
        """Calls the model; returns its output. It may be a chunk of a pipeline, whose output is hidden states."""

    @abc.abstractmethod
    def compute_losses(self, output: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the losses of the whole model's output: float32 scalars by name, LOSS among them."""

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the losses of a whole model."""
        return self.compute_losses(self.run_model(model, batch), batch)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a run's data, and the rows of the embedding."""

    tokenizer: Any
    """A data.tokenizer.TextTokenizer, of one of the task's types."""
    size: int
    padded_size: int
    """`size`, rounded up to a multiple of the tensor parallel size."""
    files: Mapping[str, Mapping[str, str]]
    """Path and sha256 of "vocab_file" and "merge_file", which are exported with the weights."""

    def describe(self) -> dict[str, Any]:
        """Returns what a checkpoint stores of it."""
        return {
            "vocab_size": self.size,
            "padded_vocab_size": self.padded_size,
            "end_of_document": self.tokenizer.eod,
            "tokenizer_files": self.files,
            "tokenizer_class": self.tokenizer.unique_identifiers["class"],
        }


class Task(abc.ABC):
    """Data, forward step and losses of one family of models."""

    dataset_class: Any
    """A MegatronDataset, whose sample at an index depends on its configuration alone."""
    tokenizer_types: tuple[str, ...]
    """The types of tokenizer that its data may have; see data/tokenizer_types.py."""

    def extend_tokenizer(self, tokenizer: Any, run: RunConfig) -> Any:
        """Returns the tokenizer of the data, with the tokens besides that the task needs."""
        return tokenizer

    @abc.abstractmethod
    def check_split(self, prefix: str, parts: Mapping[str, tuple[float, float]], run: RunConfig) -> None:
        """Raises ValueError if a part of a data set (name -> borders as fractions) has no sample."""

    @abc.abstractmethod
    def make_dataset_config(self, run: RunConfig, tokenizer: Any, seed: int, **settings: Any) -> Any:
        """Makes the configuration of `dataset_class`; `settings` do not depend on the task."""

    @abc.abstractmethod
    def make_collate(self, vocabulary: Vocabulary) -> Collate: ...

    @abc.abstractmethod
    def make_forward_step(self, run: RunConfig, device: torch.device) -> ForwardStep: ...


def describe_share(prefix: str, run: RunConfig, part: str, share: int, documents: int) -> str:
    """Returns the beginning of an error about a part of a data set that is too small."""
    return f"{prefix}: --split {run.split} gives {part} {share} of {documents} documents"


def stack_samples(samples: Sequence[Mapping[str, Any]], keys: Mapping[str, str]) -> Batch:
    """Stacks the arrays of Megatron's masked datasets to int64 tensors; `keys` gives each key of a sample its name."""
    return {
        name: torch.from_numpy(np.stack([np.asarray(sample[key], dtype=np.int64) for sample in samples]))
        for key, name in keys.items()
    }


def average_losses(losses: Tensor, loss_mask: Tensor) -> Tensor:
    """Averages the losses of the tokens that count, in float32; returns 0 if none does."""
    return torch.sum(losses.float() * loss_mask) / loss_mask.sum().clamp(min=1.0)


def check_token_range(tokens: Tensor, labels: Tensor, vocab_size: int) -> None:
    """Raises ValueError if a token has no row in the embedding; on a GPU that would be an assertion without a name."""
    largest = int(torch.maximum(tokens.max(), labels.max()))
    if largest >= vocab_size or int(tokens.min()) < 0:
        raise ValueError(
            f"the data holds token {largest} but the model's vocabulary ends at {vocab_size - 1}; "
            "use the data's own tokenizer or raise --vocab-size"
        )

"""Defines what the trainer asks of a task: data, forward step and losses, and all that it knows of a model.

A task is chosen by the family of the run's model; `job.find_task` imports it, and with it megatron-core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tempo_megatron.training.run.run_config import RunConfig

Batch = dict[str, Tensor]
Collate = Callable[[Sequence[Mapping[str, Any]]], Batch]
"""Samples of the dataset -> one batch, on the CPU. A DataLoader's worker calls it."""

LOSS = "loss"
"""The entry of what a ForwardStep returns that is trained; the others are parts of it, for people."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a run's data, and the rows of the embedding."""

    tokenizer: Any
    """A data.tokenizer_types.TextTokenizer, of one of the task's types."""
    size: int
    padded_size: int
    """`size`, rounded up to a multiple that tensor parallelism divides."""
    files: Mapping[str, Mapping[str, str]]
    """Path and sha256 of "vocab_file" and "merge_file", so that they can go along with exported weights."""

    def describe(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return {
            "vocab_size": self.size,
            "padded_vocab_size": self.padded_size,
            "end_of_document": self.tokenizer.eod,
            "tokenizer_files": self.files,
        }


class ForwardStep(Protocol):
    """Micro batch -> float32 scalars by name, LOSS among them."""

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class Task(Protocol):
    """Data, forward step and losses of one kind of model."""

    dataset_class: Any
    """A MegatronDataset. Which sample it has at an index depends on its configuration alone."""
    tokenizer_types: tuple[str, ...]
    """What the data may be made with; see data/tokenizer_types.py."""

    def check_split(self, prefix: str, parts: Mapping[str, tuple[float, float]], run: RunConfig) -> None:
        """Raise ValueError where a part of a data set, name -> borders as fractions, has no sample."""

    def make_dataset_config(self, run: RunConfig, tokenizer: Any, seed: int, **settings: Any) -> Any:
        """The configuration of `dataset_class`; `settings` are those that no task decides."""

    def make_collate(self, vocabulary: Vocabulary) -> Collate: ...

    def make_forward_step(self, run: RunConfig, device: torch.device) -> ForwardStep: ...


def describe_share(prefix: str, run: RunConfig, part: str, share: int, documents: int) -> str:
    """The beginning of a sentence about a part of a data set that is too small."""
    return f"{prefix}: --split {run.split} gives {part} {share} of {documents} documents"


def check_token_range(tokens: Tensor, labels: Tensor, vocab_size: int) -> None:
    """Raise ValueError where a token has no row in the embedding; a GPU would stop in an assertion without a name."""
    largest = int(torch.maximum(tokens.max(), labels.max()))
    if largest >= vocab_size or int(tokens.min()) < 0:
        raise ValueError(
            f"the data holds token {largest} but the model's vocabulary ends at {vocab_size - 1}; "
            "use the data's own tokenizer or raise --vocab-size"
        )

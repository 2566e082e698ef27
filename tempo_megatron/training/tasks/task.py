"""What a model is trained to do. The trainer, its engine and its checkpoints know this protocol and no model behind it.

A task is chosen by the family of the run's model; find_task imports it, and with it megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tempo_megatron.training.run.run_config import RunConfig

if TYPE_CHECKING:
    from tempo_megatron.training.tasks.datasets import Vocabulary

Batch = dict[str, Tensor]
Collate = Callable[[Sequence[Mapping[str, Any]]], Batch]
"""Samples of the dataset -> one batch, on the CPU. A DataLoader's worker calls it."""

LOSS = "loss"
"""The entry of what a ForwardStep returns that is trained; the others are parts of it, for people."""


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


def find_task(family: str) -> Task:
    """The task of a family of models that the trainer takes."""
    if family == "bert":
        from tempo_megatron.training.tasks.masked import MaskedTask

        return MaskedTask()
    assert family == "gpt"
    from tempo_megatron.training.tasks.next_token import NextTokenTask

    return NextTokenTask()

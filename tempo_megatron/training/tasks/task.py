"""Defines a task: data, forward and losses of a family of models, all that the trainer knows of a model.

GPT's is here: it predicts the next token, on megatron-core's GPTDataset.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor

from tempo_megatron.data.tokenizer_types import GPT2_BPE, HUGGING_FACE
from tempo_megatron.models.build import hide_the_future
from tempo_megatron.training.run.run_config import RunConfig

Batch = dict[str, Tensor]
Collate = Callable[[Sequence[Mapping[str, Any]]], Batch]
"""Makes one batch of samples of the dataset, on the CPU. A DataLoader's worker calls it."""

LOSS = "loss"
"""The loss that is trained; the others that a Task returns are parts of it, for the log."""


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
    """Data, forward and losses of one family of models."""

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
    def run_model(self, run: RunConfig, model: Any, batch: Mapping[str, Tensor]) -> Any:
        """Calls the model; returns its output. It may be a chunk of a pipeline, whose output is hidden states.

        A fused loss makes gradients in forward, and so needs `loss_mask`.
        """

    def compute_losses(self, output: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the losses of the whole model's output: float32 scalars by name, LOSS among them.

        By default that is the loss averaged over the tokens that count; 0 if none does.
        """
        return {LOSS: average_losses(output, batch["loss_mask"])}

    def forward(self, run: RunConfig, model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the losses of a micro batch in a whole model."""
        return self.compute_losses(self.run_model(run, model, batch), batch)


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


class NextTokenTask(Task):
    """The Task of GPT."""

    dataset_class = GPTDataset
    tokenizer_types = (GPT2_BPE, HUGGING_FACE)

    def check_split(self, prefix: str, parts: Mapping[str, tuple[float, float]], run: RunConfig) -> None:
        """Raises ValueError if a part holds less than one sample; Megatron splits by sequences."""
        dataset = IndexedDataset(prefix)  # unmaps the lengths when it is freed
        lengths = dataset.sequence_lengths
        for name, (start, end) in parts.items():
            first, last = round(start * len(lengths)), round(end * len(lengths))
            tokens = int(np.sum(lengths[first:last], dtype=np.int64))
            if tokens < run.model.seq_length + 1:
                raise ValueError(
                    f"{describe_share(prefix, run, name, last - first, len(lengths))} with {tokens} tokens, fewer than "
                    f"one sample of {run.model.seq_length} + 1; change --split or prepare more data"
                )

    def make_dataset_config(self, run: RunConfig, tokenizer: Any, seed: int, **settings: Any) -> GPTDatasetConfig:
        return GPTDatasetConfig(
            random_seed=seed % 2**32,  # what numpy takes
            sequence_length=run.model.seq_length,
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=run.eod_mask_loss,
            create_attention_mask=False,
            **settings,
        )

    def make_collate(self, vocabulary: Vocabulary) -> Collate:
        return functools.partial(collate_tokens, vocab_size=vocabulary.padded_size)

    def run_model(self, run: RunConfig, model: Any, batch: Mapping[str, Tensor]) -> Any:
        tokens = batch["tokens"]
        # Tempo's attention needs no mask, and on a GPU Megatron's makes its own.
        needs_mask = "off" in run.tempo.values_of("attention") and tokens.device.type == "cpu"
        return model(
            input_ids=tokens,
            position_ids=_list_positions(tokens.size(1), tokens.device).expand_as(tokens),
            attention_mask=_hide_the_future(tokens.size(1)) if needs_mask else None,
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )


@functools.cache  # all micro batches share it
def _list_positions(seq_length: int, device: torch.device) -> Tensor:
    return torch.arange(seq_length, dtype=torch.int64, device=device).unsqueeze(0)


_hide_the_future = functools.cache(hide_the_future)


def collate_tokens(samples: Sequence[Mapping[str, Any]], vocab_size: int) -> Batch:
    """Makes a batch of samples: tokens and labels [b, s] int64, loss_mask [b, s] float32.

    Raises ValueError if a token has no row in the embedding of vocab_size rows.
    """
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in ("tokens", "labels", "loss_mask")}
    check_token_range(batch["tokens"], batch["labels"], vocab_size)
    return batch

"""Trains GPT to predict the next token, on megatron-core's GPTDataset."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor

from tempo_megatron.data.tokenizer_types import GPT2_BPE, HUGGING_FACE
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.task import (
    LOSS,
    Batch,
    Collate,
    ForwardStep,
    Task,
    Vocabulary,
    average_losses,
    check_token_range,
    describe_share,
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

    def make_forward_step(self, run: RunConfig, device: torch.device) -> PredictNextToken:
        return PredictNextToken(run, device)


def collate_tokens(samples: Sequence[Mapping[str, Any]], vocab_size: int) -> Batch:
    """Makes a batch of samples: tokens and labels [b, s] int64, loss_mask [b, s] float32.

    Raises ValueError if a token has no row in the embedding of vocab_size rows.
    """
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in ("tokens", "labels", "loss_mask")}
    check_token_range(batch["tokens"], batch["labels"], vocab_size)
    return batch


class PredictNextToken(ForwardStep):
    """The ForwardStep of GPT; it makes once what all micro batches share. Tempo's attention needs no mask."""

    def __init__(self, run: RunConfig, device: torch.device) -> None:
        seq_length = run.model.seq_length
        self.position_ids = torch.arange(seq_length, dtype=torch.int64, device=device).unsqueeze(0)
        self.attention_mask: Tensor | None = None
        if "off" in run.tempo.values_of("attention") and device.type == "cpu":
            # Megatron makes its own causal mask on the literal device "cuda". True = hidden.
            hidden = torch.ones(seq_length, seq_length, dtype=torch.bool, device=device).triu(1)
            self.attention_mask = hidden.view(1, 1, seq_length, seq_length)

    def run_model(self, model: Any, batch: Mapping[str, Tensor]) -> Any:
        tokens = batch["tokens"]
        return model(
            input_ids=tokens,
            position_ids=self.position_ids.expand_as(tokens),
            attention_mask=self.attention_mask,
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )

    def compute_losses(self, output: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the loss averaged over the tokens that count; 0 if none does."""
        return {LOSS: average_losses(output, batch["loss_mask"])}

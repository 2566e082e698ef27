"""Trains BERT and RoBERTa on masked tokens and the order of two segments, on megatron-core's masked dataset.

Samples and masks are Megatron's, with two exceptions, both in what is not text. Its dataset fills samples up, and
marks them as filled up, with the padding token's id, which is right where that is 0 and lets attention see the padding
elsewhere (RoBERTa's is 1); and with 0 a token that was replaced by the padding token counts as padding. Here the
dataset pads with -1, and the collation puts in what is meant.

A sample is masked anew each time it comes: a mask depends on the seed and on the position of the sample in the run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor
from torch.nn import functional as F

from tempo_megatron.data.sentences import LONGEST_SENTENCE
from tempo_megatron.data.tokenizer_types import MASKED_TYPES
from tempo_megatron.training.run.masking import Masking
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.task import (
    LOSS,
    Batch,
    Collate,
    ForwardStep,
    Vocabulary,
    average_losses,
    check_token_range,
    describe_share,
    stack_samples,
)

_PADDING = -1
_KEYS = {
    "text": "tokens",
    "types": "tokentype_ids",
    "labels": "labels",
    "is_random": "is_swapped",
    "loss_mask": "loss_mask",
    "padding_mask": "padding_mask",
}


class MaskedTask:
    """The Task of BERT and RoBERTa."""

    dataset_class = BERTMaskedWordPieceDataset
    tokenizer_types = MASKED_TYPES

    def extend_tokenizer(self, tokenizer: Any, run: RunConfig) -> Any:
        return tokenizer

    def check_split(self, prefix: str, parts: Mapping[str, tuple[float, float]], run: RunConfig) -> None:
        check_usable_documents(prefix, parts, run, least=2 if run.model.add_binary_head else 1)

    def make_dataset_config(
        self, run: RunConfig, tokenizer: Any, seed: int, **settings: Any
    ) -> BERTMaskedWordPieceDatasetConfig:
        masking = run.masking
        assert isinstance(masking, Masking)
        return BERTMaskedWordPieceDatasetConfig(
            random_seed=seed % 2**31,  # what Megatron's sample index takes
            sequence_length=run.model.seq_length,
            tokenizer=DatasetTokenizer(tokenizer),
            masking_probability=masking.mask_prob,
            short_sequence_probability=masking.short_seq_prob,
            masking_max_ngram=3 if masking.masking == "words" else 1,
            masking_do_full_word=masking.masking == "words",
            masking_do_permutation=False,
            masking_use_longer_ngrams=False,
            masking_use_geometric_distribution=False,
            classification_head=run.model.add_binary_head,
            **settings,
        )

    def make_collate(self, vocabulary: Vocabulary) -> Collate:
        return functools.partial(collate_masked, vocab_size=vocabulary.padded_size, pad=vocabulary.tokenizer.pad)

    def make_forward_step(self, run: RunConfig, device: torch.device) -> PredictMasked:
        return PredictMasked(has_segments=run.model.num_tokentypes > 0, fuses_loss=run.tempo.loss == "fused")


def check_usable_documents(prefix: str, parts: Mapping[str, tuple[float, float]], run: RunConfig, least: int) -> None:
    """Raises ValueError if a part holds no document of `least` sentences or more: Megatron, which splits by documents,
    would search for ever."""
    dataset = IndexedDataset(prefix)  # unmaps the lengths when it is freed
    borders = np.asarray(dataset.document_indices)
    is_usable = find_usable_documents(borders, np.asarray(dataset.sequence_lengths), least)
    for name, (start, end) in parts.items():
        first, last = round(start * len(is_usable)), round(end * len(is_usable))
        if not is_usable[first:last].any():
            raise ValueError(
                f"{describe_share(prefix, run, name, last - first, len(is_usable))}, none of which has "
                f"{'two sentences' if least == 2 else 'a sentence'} or more and none over {LONGEST_SENTENCE} "
                "tokens; change --split, or prepare more data with --split-sentences"
            )


def find_usable_documents(borders: np.ndarray, lengths: np.ndarray, least: int) -> np.ndarray:
    """Tells which documents Megatron's sample index uses: `least` sentences or more and, of several, none too long."""
    counts = np.diff(borders)
    is_long = np.concatenate([[0], np.cumsum(lengths > LONGEST_SENTENCE)])
    has_long = is_long[borders[1:]] > is_long[borders[:-1]]
    usable: np.ndarray = (counts >= max(1, least)) & ~(has_long & (counts > 1))
    return usable


class DatasetTokenizer:
    """A tokenizer as Megatron's masked dataset needs it: padding is -1, and "##" begins a token inside a word."""

    pad = _PADDING

    def __init__(self, tokenizer: Any) -> None:
        self.cls, self.sep, self.mask = tokenizer.cls, tokenizer.sep, tokenizer.mask
        self.unique_identifiers = tokenizer.unique_identifiers
        self.inv_vocab = {
            token_id: ("" if tokenizer.starts_word(token_id) else "##") + token.lstrip("#")
            for token_id, token in tokenizer.inv_vocab.items()
        }


def collate_masked(samples: Sequence[Mapping[str, Any]], vocab_size: int, pad: int) -> Batch:
    """Makes a batch of samples.

    It holds tokens, tokentype_ids, labels and padding_mask [b, s] int64, loss_mask [b, s] float32 and is_swapped [b]
    int64. padding_mask is 1 where there is text, loss_mask where a token was masked; any other token has the label 0.

    Args:
        samples: of BERTMaskedWordPieceDataset.
        vocab_size: rows of the embedding.
        pad: the padding token.

    Raises ValueError if a token has no row in the embedding.
    """
    batch = stack_samples(samples, _KEYS)
    is_padding = batch["padding_mask"] == _PADDING
    batch["tokens"] = batch["tokens"].masked_fill(is_padding, pad)
    batch["tokentype_ids"] = batch["tokentype_ids"].masked_fill(is_padding, 0)
    batch["padding_mask"] = (~is_padding).long()
    batch["labels"] = batch["labels"].masked_fill(batch["loss_mask"] == 0, 0)
    batch["loss_mask"] = batch["loss_mask"].float()
    check_token_range(batch["tokens"], batch["labels"], vocab_size)
    return batch


class PredictMasked(ForwardStep):
    """The ForwardStep of BERT and RoBERTa.

    Args:
        has_segments: whether the model embeds the segment that a token belongs to.
        fuses_loss: whether the model is a TempoBertModel, which computes gradients in forward and so needs the mask.
    """

    def __init__(self, has_segments: bool, fuses_loss: bool) -> None:
        self.has_segments, self.fuses_loss = has_segments, fuses_loss

    def run_model(self, model: Any, batch: Mapping[str, Tensor]) -> Any:
        return model(
            batch["tokens"],
            batch["padding_mask"],
            tokentype_ids=batch["tokentype_ids"] if self.has_segments else None,
            lm_labels=batch["labels"],
            **({"loss_mask": batch["loss_mask"]} if self.fuses_loss else {}),
        )

    def compute_losses(self, output: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the mean loss of the masked tokens, 0 if there are none; with a binary head also that of the order.

        LOSS is their sum.
        """
        losses, order_logits = output
        masked_loss = average_losses(losses, batch["loss_mask"])
        if order_logits is None:
            return {LOSS: masked_loss}
        order_loss = F.cross_entropy(order_logits.view(-1, 2).float(), batch["is_swapped"])
        return {LOSS: masked_loss + order_loss, "lm_loss": masked_loss, "sop_loss": order_loss}

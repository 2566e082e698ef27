"""Trains BERT and RoBERTa on masked tokens and the order of two segments, and T5 to fill in spans.

Samples and masks are those of megatron-core's datasets, with two exceptions, both in what is not text. They fill
samples up, and mark them as filled up, with the padding token's id, which is right where that is 0 and lets attention
see the padding elsewhere (RoBERTa's is 1); and with 0 a token that was replaced by the padding token counts as padding.
Here the dataset pads with -1, and the collation puts in what is meant.

A sample is masked anew each time it comes: a mask depends on the seed and on the position of the sample in the run.

T5's sentinels, [BOS] and [EOS] have the ids behind the tokenizer's own, as with Megatron-LM's --vocab-extra-ids, so
that data prepared for a BERT or a RoBERTa serve a T5 too. Where a sample has more spans than there are sentinels, or
more than fit into the decoder, Megatron's dataset fails; here those stay in the text.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from torch import Tensor
from torch.nn import functional as F

from tempo_megatron.data.sentences import LONGEST_SENTENCE
from tempo_megatron.data.tokenizer_types import MASKED_TYPES
from tempo_megatron.training.run.run_config import Masking, RunConfig, SpanMasking
from tempo_megatron.training.tasks.task import (
    LOSS,
    Batch,
    Collate,
    Task,
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
_SPAN_KEYS = {
    "text_enc": "encoder_tokens",
    "text_dec": "decoder_tokens",
    "labels": "labels",
    "loss_mask": "loss_mask",
    "enc_mask": "encoder_mask",
    "dec_mask": "decoder_mask",
}
_LONGEST_SPAN = 10
"""In words, as in Megatron-LM's pretrain_t5.py."""


class MaskedTask(Task):
    """The Task of BERT and RoBERTa."""

    dataset_class = BERTMaskedWordPieceDataset
    tokenizer_types = MASKED_TYPES

    def check_split(self, prefix: str, parts: Mapping[str, tuple[float, float]], run: RunConfig) -> None:
        check_usable_documents(prefix, parts, run, least=2 if run.model.add_binary_head else 1)

    def make_dataset_config(
        self, run: RunConfig, tokenizer: Any, seed: int, **settings: Any
    ) -> BERTMaskedWordPieceDatasetConfig:
        masking = run.masking
        assert isinstance(masking, Masking)
        return BERTMaskedWordPieceDatasetConfig(
            tokenizer=DatasetTokenizer(tokenizer),
            masking_max_ngram=3 if masking.masking == "words" else 1,
            masking_do_full_word=masking.masking == "words",
            masking_use_geometric_distribution=False,
            classification_head=run.model.add_binary_head,
            **_list_shared_settings(run, masking, seed),
            **settings,
        )

    def make_collate(self, vocabulary: Vocabulary) -> Collate:
        return functools.partial(collate_masked, vocab_size=vocabulary.padded_size, pad=vocabulary.tokenizer.pad)

    def run_model(self, run: RunConfig, model: Any, batch: Mapping[str, Tensor]) -> Any:
        return model(
            batch["tokens"],
            batch["padding_mask"],
            tokentype_ids=batch["tokentype_ids"] if run.model.num_tokentypes else None,
            lm_labels=batch["labels"],
            **({"loss_mask": batch["loss_mask"]} if run.tempo.loss == "fused" else {}),
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


def _list_shared_settings(run: RunConfig, masking: Masking | SpanMasking, seed: int) -> dict[str, Any]:
    """What the configurations of both tasks' data sets have in common."""
    return {
        "random_seed": seed % 2**31,  # what Megatron's sample index takes
        "sequence_length": run.model.seq_length,
        "masking_probability": masking.mask_prob,
        "short_sequence_probability": masking.short_seq_prob,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
    }


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
    """A tokenizer as Megatron's masked datasets need it: padding is -1, and "##" begins a token inside a word."""

    pad = _PADDING

    def __init__(self, tokenizer: Any) -> None:
        for name in ("cls", "sep", "mask", "unique_identifiers", "bos", "eos", "additional_special_tokens_ids"):
            if hasattr(tokenizer, name):  # the last three only if it has sentinels
                setattr(self, name, getattr(tokenizer, name))
        self.inv_vocab = {
            token_id: ("" if tokenizer.starts_word(token_id) else "##") + token.lstrip("#")
            for token_id, token in tokenizer.inv_vocab.items()
        }


def collate_masked(samples: Sequence[Mapping[str, Any]], vocab_size: int, pad: int) -> Batch:
    """Makes a batch of samples.

    It holds tokens, tokentype_ids, labels and padding_mask [b, s] int64, loss_mask [b, s] float32 and is_swapped [b]
    int64. padding_mask is 1 where there is text, loss_mask where a token was masked; any other token has the label 0.

    Raises ValueError if a token has no row in the embedding of vocab_size rows.
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


class SentinelTokenizer:
    """A tokenizer of a masked language model, with [BOS], [EOS] and `number` sentinels behind its own tokens.

    A token that the vocabulary has already keeps its id, as in Megatron-LM.
    """

    def __init__(self, tokenizer: Any, number: int) -> None:
        self._tokenizer = tokenizer
        names = ["[BOS]", "[EOS]", *(f"<extra_id_{index}>" for index in range(number))]
        added = {
            name: tokenizer.vocab_size + at for at, name in enumerate(n for n in names if n not in tokenizer.vocab)
        }
        self.bos, self.eos, *sentinels = (added.get(name, tokenizer.vocab.get(name)) for name in names)
        self.additional_special_tokens_ids: list[int] = sentinels
        self.vocab_size = tokenizer.vocab_size + len(added)
        self.unique_identifiers = {**tokenizer.unique_identifiers, "extra_ids": str(number)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy has no tokenizer yet
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


class SpanDataset(T5MaskedWordPieceDataset):  # type: ignore[misc]
    """Megatron's T5 dataset, which leaves in the text what finds no sentinel or no room in the decoder."""

    def _create_masked_lm_predictions(self, *args: Any) -> Any:
        tokens, positions, labels, boundaries, spans = super()._create_masked_lm_predictions(*args)
        room = self.config.sequence_length_decoder - 1  # [BOS] before the input, [EOS] behind the labels
        sentinels = len(self.config.tokenizer.additional_special_tokens_ids)
        kept: list[tuple[list[int], list[int]]] = []
        for indices, originals in spans:
            if len(kept) < sentinels and len(originals) < room:
                kept.append((indices, originals))
                room -= len(originals) + 1
            else:
                for index, original in zip(indices, originals, strict=True):
                    tokens[index] = original
        return tokens, positions, labels, boundaries, kept


class SpanTask(Task):
    """The Task of T5."""

    dataset_class = SpanDataset
    tokenizer_types = MASKED_TYPES

    def extend_tokenizer(self, tokenizer: Any, run: RunConfig) -> SentinelTokenizer:
        assert isinstance(run.masking, SpanMasking)
        return SentinelTokenizer(tokenizer, run.masking.vocab_extra_ids)

    def check_split(self, prefix: str, parts: Mapping[str, tuple[float, float]], run: RunConfig) -> None:
        check_usable_documents(prefix, parts, run, least=1)

    def make_dataset_config(
        self, run: RunConfig, tokenizer: Any, seed: int, **settings: Any
    ) -> T5MaskedWordPieceDatasetConfig:
        masking = run.masking
        assert masking is not None
        return T5MaskedWordPieceDatasetConfig(
            sequence_length_decoder=run.model.decoder_seq_length,
            tokenizer=DatasetTokenizer(tokenizer),
            masking_max_ngram=_LONGEST_SPAN,
            masking_do_full_word=True,
            masking_use_geometric_distribution=True,
            **_list_shared_settings(run, masking, seed),
            **settings,
        )

    def make_collate(self, vocabulary: Vocabulary) -> Collate:
        return functools.partial(collate_spans, vocab_size=vocabulary.padded_size, pad=vocabulary.tokenizer.pad)

    def run_model(self, run: RunConfig, model: Any, batch: Mapping[str, Tensor]) -> Any:
        encoder, decoder = batch["encoder_mask"], batch["decoder_mask"]
        length = decoder.size(1)
        future = torch.ones(length, length, dtype=torch.bool, device=decoder.device).triu(1)
        return model(
            batch["encoder_tokens"],
            batch["decoder_tokens"],
            hide_padding(encoder, encoder),
            hide_padding(decoder, decoder) | future,
            hide_padding(decoder, encoder),
            lm_labels=batch["labels"],
            **({"loss_mask": batch["loss_mask"]} if run.tempo.loss == "fused" else {}),
        )


def collate_spans(samples: Sequence[Mapping[str, Any]], vocab_size: int, pad: int) -> Batch:
    """Makes a batch of samples.

    It holds encoder_tokens and encoder_mask [b, s], decoder_tokens, decoder_mask and labels [b, d], all int64, and
    loss_mask [b, d] float32. A mask is 1 where there is a token, and 0 where the sample is filled up.

    Raises ValueError if a token has no row in the embedding of vocab_size rows.
    """
    batch = stack_samples(samples, _SPAN_KEYS)
    for stack in ("encoder", "decoder"):
        batch[f"{stack}_tokens"] = batch[f"{stack}_tokens"].masked_fill(batch[f"{stack}_mask"] == 0, pad)
        check_token_range(batch[f"{stack}_tokens"], batch["labels"], vocab_size)
    batch["loss_mask"] = batch["loss_mask"].float()
    return batch


def hide_padding(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns [b, 1, q, k], True = hidden: where the query [b, q] or the key [b, k] fills a sample up (0)."""
    return ~((queries[:, :, None] > 0) & (keys[:, None, :] > 0)).unsqueeze(1)

"""Trains T5 to fill in spans of a text that were taken out, on megatron-core's T5 dataset.

Sentinels, [BOS] and [EOS] have the ids behind the tokenizer's own, as with Megatron-LM's --vocab-extra-ids, so that
data prepared for a BERT or a RoBERTa serve a T5 too.

Samples are Megatron's, with the exceptions that masked.py names, and one more: where a sample has more spans than
there are sentinels, or more than fit into the decoder, Megatron's dataset fails; here those stay in the text.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from torch import Tensor

from tempo_megatron.data.tokenizer_types import MASKED_TYPES
from tempo_megatron.training.run.masking import SpanMasking
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.masked import DatasetTokenizer, check_usable_documents
from tempo_megatron.training.tasks.task import (
    LOSS,
    Batch,
    Collate,
    ForwardStep,
    Vocabulary,
    average_losses,
    check_token_range,
    stack_samples,
)

_KEYS = {
    "text_enc": "encoder_tokens",
    "text_dec": "decoder_tokens",
    "labels": "labels",
    "loss_mask": "loss_mask",
    "enc_mask": "encoder_mask",
    "dec_mask": "decoder_mask",
}
_LONGEST_SPAN = 10
"""In words, as in Megatron-LM's pretrain_t5.py."""


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


class SpanDatasetTokenizer(DatasetTokenizer):
    """A SentinelTokenizer as Megatron's T5 dataset needs it."""

    def __init__(self, tokenizer: SentinelTokenizer) -> None:
        super().__init__(tokenizer)
        self.bos, self.eos = tokenizer.bos, tokenizer.eos
        self.additional_special_tokens_ids = tokenizer.additional_special_tokens_ids


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


class SpanTask:
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
            random_seed=seed % 2**31,  # what Megatron's sample index takes
            sequence_length=run.model.seq_length,
            sequence_length_decoder=run.model.decoder_seq_length,
            tokenizer=SpanDatasetTokenizer(tokenizer),
            masking_probability=masking.mask_prob,
            short_sequence_probability=masking.short_seq_prob,
            masking_max_ngram=_LONGEST_SPAN,
            masking_do_full_word=True,
            masking_do_permutation=False,
            masking_use_longer_ngrams=False,
            masking_use_geometric_distribution=True,
            **settings,
        )

    def make_collate(self, vocabulary: Vocabulary) -> Collate:
        return functools.partial(collate_spans, vocab_size=vocabulary.padded_size, pad=vocabulary.tokenizer.pad)

    def make_forward_step(self, run: RunConfig, device: torch.device) -> FillInSpans:
        return FillInSpans(fuses_loss=run.tempo.loss == "fused")


def collate_spans(samples: Sequence[Mapping[str, Any]], vocab_size: int, pad: int) -> Batch:
    """Makes a batch of samples.

    It holds encoder_tokens and encoder_mask [b, s], decoder_tokens, decoder_mask and labels [b, d], all int64, and
    loss_mask [b, d] float32. A mask is 1 where there is a token, and 0 where the sample is filled up.

    Args:
        samples: of SpanDataset.
        vocab_size: rows of the embedding.
        pad: the padding token.

    Raises ValueError if a token has no row in the embedding.
    """
    batch = stack_samples(samples, _KEYS)
    for stack in ("encoder", "decoder"):
        batch[f"{stack}_tokens"] = batch[f"{stack}_tokens"].masked_fill(batch[f"{stack}_mask"] == 0, pad)
        check_token_range(batch[f"{stack}_tokens"], batch["labels"], vocab_size)
    batch["loss_mask"] = batch["loss_mask"].float()
    return batch


def hide_padding(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns [b, 1, q, k], True = hidden: where the query [b, q] or the key [b, k] fills a sample up (0)."""
    return ~((queries[:, :, None] > 0) & (keys[:, None, :] > 0)).unsqueeze(1)


class FillInSpans(ForwardStep):
    """The ForwardStep of T5.

    Args:
        fuses_loss: whether the model is a TempoT5Model, which computes gradients in forward and so needs the mask.
    """

    def __init__(self, fuses_loss: bool) -> None:
        self.fuses_loss = fuses_loss

    def run_model(self, model: Any, batch: Mapping[str, Tensor]) -> Any:
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
            **({"loss_mask": batch["loss_mask"]} if self.fuses_loss else {}),
        )

    def compute_losses(self, output: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the loss averaged over the decoder's tokens."""
        return {LOSS: average_losses(output, batch["loss_mask"])}

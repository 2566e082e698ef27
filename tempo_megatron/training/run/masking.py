"""Parses and checks how tokens are masked for BERT, RoBERTa and T5: Megatron-LM's arguments, and --masking."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tempo_megatron.models.shape import ModelShape
from tempo_megatron.models.shape_file import read_shape_file
from tempo_megatron.words.argument_types import parse_positive, parse_probability

WORDS, TOKENS = "words", "tokens"
MASKING_DEFAULTS = {"mask_prob": 0.15, "short_seq_prob": 0.1, "masking": WORDS}
SPAN_DEFAULTS = {"mask_prob": 0.15, "short_seq_prob": 0.1, "vocab_extra_ids": 100}
"""Used if neither the command line nor the checkpoint of --load has a value."""
SHORTEST_SAMPLE = 5
"""[CLS], a token, [SEP], a token and [SEP]."""
_SHORTEST_DECODER = 3
_SPECIAL_TOKENS = 3
"""Megatron leaves room for these even in a sample of one segment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masking:
    """`--help` describes the fields, which have arguments of the same names."""

    mask_prob: float
    short_seq_prob: float
    masking: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanMasking:
    """Of a T5: what Megatron-LM calls vocab_extra_ids are its sentinels."""

    mask_prob: float
    short_seq_prob: float
    vocab_extra_ids: int


def read_masking(family: str, values: Mapping[str, Any]) -> Masking | SpanMasking | None:
    """Returns what `values` say of it, by the names of the arguments; None for GPT."""
    if family == "bert":
        return Masking(**{name: values[name] for name in MASKING_DEFAULTS})
    return SpanMasking(**{name: values[name] for name in SPAN_DEFAULTS}) if family == "t5" else None


def add_masking_arguments(parser: argparse.ArgumentParser, family: str) -> None:
    """Adds the arguments of a BERT or a T5."""
    group = parser.add_argument_group("masking")
    group.add_argument(
        "--mask-prob",
        type=parse_probability,
        help="share of the tokens to predict",
    )
    group.add_argument(
        "--short-seq-prob",
        type=parse_probability,
        help="share of the samples that are made shorter, 0 for none as in RoBERTa",
    )
    if family == "t5":
        group.add_argument(
            "--vocab-extra-ids",
            type=parse_positive,
            help="sentinels, each of which stands for a span to fill in; their ids follow those of the vocabulary",
        )
        return
    group.add_argument(
        "--masking",
        choices=(WORDS, TOKENS),
        help="words: whole words, and up to three in a row, as Megatron-LM masks for BERT; tokens: each for itself, as "
        "in RoBERTa",
    )
    group.add_argument(
        "--bert-no-binary-head",
        action="store_true",
        help="no segments and no prediction of their order, as in RoBERTa (default: as --model says, else with both)",
    )


def take_segments(args: argparse.Namespace, stored: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the two fields of ModelShape that say whether there are segments.

    They come from the command line, else from --model, else from `stored`, else they are BERT's.

    Args:
        args: parsed with add_masking_arguments.
        stored: the ModelShape's fields of the checkpoint that the run resumes from.
    """
    below = {**(stored or {}), **(read_shape_file(args.model) if args.model else {})}
    has_head = not args.bert_no_binary_head and below.get("add_binary_head", True)
    kinds = 0 if args.bert_no_binary_head else below.get("num_tokentypes", 2 if has_head else 0)
    return {"add_binary_head": has_head, "num_tokentypes": kinds}


def check_masking(masking: Masking | SpanMasking, shape: ModelShape) -> None:
    """Raises ValueError for values at which Megatron's masked dataset of a BERT or a T5 fails."""
    seq_length = shape.seq_length
    if masking.mask_prob == 0:
        raise ValueError("--mask-prob 0 leaves nothing to predict; expected a share above 0")
    if masking.mask_prob == 1:
        raise ValueError("--mask-prob 1 leaves nothing to predict from; expected a share below 1")
    if shape.decoder_seq_length is not None and shape.decoder_seq_length < _SHORTEST_DECODER:
        raise ValueError(
            f"--decoder-seq-length {shape.decoder_seq_length} has no room for [BOS], a sentinel and a token; expected "
            f"at least {_SHORTEST_DECODER}"
        )
    if seq_length < SHORTEST_SAMPLE:
        raise ValueError(
            f"--seq-length {seq_length} has no room for two segments and what is around them; expected at least "
            f"{SHORTEST_SAMPLE}"
        )
    tokens = seq_length - _SPECIAL_TOKENS
    if masking.mask_prob * tokens < 1:
        # Megatron masks no word of more tokens than this product, and so none at all.
        shortest = math.ceil(1 / masking.mask_prob) + _SPECIAL_TOKENS
        raise ValueError(
            f"--mask-prob {masking.mask_prob:g} of the {tokens} tokens that --seq-length {seq_length} has besides "
            f"[CLS] and [SEP] is less than one token, so nothing would be predicted; expected --mask-prob of at least "
            f"{math.ceil(1e4 / tokens) / 1e4:g}, or --seq-length of at least {shortest}"
        )

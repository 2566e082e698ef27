"""Parses and checks how tokens are masked for BERT, RoBERTa and T5: Megatron-LM's arguments, and --masking."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from tempo_megatron.models.shape import ModelShape
from tempo_megatron.models.shape_file import read_shape_file
from tempo_megatron.training.run.option import STAYS, list_options, option
from tempo_megatron.words.argument_types import parse_mask_prob, parse_positive, parse_probability

WORDS, TOKENS = "words", "tokens"
SHORTEST_SAMPLE = 5
"""[CLS], a token, [SEP], a token and [SEP]."""
_SHORTEST_DECODER = 3


_option = functools.partial(option, on_load=STAYS, group="masking")
_mask_prob = functools.partial(_option, "share of the tokens to predict", parse_mask_prob, default=0.15)
_short_seq_prob = functools.partial(
    _option, "share of the samples that are made shorter, 0 for none as in RoBERTa", parse_probability, default=0.1
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masking:
    """Of a BERT."""

    mask_prob: float = _mask_prob()
    short_seq_prob: float = _short_seq_prob()
    masking: str = _option(
        "words: whole words, up to three in a row, as Megatron-LM masks for BERT; tokens: single ones, as in RoBERTa",
        default=WORDS,
        choices=(WORDS, TOKENS),
        switches={
            "bert-no-binary-head": "no segments and no prediction of their order, as in RoBERTa (default: as --model "
            "says, else with both)"
        },
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanMasking:
    """Of a T5: what Megatron-LM calls vocab_extra_ids are its sentinels."""

    mask_prob: float = _mask_prob()
    short_seq_prob: float = _short_seq_prob()
    vocab_extra_ids: int = _option(
        "sentinels for spans to fill in; their ids follow the vocabulary's", parse_positive, default=100
    )


MASKINGS: dict[str, type[Masking | SpanMasking]] = {"bert": Masking, "t5": SpanMasking}
"""Of each family that has one."""


def read_masking(family: str, values: Mapping[str, Any]) -> Masking | SpanMasking | None:
    """Returns what `values` say of it, by the names of the arguments, else the defaults; None for GPT."""
    if (kind := MASKINGS.get(family)) is None:
        return None
    options = list_options(kind).items()
    return kind(**{name: each.default if values[name] is None else values[name] for name, each in options})


def take_segments(args: argparse.Namespace, stored: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the two fields of ModelShape that say whether there are segments.

    They come from the command line, else from --model, else from `stored`, the checkpoint's fields of ModelShape, else
    they are BERT's.
    """
    below = {**(stored or {}), **(read_shape_file(args.model) if args.model else {})}
    has_head = not args.bert_no_binary_head and below.get("add_binary_head", True)
    kinds = 0 if args.bert_no_binary_head else below.get("num_tokentypes", 2 if has_head else 0)
    return {"add_binary_head": has_head, "num_tokentypes": kinds}


def check_masking(masking: Masking | SpanMasking, shape: ModelShape) -> None:
    """Raises ValueError for values at which Megatron's masked dataset of a BERT or a T5 fails."""
    seq_length = shape.seq_length
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
    tokens = seq_length - 3  # Megatron leaves room for three special tokens even in a sample of one segment
    if masking.mask_prob * tokens < 1:
        # Megatron masks no word of more tokens than this product, and so none at all.
        shortest = math.ceil(1 / masking.mask_prob) + 3
        raise ValueError(
            f"--mask-prob {masking.mask_prob:g} of the {tokens} tokens that --seq-length {seq_length} has besides "
            f"[CLS] and [SEP] is less than one token, so nothing would be predicted; expected --mask-prob of at least "
            f"{math.ceil(1e4 / tokens) / 1e4:g}, or --seq-length of at least {shortest}"
        )

"""The model and the micro batch that the commands ledger and estimate are asked about."""

from __future__ import annotations

import argparse
from typing import Any

from tempo_megatron.argument_types import parse_positive
from tempo_megatron.models.build import DTYPES
from tempo_megatron.models.shape import ModelShape, make_shape, read_shape_file


def add_shape_arguments(parser: Any) -> None:
    """What `read_requested_shape` reads beside --model, and --micro-batch-size and --dtype, to a parser or a group."""
    parser.add_argument(
        "--seq-length", type=parse_positive, metavar="S", help="tokens per sample (default the model's)"
    )
    parser.add_argument("--micro-batch-size", type=parse_positive, default=1, metavar="B", help="samples (default 1)")
    parser.add_argument(
        "--vocab-size", type=parse_positive, metavar="V", help="tokens (default the model's, else 50257)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default %(default)s")
    parser.add_argument(
        "--recompute",
        nargs="+",
        choices=("full", "core_attn", "mlp"),
        default=[],
        metavar="WHAT",
        help="Megatron's recomputation: full, or any of core_attn and mlp",
    )


def read_requested_shape(args: argparse.Namespace) -> ModelShape:
    """The model of --model with what else was typed; --dropout, where it is not None, is of both kinds.

    Raises ValueError where the file or a value cannot be had.
    """
    if "full" in args.recompute and len(args.recompute) > 1:
        raise ValueError("--recompute full already recomputes everything; give it alone")
    values = {"vocab_size": 50257, **read_shape_file(args.model)}
    dropout = {"attention_dropout": args.dropout, "hidden_dropout": args.dropout}
    given = {"seq_length": args.seq_length, "vocab_size": args.vocab_size, **dropout}
    values |= {name: value for name, value in given.items() if value is not None}
    if values.get("max_position_embeddings", 0) < values.get("seq_length", 0):
        values["max_position_embeddings"] = values["seq_length"]
    return make_shape(**values)

"""The model and the micro batch that the commands ledger and estimate are asked about."""

from __future__ import annotations

import argparse
from typing import Any

from tempo_megatron.argument_types import parse_positive
from tempo_megatron.models.build import DTYPES
from tempo_megatron.models.shape import ModelShape, make_shape, read_shape_file


def add_shape_arguments(parser: Any) -> None:
    """Add the arguments that describe a model and its micro batch to a parser or a group.

    --model and --dropout are not among them: each command has its own.
    """
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
    """The model of --model, with the values that were typed in place of the file's.

    --dropout is that of attention and of hidden states alike; None leaves both to the file.

    Raises ValueError where the file is no model, or a value does not go with it.
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

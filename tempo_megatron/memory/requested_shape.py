"""The model that the commands ledger, estimate, plan and flops are asked about."""

from __future__ import annotations

import argparse

from tempo_megatron.models.shape import ModelShape, make_shape, read_shape_file


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

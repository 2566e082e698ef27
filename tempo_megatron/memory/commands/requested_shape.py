"""Reads the model that the commands ledger, estimate, plan and flops are asked about, and its stock modules."""

from __future__ import annotations

import argparse
from typing import Any

from tempo_megatron.memory.estimate.estimate import RankLayout
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


def read_stock(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a RankLayout that say what stock modules are.

    Raises ValueError where --stock-attention or --no-masked-softmax-fusion speaks of modules that are not there.
    """
    stock = args.stock or ("local" if args.deepspeed_config else "transformer_engine")
    if args.stock_attention is not None and stock != "transformer_engine":
        raise ValueError(
            f"--stock-attention {args.stock_attention} is Transformer Engine's, and the stock modules are {stock}, "
            "whose attention is unfused; leave it out, or give --stock transformer_engine"
        )
    attention = args.stock_attention or "fused"
    if args.no_masked_softmax_fusion and (stock == "cpu" or (stock == "transformer_engine" and attention != "unfused")):
        raise ValueError(
            f"--no-masked-softmax-fusion is given, and stock attention ({stock}) has no softmax kernel to leave out; "
            "leave it out, or give --stock local or --stock-attention unfused"
        )
    return {
        "stock": stock,
        "stock_attention": attention,
        "masked_softmax_fusion": not args.no_masked_softmax_fusion,
    }


def describe_stock(layout: RankLayout) -> str:
    """For people: `Transformer Engine's, with fused attention`."""
    if layout.stock == "cpu":
        return "Megatron's local ones on a CPU"
    softmax = "unfused attention" + ("" if layout.masked_softmax_fusion else " without a softmax kernel")
    if layout.stock == "local":
        return f"Megatron's local ones, with {softmax}"
    attention = {"fused": "fused attention", "flash": "FlashAttention 2", "unfused": softmax}[layout.stock_attention]
    return f"Transformer Engine's, with {attention}"

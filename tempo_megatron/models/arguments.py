"""The arguments that say what a model is: Megatron-LM's own names, each of which wins over the file of `--model`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tempo_megatron.models.shape import CHOICES, NAMES, ModelShape, make_shape, read_shape_file
from tempo_megatron.settings.activations import ACTIVATIONS
from tempo_megatron.words.argument_types import (
    parse_fraction,
    parse_positive,
    parse_positive_float,
    parse_share,
    parse_window,
)

_ACTIVATIONS = [activation for activation in ACTIVATIONS.values() if activation.help]
OPTIONS = {
    "family": "--model",
    "activation": " or ".join(activation.option for activation in _ACTIVATIONS),
    "num_query_groups": "--group-query-attention and --num-query-groups",
    "add_bias_linear": "--disable-bias-linear",
    "num_tokentypes": "--model",
    "add_binary_head": "--model",
    "decoder_seq_length": "--decoder-seq-length",
}
"""Field of ModelShape -> what a user changes to change it, where that is not the option of its name."""


def name_option(field: str) -> str:
    """What a user changes to change a field of ModelShape."""
    return OPTIONS.get(field, "--" + field.replace("_", "-"))


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --model, sizes, activation, norms, attention, positions, weights and dropout, in groups of their own."""
    _add_sizes(parser)
    _add_layer(parser)
    _add_positions(parser)
    _add_weights(parser)


def take_model(args: argparse.Namespace, *families: str) -> ModelShape:
    """The model of `args`, of which nothing is changed: the file of --model with what was typed on top.

    Args:
        args: parsed with add_model_arguments.
        families: those that the program trains; none means any.

    Raises ValueError where something is missing, contradicts another thing, or is of another family.
    """
    return make_shape(**read_given_model(args, *families))


def read_given_model(
    args: argparse.Namespace, *families: str, stored: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The fields of ModelShape that the file of --model and what was typed give, and the family.

    Args:
        args: parsed with add_model_arguments.
        families: those that the program trains; none means any.
        stored: of the checkpoint that the run goes on from, ModelShape.describe; what is given is read on top of it.

    Raises ValueError where two things contradict each other, or where the model is of another family.
    """
    given = read_shape_file(args.model) if args.model else {}
    if families:
        family = {**(stored or {}), **given}.get("family", families[0])
        if family not in families:
            raise ValueError(
                f"{f'--model {args.model}' if 'family' in given else f'the checkpoint of --load {args.load}'} is of "
                f"the family {family}; expected {' or '.join(families)}: give such a one, or start it with the script "
                f"for {family}"
            )
        given["family"] = family
    below = {**(stored or {}), **given}
    typed = {name: value for name, value in vars(args).items() if name in NAMES and value is not None}
    typed |= _take_activation(args, below) | _take_groups(args, below)
    if args.disable_bias_linear is not None:
        typed["add_bias_linear"] = not args.disable_bias_linear
    return {**given, **typed}


def _take_activation(args: argparse.Namespace, in_file: dict[str, Any]) -> dict[str, Any]:
    given = {activation.name: getattr(args, activation.name) for activation in _ACTIVATIONS}
    wanted = [name for name, value in given.items() if value]
    if len(wanted) > 1:
        options = [ACTIVATIONS[name].option for name in wanted]
        raise ValueError(f"{' and '.join(options)} are both given; an MLP has one activation: leave one out")
    if wanted:
        return {"activation": wanted[0]}
    return {"activation": "gelu"} if given.get(in_file.get("activation", "gelu")) is False else {}


def _take_groups(args: argparse.Namespace, in_file: dict[str, Any]) -> dict[str, Any]:
    groups = args.num_query_groups
    heads = in_file.get("num_attention_heads") if args.num_attention_heads is None else args.num_attention_heads
    if args.group_query_attention is None:
        if groups not in (None, heads) and "num_query_groups" not in in_file:
            raise ValueError(
                f"--num-query-groups {groups} is given without --group-query-attention, and Megatron-LM then trains as "
                "many groups as heads; add --group-query-attention or leave --num-query-groups out"
            )
        return {}
    if not args.group_query_attention:
        if groups not in (None, heads):
            raise ValueError(f"--num-query-groups {groups} and --no-group-query-attention are both given; give one")
        return {"num_query_groups": heads}
    return {"num_query_groups": groups or in_file.get("num_query_groups", 1)}


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model", "each may also come from --model; an explicit argument wins")
    group.add_argument("--model", metavar="JSON", help="file with a model, such as configs/model/gpt2_124m.json")
    group.add_argument("--num-layers", type=parse_positive, help="transformer layers")
    group.add_argument("--hidden-size", type=parse_positive, help="hidden size h")
    group.add_argument(
        "--ffn-hidden-size",
        type=parse_positive,
        help="inner size of the MLP (default 4 h; gated 8/3 h, rounded down to a multiple of 64)",
    )
    group.add_argument("--num-attention-heads", type=parse_positive, help="attention heads")
    group.add_argument("--kv-channels", type=parse_positive, help="size of one head (default h / heads)")
    group.add_argument("--seq-length", type=parse_positive, help="tokens per sample")
    group.add_argument("--vocab-size", type=parse_positive, help="tokens before padding (default: the tokenizer's)")
    group.add_argument(
        "--make-vocab-size-divisible-by",
        type=parse_positive,
        metavar="N",
        help="pad the vocabulary to a multiple of N times tensor parallel size (default 128)",
    )


def _add_layer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "layer", "what GPT-2 has is the default; --no-NAME takes back what the file of --model says"
    )
    for activation in _ACTIVATIONS:
        _add_switch(group, activation.option, activation.help)
    _add_switch(group, "--disable-bias-linear", "linears without a bias")
    _add_switch(group, "--add-qkv-bias", "with --disable-bias-linear: a bias of q, k and v all the same")
    group.add_argument("--normalization", choices=CHOICES["normalization"], help="default LayerNorm")
    group.add_argument("--norm-epsilon", type=parse_positive_float, help="added to the variance (default 1e-5)")
    _add_switch(group, "--qk-layernorm", "a norm of each head of queries and keys")
    _add_switch(group, "--group-query-attention", "groups of query heads share a head of keys and values")
    group.add_argument(
        "--num-query-groups", type=parse_positive, help="with --group-query-attention: how many (default 1)"
    )
    group.add_argument(
        "--window-size",
        type=parse_window,
        metavar="N,0",
        help="attention sees the token itself and N before it (default all)",
    )


def _add_positions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("positions")
    group.add_argument(
        "--position-embedding-type", choices=CHOICES["position_embedding_type"], help="default learned_absolute"
    )
    group.add_argument(
        "--max-position-embeddings", type=parse_positive, help="learned positions (default --seq-length)"
    )
    group.add_argument("--rotary-base", type=parse_positive, help="base of rope's periods (default 10000)")
    group.add_argument("--rotary-percent", type=parse_share, help="share of a head that rope rotates (default 1)")
    _add_switch(group, "--use-rope-scaling", "scale rope's frequencies as Llama 3.1 does")
    group.add_argument(
        "--rope-scaling-factor", type=parse_positive_float, help="with --use-rope-scaling: factor (default 8)"
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("weights and dropout")
    group.add_argument(
        "--init-method-std", type=parse_positive_float, help="deviation of the first weights (default 0.02)"
    )
    _add_switch(
        group,
        "--untie-embeddings-and-output-weights",
        "give the output layer weights of its own instead of the embedding's",
    )
    group.add_argument("--attention-dropout", type=parse_fraction, help="default 0.1")
    group.add_argument("--hidden-dropout", type=parse_fraction, help="default 0.1")


def _add_switch(group: Any, option: str, text: str) -> None:
    group.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=text)

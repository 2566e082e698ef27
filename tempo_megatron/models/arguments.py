"""The arguments that say what a model is: Megatron-LM's own names, each of which wins over the file of `--model`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tempo_megatron.models.shape import CHOICES, NAMES, QUICK_GEGLU
from tempo_megatron.models.shape_file import read_shape_file
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
}
"""Field of ModelShape -> the options that change it, if these do not have its name."""


def name_option(field: str) -> str:
    """The options that change a field of ModelShape."""
    return OPTIONS.get(field, "--" + field.replace("_", "-"))


_SIZES: dict[str, tuple[Any, str]] = {
    "--num-layers": (parse_positive, "transformer layers"),
    "--hidden-size": (parse_positive, "hidden size h"),
    "--ffn-hidden-size": (
        parse_positive,
        "inner size of the MLP (default 4 h; gated 8/3 h, rounded down to a multiple of 64)",
    ),
    "--num-attention-heads": (parse_positive, "attention heads"),
    "--kv-channels": (parse_positive, "size of one head (default h / heads)"),
    "--seq-length": (parse_positive, "tokens per sample"),
    "--vocab-size": (parse_positive, "tokens before padding (default: the tokenizer's)"),
    "--make-vocab-size-divisible-by": (
        parse_positive,
        "pad the vocabulary to a multiple of it times tensor parallel size (default 128)",
    ),
}
"""Option -> (what reads its value: a function, bool for a switch, or the choices, and what `--help` says)."""

_LAYER: dict[str, tuple[Any, str]] = {
    **{activation.option: (bool, activation.help) for activation in _ACTIVATIONS},
    "--disable-bias-linear": (bool, "linears without a bias"),
    "--add-qkv-bias": (bool, "with --disable-bias-linear: a bias of q, k and v all the same"),
    "--normalization": (CHOICES["normalization"], "default LayerNorm"),
    "--norm-epsilon": (parse_positive_float, "added to the variance (default 1e-5)"),
    "--qk-layernorm": (bool, "a norm of each head of queries and keys"),
    "--group-query-attention": (bool, "groups of query heads share a head of keys and values"),
    "--num-query-groups": (parse_positive, "with --group-query-attention: how many (default 1)"),
    "--window-size": (parse_window, "N,0: attention sees the token itself and N before it (default all)"),
    "--window-attn-skip-freq": (parse_positive, "with --window-size: every N-th layer sees all tokens"),
    "--softmax-type": (CHOICES["softmax_type"], "learnable: a sink beside each head's scores (default vanilla)"),
    "--quick-geglu": (bool, "gated MLP: x sigmoid(1.702 x) of one half times the other, instead of gelu"),
    "--activation-func-clamp-value": (parse_positive_float, "with --quick-geglu: clamp both halves"),
    "--glu-linear-offset": (parse_positive_float, "with --quick-geglu: add this to the half that is weighted"),
}
_EXPERTS: dict[str, tuple[Any, str]] = {
    "--num-experts": (parse_positive, "experts of a layer (default: none)"),
    "--moe-layer-freq": (str, "layers with experts: every N-th, or lists such as ([0]*1+[1]*15) (default all)"),
    "--moe-router-topk": (parse_positive, "experts of a token (default 2)"),
    "--moe-ffn-hidden-size": (parse_positive, "inner size of an expert (default --ffn-hidden-size)"),
    "--moe-shared-expert-intermediate-size": (parse_positive, "inner size of experts that every token goes to"),
    "--moe-router-score-function": (CHOICES["moe_router_score_function"], "default softmax"),
    "--moe-router-pre-softmax": (bool, "score all experts, not those of the token alone"),
    "--moe-router-num-groups": (parse_positive, "groups of experts"),
    "--moe-router-group-topk": (parse_positive, "of which a token's experts are in so many"),
    "--moe-router-topk-scaling-factor": (parse_positive_float, "what scores are multiplied by"),
    "--moe-router-enable-expert-bias": (bool, "balance experts by biases that no gradient changes"),
    "--moe-router-load-balancing-type": (CHOICES["moe_router_load_balancing_type"], "default aux_loss"),
    "--moe-aux-loss-coeff": (parse_positive_float, "weight of the auxiliary loss (default 0)"),
    "--moe-z-loss-coeff": (parse_positive_float, "weight of the router's z-loss (default 0)"),
    "--moe-expert-capacity-factor": (parse_positive_float, "drop an expert's tokens beyond so many equal shares"),
    "--moe-pad-expert-input-to-capacity": (bool, "pad an expert's tokens to its capacity"),
    "--moe-router-dtype": (CHOICES["moe_router_dtype"], "of the router's scores (default the model's)"),
}
_LATENT: dict[str, tuple[Any, str]] = {
    "--multi-latent-attention": (bool, "project queries, keys and values from latent vectors"),
    "--q-lora-rank": (parse_positive, "size of the queries' (default: projected from hidden states)"),
    "--kv-lora-rank": (parse_positive, "size of that of keys and values"),
    "--qk-head-dim": (parse_positive, "channels of a head of queries and keys without positions"),
    "--qk-pos-emb-head-dim": (parse_positive, "and with"),
    "--v-head-dim": (parse_positive, "channels of a head of values"),
}
_POSITIONS: dict[str, tuple[Any, str]] = {
    "--position-embedding-type": (CHOICES["position_embedding_type"], "default learned_absolute"),
    "--max-position-embeddings": (parse_positive, "learned positions (default --seq-length)"),
    "--rotary-base": (parse_positive, "base of rope's periods (default 10000)"),
    "--rotary-percent": (parse_share, "share of a head that rope rotates (default 1)"),
    "--use-rope-scaling": (bool, "scale rope's frequencies as Llama 3.1 does"),
    "--rope-scaling-factor": (parse_positive_float, "with --use-rope-scaling: factor (default 8)"),
    "--rotary-scaling-factor": (parse_positive_float, "of yarn (default 40)"),
    "--original-max-position-embeddings": (parse_positive, "of yarn: positions before scaling (default 4096)"),
    "--beta-fast": (parse_positive_float, "of yarn (default 32)"),
    "--beta-slow": (parse_positive_float, "of yarn (default 1)"),
    "--mscale": (parse_positive_float, "of yarn"),
    "--mscale-all-dim": (parse_positive_float, "of yarn"),
    "--yarn-correction-range-round-to-int": (bool, "of yarn: interpolate between whole channels (default)"),
}
_WEIGHTS: dict[str, tuple[Any, str]] = {
    "--init-method-std": (parse_positive_float, "deviation of the first weights (default 0.02)"),
    "--untie-embeddings-and-output-weights": (
        bool,
        "give the output layer weights of its own instead of the embedding's",
    ),
    "--attention-dropout": (parse_fraction, "default 0.1"),
    "--hidden-dropout": (parse_fraction, "default 0.1"),
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --model, sizes, activation, norms, attention, positions, weights and dropout, in groups of their own."""
    group = parser.add_argument_group("model", "each may also come from --model; an explicit argument wins")
    group.add_argument(
        "--model",
        metavar="JSON",
        help="file with a model, such as configs/model/gpt2_124m.json, or the folder or config.json of a Hugging Face "
        "model",
    )
    _add(group, _SIZES)
    of_file = "what GPT-2 has is the default; --no-NAME takes back what the file of --model says"
    _add(parser.add_argument_group("layer", of_file), _LAYER)
    _add(parser.add_argument_group("positions"), _POSITIONS)
    _add(parser.add_argument_group("mixture of experts"), _EXPERTS)
    _add(parser.add_argument_group("latent attention"), _LATENT)
    _add(parser.add_argument_group("weights and dropout"), _WEIGHTS)


def _add(group: Any, options: Mapping[str, tuple[Any, str]]) -> None:
    for option, (kind, text) in options.items():
        if kind is bool:
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif isinstance(kind, tuple):
            group.add_argument(option, choices=kind, help=text)
        else:
            group.add_argument(option, type=kind, help=text)


def read_given_model(
    args: argparse.Namespace, *families: str, stored: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The fields of ModelShape that the file of --model and what was typed give, and the family.

    Args:
        args: parsed with add_model_arguments.
        families: those that the program trains; none means any.
        stored: ModelShape.describe of the checkpoint that the run continues; given fields override it.

    Raises ValueError where two fields contradict each other, or where the model is of another family.
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
    given = {name: getattr(args, name) for name in (*(each.name for each in _ACTIVATIONS), QUICK_GEGLU)}
    wanted = [name for name, value in given.items() if value]
    if len(wanted) > 1:
        options = [f"--{name.replace('_', '-')}" for name in wanted]
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

"""`--use-tempo` and its companions, and how they are joined with the `"tempo"` block of a DeepSpeed JSON."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tempo_megatron.config import CHOICES, TempoConfig, check_block

_HELP = {
    "gelu": "the MLP's activation keeps, inplace, its output and one bit per element instead of its input; "
    "recompute, its input only (gated ones too)",
    "norm": "LayerNorm and RMSNorm keep, inplace, their output and rstd instead of their input; "
    "recompute, their input only",
    "dropout": "hidden and embedding dropout keep nothing; their masks are redrawn in backward",
    "attention": "attention keeps, flash, q, k, v, output and logsumexp, no s*s tensor and no mask; "
    "softmax, one s*s tensor",
    "loss": "the loss head keeps hidden states instead of logits, of which one chunk of tokens is alive at a time",
}


def add_tempo_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--use-tempo`, `--no-use-tempo` and one `--tempo-<operation>` per operation to `parser`."""
    group = parser.add_argument_group("tempo", "activation memory; each argument wins over the DeepSpeed JSON's block")
    group.add_argument(
        "--use-tempo",
        action=argparse.BooleanOptionalAction,
        default=None,
        help='switch Tempo on or off; without it "enabled" of the "tempo" block decides, and without a block it is off',
    )
    for name, choices in CHOICES.items():
        group.add_argument(f"--tempo-{name}", choices=choices, default=None, help=_HELP[name])
    return parser


def tempo_config_from(args: argparse.Namespace, deepspeed_config: Mapping[str, Any] | None = None) -> TempoConfig:
    """The TempoConfig of a run: the `"tempo"` block of `deepspeed_config`, with each given argument on top.

    Returns `TempoConfig.off()` where Tempo is not switched on.
    Raises ValueError where an argument asks for an operation but Tempo is off, so that nothing typed is ignored.
    """
    block = check_block(deepspeed_config["tempo"]) if deepspeed_config and "tempo" in deepspeed_config else None
    given = {name: value for name in CHOICES if (value := getattr(args, f"tempo_{name}")) is not None}
    enabled = args.use_tempo
    if enabled is None:
        enabled = block is not None and block.get("enabled", True)
    if not enabled:
        if given:
            name = next(iter(given))
            raise ValueError(f"--tempo-{name} is given but Tempo is off; add --use-tempo or leave --tempo-{name} out")
        return TempoConfig.off()
    fields = {name: value for name, value in (block or {}).items() if name != "enabled"}
    return TempoConfig(**{**fields, **given})

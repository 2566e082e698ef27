"""Checks the value of one field of a model, as a file or a command line gives it."""

from __future__ import annotations

import math
from typing import Any

from tempo_megatron.settings.activations import ACTIVATIONS

CHOICES = {
    "family": ("gpt", "bert", "t5"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "activation": tuple(ACTIVATIONS),
    "position_embedding_type": ("learned_absolute", "rope", "none"),
}
_SWITCHES = (
    "use_rope_scaling",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "add_binary_head",
)
_PROBABILITIES = ("attention_dropout", "hidden_dropout")
_POSITIVE = ("norm_epsilon", "init_method_std", "rope_scaling_factor")


def check_value(name: str, value: Any) -> str | None:
    """What is expected of a field of ModelShape, in the types of JSON; None where `value` is as expected."""
    if name in CHOICES:
        return None if value in CHOICES[name] else f"one of {', '.join(CHOICES[name])}"
    if name in _SWITCHES:
        return None if isinstance(value, bool) else "true or false"
    if name == "window_size":
        is_pair = isinstance(value, list) and len(value) == 2 and all(_is_whole(n) and n >= -1 for n in value)
        return None if is_pair else "two whole numbers from -1, such as [128, 0]"
    if name in (*_PROBABILITIES, *_POSITIVE, "rotary_percent"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if name in _PROBABILITIES:
            return None if is_number and 0 <= value < 1 else "a probability in [0, 1)"
        if name == "rotary_percent":
            return None if is_number and 0 < value <= 1 else "a number in (0, 1]"
        return None if is_number and value > 0 else "a positive number"
    least = 0 if name == "num_tokentypes" else 1
    words = "a whole number from 0" if least == 0 else "a positive whole number"
    return None if _is_whole(value) and value >= least else words


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""What no model can be, one sentence each, and what the values of a file may be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tempo_megatron.models.shape import ModelShape

CHOICES = {
    "family": ("gpt", "bert", "t5"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "activation": ("gelu", "swiglu", "geglu", "squared_relu"),
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
_OPTIONAL = ("vocab_size", "decoder_seq_length", "window_size")
_PROBABILITIES = ("attention_dropout", "hidden_dropout")
_POSITIVE = ("norm_epsilon", "init_method_std", "rope_scaling_factor")
# Arguments that nothing but rope reads, and the values they have without it.
_ROPE = {"rotary_base": 10000, "rotary_percent": 1.0, "use_rope_scaling": False, "rope_scaling_factor": 8.0}


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


def check_shape(shape: ModelShape) -> None:
    """Raise ValueError for the first thing that no model has, or that contradicts another."""
    for name, value in shape.describe().items():
        if value is None and name in _OPTIONAL:
            continue
        if (expected := check_value(name, value)) is not None:
            raise ValueError(f"{name} is {value!r}; expected {expected}")
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if heads % groups:
        raise ValueError(
            f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}; change one of them"
        )
    _check_positions(shape)
    if shape.add_qkv_bias and shape.add_bias_linear:
        raise ValueError(
            "--add-qkv-bias is given, but every linear has a bias, that of q, k and v too; leave it out, or add "
            "--disable-bias-linear"
        )
    _check_window(shape)
    _check_family(shape)


def _check_positions(shape: ModelShape) -> None:
    kind = shape.position_embedding_type
    if kind == "rope":
        rotated = int(shape.kv_channels * shape.rotary_percent)
        if rotated < 2 or rotated % 2:
            raise ValueError(
                f"rope would rotate {rotated} of {shape.kv_channels} channels of a head; expected an even number of at "
                "least 2: change --kv-channels or --rotary-percent"
            )
        if shape.rope_scaling_factor != _ROPE["rope_scaling_factor"] and not shape.use_rope_scaling:
            raise ValueError("--rope-scaling-factor is given without --use-rope-scaling; give both or none")
        return
    for name, default in _ROPE.items():
        if getattr(shape, name) != default:
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} is for rope, but --position-embedding-type is {kind}; give --position-embedding-type rope "
                f"or leave {option} out"
            )
    longest = max(shape.seq_length, shape.decoder_seq_length or 0)
    if kind == "learned_absolute" and longest > shape.max_position_embeddings:
        raise ValueError(
            f"--seq-length {longest} is more than the {shape.max_position_embeddings} learned positions; "
            "shorten it or give --max-position-embeddings"
        )


def _check_window(shape: ModelShape) -> None:
    if shape.window_size is None:
        return
    left, right = shape.window_size
    if right != 0:
        raise ValueError(
            f"--window-size {left},{right} lets a token see {'all' if right < 0 else right} of those after it, whose "
            f"labels it would read; expected {left},0"
        )
    if left < 0:
        raise ValueError(f"--window-size {left},{right} is no window; leave it out, or give its tokens, such as 128,0")


def _check_family(shape: ModelShape) -> None:
    family = shape.family
    given = {
        "decoder_seq_length": shape.decoder_seq_length is not None,
        "num_tokentypes": shape.num_tokentypes > 0,
        "add_binary_head": shape.add_binary_head,
    }
    for name, of in (("decoder_seq_length", "t5"), ("num_tokentypes", "bert"), ("add_binary_head", "bert")):
        if given[name] and family != of:
            raise ValueError(f"{name} is for the family {of}, but the model's is {family}; leave it out")
    if family == "gpt":
        return
    # What Megatron's BertModel and T5Model, or their layer specs, would refuse or pass over in silence.
    refused = {
        f"--normalization {shape.normalization}": shape.normalization != "LayerNorm",
        "--qk-layernorm": shape.qk_layernorm,
        "--window-size": shape.window_size is not None,
        "--position-embedding-type none": shape.position_embedding_type == "none",
        f"--rotary-base {shape.rotary_base}": shape.rotary_base != _ROPE["rotary_base"],
        "--use-rope-scaling": shape.use_rope_scaling,
        "--group-query-attention": family == "t5" and shape.num_query_groups != shape.num_attention_heads,
        "--disable-bias-linear": family == "bert" and not shape.add_bias_linear,
    }
    for option, is_given in refused.items():
        if is_given:
            raise ValueError(f"{option} is given, but Megatron's {family.upper()} has no such thing; leave it out")


def check_layout(
    shape: ModelShape,
    tensor_model_parallel_size: int,
    sequence_parallel: bool,
    option: str = "--tensor-model-parallel-size",
) -> None:
    """Raise ValueError, which calls tensor parallelism by `option`, where this many devices cannot share a layer."""
    tp = tensor_model_parallel_size
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if (value := getattr(shape, name)) % tp:
            of = "--" + name.replace("_", "-")
            raise ValueError(f"{of} {value} is not a multiple of {option} {tp}; change one of them")
    groups = shape.num_query_groups
    if groups % tp and tp % groups:
        raise ValueError(f"--num-query-groups {groups} and {option} {tp} do not divide one another; change one of them")
    if not sequence_parallel:
        return
    if tp == 1:
        raise ValueError(f"--sequence-parallel needs {option} of at least 2; remove it or raise that")
    for name in ("seq_length", "decoder_seq_length"):
        if (length := getattr(shape, name)) is not None and length % tp:
            of = "--" + name.replace("_", "-")
            raise ValueError(
                f"{of} {length} is not a multiple of {option} {tp}, as --sequence-parallel needs; change one of them"
            )

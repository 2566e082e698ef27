"""ModelShape: what a model is, whatever it is trained on and however it is laid out over devices."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.settings.activations import ACTIVATIONS, GATED
from tempo_megatron.words.json_text import read_object

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
_OPTIONAL = ("vocab_size", "decoder_seq_length", "window_size")
# Arguments that nothing but rope reads, and the values they have without it.
_ROPE = {"rotary_base": 10000, "rotary_percent": 1.0, "use_rope_scaling": False, "rope_scaling_factor": 8.0}
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes and kinds of a model's parts; `make_shape` fills in those that follow from others.

    Raises ValueError where fields contradict one another.
    """

    family: str
    """gpt, bert or t5: Megatron's GPTModel, BertModel or T5Model."""
    num_layers: int
    """Transformer layers; in T5 of the encoder, and as many of the decoder."""
    hidden_size: int
    ffn_hidden_size: int
    """Inner size of the MLP; a gated activation has two projections of this size."""
    num_attention_heads: int
    num_query_groups: int
    """Heads of keys and values; as many as heads of queries where these are not grouped."""
    kv_channels: int
    """Size of one head."""
    seq_length: int
    """Tokens of a sample; in T5 those of the encoder."""
    decoder_seq_length: int | None = None
    """T5 only: tokens of the decoder."""
    max_position_embeddings: int
    vocab_size: int | None = None
    """Before padding; None leaves it to the tokenizer."""
    make_vocab_size_divisible_by: int = 128
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    activation: str = "gelu"
    """A name of `tempo_megatron.settings.activations`."""
    position_embedding_type: str = "learned_absolute"
    """learned_absolute, rope or none."""
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    use_rope_scaling: bool = False
    """Llama 3's scaling of rope's frequencies."""
    rope_scaling_factor: float = 8.0
    qk_layernorm: bool = False
    window_size: tuple[int, int] | None = None
    """Tokens to the left and to the right that attention sees; -1 is all of them."""
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False
    init_method_std: float = 0.02
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    num_tokentypes: int = 0
    """BERT only: kinds of segments, 0 without."""
    add_binary_head: bool = False
    """BERT only: the head that predicts whether two segments follow one another."""

    def __post_init__(self) -> None:
        check_shape(self)

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    def describe(self) -> dict[str, Any]:
        """Every field, as JSON has them."""
        described = dataclasses.asdict(self)
        return {**described, "window_size": self.window_size and list(self.window_size)}

    def summarize(self) -> str:
        """One clause for people: what differs from GPT-2 is named, sizes come first."""
        words = [f"{self.num_layers} layers", f"hidden {self.hidden_size}", f"{self.num_attention_heads} heads"]
        if self.num_query_groups != self.num_attention_heads:
            words.append(f"{self.num_query_groups} query groups")
        if self.kv_channels * self.num_attention_heads != self.hidden_size:
            words.append(f"{self.kv_channels} channels a head")
        words.append(f"{self.seq_length} tokens")
        if self.decoder_seq_length is not None:
            words.append(f"{self.decoder_seq_length} in the decoder")
        if self.position_embedding_type != "learned_absolute":
            positions = {"rope": f"rope of base {self.rotary_base}", "none": "no positions"}
            words.append(positions[self.position_embedding_type])
        if self.normalization != "LayerNorm":
            words.append(self.normalization)
        if self.qk_layernorm:
            words.append("norms of q and k")
        if self.window_size is not None:
            words.append(f"window {self.window_size[0]},{self.window_size[1]}")
        if not self.add_bias_linear:
            words.append("no bias but of q, k and v" if self.add_qkv_bias else "no biases")
        if self.untie_embeddings_and_output_weights:
            words.append("untied")
        return ", ".join(words)


def check_shape(shape: ModelShape) -> None:
    """Raise ValueError for the first field that no model can have, or that contradicts another."""
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
    # What Megatron's BertModel and T5Model, or their layer specs, would refuse or silently ignore.
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


NAMES = tuple(field.name for field in dataclasses.fields(ModelShape))


def make_shape(**values: Any) -> ModelShape:
    """The shape of these values; values that are missing or None follow from the others, as in Megatron-LM.

    The MLP is 4 h wide. A gated one is 8/3 h wide, rounded down to a multiple of 64, so that it has about as many
    weights: Megatron-LM's rule for swiglu, here applied to all gated activations.

    Raises ValueError where a size without a default is missing, or where two values contradict each other.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name in REQUIRED:
        if name not in given:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is missing; give it, or --model with a file of configs/model")
    hidden_size, heads = given["hidden_size"], given["num_attention_heads"]
    if "kv_channels" not in given and hidden_size % heads:
        raise ValueError(
            f"--hidden-size {hidden_size} is not a multiple of --num-attention-heads {heads}; change one of them, or "
            "give --kv-channels"
        )
    is_gated = given.get("activation") in GATED
    completed = {
        "family": "gpt",
        "ffn_hidden_size": hidden_size * 8 // 3 // 64 * 64 if is_gated else 4 * hidden_size,
        "num_query_groups": heads,
        "kv_channels": hidden_size // heads,
        "max_position_embeddings": max(given["seq_length"], given.get("decoder_seq_length", 0)),
        **given,
    }
    if completed["family"] == "t5":
        completed.setdefault("decoder_seq_length", given["seq_length"])
    if "window_size" in completed:
        completed["window_size"] = tuple(completed["window_size"])
    return ModelShape(**completed)


def pad_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tp: int) -> int:
    """The smallest multiple of make_vocab_size_divisible_by * tp that holds vocab_size tokens.

    Raises: ValueError where one of the three is below 1.
    """
    if min(vocab_size, make_vocab_size_divisible_by, tp) < 1:
        raise ValueError(
            f"vocab_size {vocab_size}, make_vocab_size_divisible_by {make_vocab_size_divisible_by} and tensor parallel "
            f"size {tp} are given; expected at least 1 for each, correct the one below"
        )
    multiple = make_vocab_size_divisible_by * tp
    return -(-vocab_size // multiple) * multiple


def read_shape_file(path: str | Path) -> dict[str, Any]:
    """The fields of ModelShape in a file of configs/model; names and types are checked.

    Raises ValueError, which begins with --model, where it cannot be read or has something that no model has.
    """
    try:
        values = read_object(path)
    except OSError as error:
        raise ValueError(f"--model {path} cannot be read ({error.strerror}); give a file of configs/model") from error
    except ValueError as error:
        raise ValueError(f"--model {error}") from error
    for name, value in values.items():
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]
            raise ValueError(f"--model {path}: {name} is unknown; the nearest known name is {near}")
        if (expected := check_value(name, value)) is not None:
            raise ValueError(f"--model {path}: {name} is {json.dumps(value)}; expected {expected}")
    return values


def complete_description(described: Mapping[str, Any]) -> dict[str, Any]:
    """`described` with the fields of ModelShape that did not exist when it was written.

    Models then had a GPT-2's values for these fields.
    """
    heads, hidden_size = described.get("num_attention_heads"), described.get("hidden_size")
    older = {
        field.name: field.default
        for field in dataclasses.fields(ModelShape)
        if field.default is not dataclasses.MISSING
    }
    older |= {"family": "gpt", "num_query_groups": heads}
    if heads and hidden_size:
        older["kv_channels"] = hidden_size // heads
    return {**older, **described}


def check_value(name: str, value: Any) -> str | None:
    """What is expected of a field of ModelShape, as a JSON type; None if `value` is as expected."""
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

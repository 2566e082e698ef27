"""ModelShape: what a model is, whatever it is trained on and however it is laid out over devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from tempo_megatron.settings.activations import ACTIVATIONS, GATED
from tempo_megatron.words.expert_layers import parse_layer_frequency

QUICK_GEGLU = "quick_geglu"
"""A gated x * sigmoid(1.702 x), perhaps clamped. Tempo has no operation for it: experts run Megatron's own code again,
and a dense MLP of it is stock."""
CHOICES = {
    "family": ("gpt", "bert", "t5"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "activation": (*ACTIVATIONS, QUICK_GEGLU),
    "position_embedding_type": ("learned_absolute", "rope", "yarn", "none"),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    "moe_router_dtype": ("fp32", "fp64"),
}
_PROBABILITIES = ("attention_dropout", "hidden_dropout")
_FROM_ZERO = ("mscale", "mscale_all_dim", "glu_linear_offset", "moe_aux_loss_coeff", "moe_z_loss_coeff")
# What nothing but rope reads, Yarn's scaling of rope, or latent attention.
_ROPE = ("rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor")
_YARN = (
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "yarn_correction_range_round_to_int"),
)
_LATENT_SIZES = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
LATENT = ("q_lora_rank", *_LATENT_SIZES)
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "qk_layernorm", "window_size", "add_bias_linear", "attention_dropout", "hidden_dropout"),
)
SAME_IN_EXPERTS = (
    *("moe_shared_expert_intermediate_size", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias", "moe_z_loss_coeff"),
    *("moe_pad_expert_input_to_capacity", "moe_router_dtype"),
)
"""What a TransformerConfig calls by the same name and has of the same kind: of any model, and of one with experts."""


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
    activation_func_clamp_value: float | None = None
    """quick_geglu only: the gate is at most this, the other half lies between its negative and this."""
    glu_linear_offset: float = 0.0
    """quick_geglu only: added to the half that the gate weights."""
    position_embedding_type: str = "learned_absolute"
    """learned_absolute, rope, yarn or none."""
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    use_rope_scaling: bool = False
    """Llama 3's scaling of rope's frequencies."""
    rope_scaling_factor: float = 8.0
    rotary_scaling_factor: float = 40.0
    """Yarn's: how many times longer than original_max_position_embeddings samples may be."""
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Yarn rotates a channel as rope does that turns beta_fast times or more over the original positions; it slows down
    one that turns at most beta_slow times."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """Yarn multiplies queries and keys by (0.1 mscale log(factor) + 1) / (0.1 mscale_all_dim log(factor) + 1), or,
    without both, by 0.1 log(factor) + 1."""
    yarn_correction_range_round_to_int: bool = True
    """Whether the channels between which Yarn interpolates are whole numbers."""
    qk_layernorm: bool = False
    window_size: tuple[int, int] | None = None
    """Tokens to the left and to the right that attention sees; -1 is all of them."""
    window_attn_skip_freq: int | None = None
    """Every n-th layer sees all tokens, whatever window_size is."""
    softmax_type: str = "vanilla"
    """Of attention's probabilities: learnable adds a learned logit of each head, a sink, and off-by-one one of 0."""
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

    num_experts: int | None = None
    """Of a layer with experts; None is a model without."""
    moe_layer_freq: str = "1"
    """Which layers have experts: every n-th from the first, or lists such as ([0]*3+[1]*58)."""
    moe_router_topk: int = 2
    """How many experts a token goes to."""
    moe_ffn_hidden_size: int | None = None
    """Inner size of an expert; None is ffn_hidden_size."""
    moe_shared_expert_intermediate_size: int | None = None
    """Inner size of the experts that every token goes to, together."""
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    """Whether scores are those of all experts; else those of the chosen ones add up to 1."""
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    """A token's experts are of so many of the groups."""
    moe_router_topk_scaling_factor: float | None = None
    """What scores are multiplied by."""
    moe_router_enable_expert_bias: bool = False
    """Whether a bias of each expert, which no gradient changes, balances them."""
    moe_router_load_balancing_type: str = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_expert_capacity_factor: float | None = None
    """Tokens that an expert takes at most, over an equal share; None drops none."""
    moe_pad_expert_input_to_capacity: bool = False
    moe_router_dtype: str | None = None
    """fp32 or fp64; None is the model's."""

    multi_latent_attention: bool = False
    """Whether queries, keys and values are projected from latent vectors; then a head has the following sizes."""
    q_lora_rank: int | None = None
    """None projects queries from the hidden states."""
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    """Rotated channels of a head, beside qk_head_dim."""
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        check_shape(self)

    @property
    def is_gated(self) -> bool:
        return self.activation in (*GATED, QUICK_GEGLU)

    @property
    def layers_with_experts(self) -> tuple[bool, ...]:
        """Which layers have experts."""
        if self.num_experts is None:
            return (False,) * self.num_layers
        return parse_layer_frequency(self.moe_layer_freq, self.num_layers)

    @property
    def expert_size(self) -> int:
        """Inner size of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def latent_sizes(self) -> tuple[int, int, int, int]:
        """Of latent attention: kv_lora_rank, qk_head_dim, qk_pos_emb_head_dim and v_head_dim."""
        rank, key, position, value = (getattr(self, name) for name in _LATENT_SIZES)
        return rank, key, position, value

    def take_layers(self, layers: Sequence[int]) -> ModelShape:
        """A model of these layers only, counted from 0; perhaps none of them has experts."""
        has = self.layers_with_experts
        freq = "1" if self.num_experts is None else f"[{','.join(str(int(has[layer])) for layer in layers)}]"
        return dataclasses.replace(self, num_layers=len(layers), moe_layer_freq=freq)

    def leave_latent_attention(self) -> ModelShape:
        """The model with ordinary attention for latent attention, and rope for Yarn's."""
        rope = {"position_embedding_type": "rope"} if self.position_embedding_type == "yarn" else {}
        plain: dict[str, Any] = {name: DEFAULTS[name] for name in ("multi_latent_attention", *LATENT, *_YARN)} | rope
        return dataclasses.replace(self, **plain)

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
            base = f"of base {self.rotary_base}"
            positions = {"rope": f"rope {base}", "yarn": f"Yarn's rope {base}", "none": "no positions"}
            words.append(positions[self.position_embedding_type])
        if self.normalization != "LayerNorm":
            words.append(self.normalization)
        if self.qk_layernorm:
            words.append("norms of q and k")
        if self.window_size is not None:
            every = self.window_attn_skip_freq
            skipped = "" if every is None else f" (one layer of {every} without)"
            words.append(f"window {self.window_size[0]},{self.window_size[1]}{skipped}")
        if self.multi_latent_attention:
            words.append(f"latent attention of rank {self.kv_lora_rank}")
        if self.num_experts is not None:
            number = sum(self.layers_with_experts)
            words.append(f"{self.num_experts} experts of {self.expert_size} in {number} layers, {self.moe_router_topk}")
            words[-1] += " of them a token"
        if not self.add_bias_linear:
            words.append("no bias but of q, k and v" if self.add_qkv_bias else "no biases")
        if self.untie_embeddings_and_output_weights:
            words.append("untied")
        return ", ".join(words)


def check_shape(shape: ModelShape) -> None:
    """Raise ValueError for the first field that no model can have, or that contradicts another."""
    for name, value in shape.describe().items():
        if value is None and DEFAULTS[name] is None:
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
    if shape.activation != QUICK_GEGLU:
        _refuse_without(shape, "--quick-geglu", ("activation_func_clamp_value", "glu_linear_offset"))
    _check_experts(shape)
    _check_latent_attention(shape)
    _check_family(shape)


def _refuse_without(shape: ModelShape, of: str, names: Iterable[str]) -> None:
    """Raise ValueError for a value of what `of`, which is not given, alone reads."""
    for name in names:
        if (value := getattr(shape, name)) != DEFAULTS[name]:
            given = name_field(name) if value is True else f"{name_field(name)} {value}"
            raise ValueError(f"{given} is given without {of}; give both or none")


def name_field(field: str) -> str:
    """The option of a field."""
    return "--" + field.replace("_", "-")


def _check_experts(shape: ModelShape) -> None:
    number, topk = shape.num_experts, shape.moe_router_topk
    if number is None:
        _refuse_without(shape, "--num-experts", (name for name in NAMES if name.startswith("moe_")))
        return
    if topk > number:
        raise ValueError(f"--moe-router-topk {topk} is more than --num-experts {number}; change one of them")
    is_softmax, routing = shape.moe_router_score_function == "softmax", shape.moe_router_load_balancing_type
    if topk == 1 and is_softmax and not shape.moe_router_pre_softmax and routing != "sinkhorn":
        raise ValueError(
            "--moe-router-topk 1 makes each token's one score 1, whatever the router says; add --moe-router-pre-softmax"
        )
    if shape.moe_router_enable_expert_bias and is_softmax:
        raise ValueError(
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid; change one of them"
        )
    groups, chosen = shape.moe_router_num_groups, shape.moe_router_group_topk
    if (groups is None) != (chosen is None):
        raise ValueError("--moe-router-num-groups and --moe-router-group-topk are needed together; give both or none")
    if groups is not None and chosen is not None and (number % groups or chosen > groups or topk % chosen):
        raise ValueError(
            f"--moe-router-group-topk {chosen} of --moe-router-num-groups {groups} do not divide "
            f"--moe-router-topk {topk} and --num-experts {number}; change one of them"
        )
    if shape.moe_expert_capacity_factor is not None and routing in ("sinkhorn", "global_aux_loss"):
        raise ValueError(
            f"--moe-expert-capacity-factor is given with --moe-router-load-balancing-type {routing}, which drops no "
            "tokens; leave it out, or balance by aux_loss, seq_aux_loss or none"
        )
    if shape.moe_expert_capacity_factor is None:
        _refuse_without(shape, "--moe-expert-capacity-factor", ("moe_pad_expert_input_to_capacity",))


def _check_latent_attention(shape: ModelShape) -> None:
    if not shape.multi_latent_attention:
        _refuse_without(shape, "--multi-latent-attention", LATENT)
        return
    for name in _LATENT_SIZES:
        if getattr(shape, name) is None:
            raise ValueError(f"--multi-latent-attention is given without {name_field(name)}; give it")
    if shape.qk_pos_emb_head_dim is not None and shape.qk_pos_emb_head_dim % 2:
        raise ValueError(f"--qk-pos-emb-head-dim {shape.qk_pos_emb_head_dim} cannot be rotated; give an even number")
    refused = {
        "--group-query-attention": shape.num_query_groups != shape.num_attention_heads,
        "--add-qkv-bias": shape.add_qkv_bias,
        "--window-size": shape.window_size is not None,
        f"--softmax-type {shape.softmax_type}": shape.softmax_type != "vanilla",
        "--use-rope-scaling": shape.use_rope_scaling,
        f"--rotary-percent {shape.rotary_percent}": shape.rotary_percent != 1,
    }
    for option, is_given in refused.items():
        if is_given:
            raise ValueError(f"{option} is given with --multi-latent-attention, which has no such thing; leave it out")
    if shape.position_embedding_type not in ("rope", "yarn"):
        raise ValueError(
            f"--position-embedding-type is {shape.position_embedding_type} with --multi-latent-attention, which "
            "rotates a part of each head; give rope or yarn"
        )


def _check_positions(shape: ModelShape) -> None:
    kind = shape.position_embedding_type
    if kind != "yarn":
        _refuse_without(shape, "--position-embedding-type yarn", _YARN)
    elif (shape.mscale is None) != (shape.mscale_all_dim is None):
        raise ValueError("--mscale and --mscale-all-dim are needed together; give both or none")
    if kind in ("rope", "yarn"):
        if kind == "yarn" and shape.use_rope_scaling:
            raise ValueError("--use-rope-scaling is Llama's, and --position-embedding-type is yarn; leave one out")
        rotated = int(shape.kv_channels * shape.rotary_percent)
        if rotated < 2 or rotated % 2:
            raise ValueError(
                f"rope would rotate {rotated} of {shape.kv_channels} channels of a head; expected an even number of at "
                "least 2: change --kv-channels or --rotary-percent"
            )
        if not shape.use_rope_scaling:
            _refuse_without(shape, "--use-rope-scaling", ("rope_scaling_factor",))
        return
    _refuse_without(shape, "--position-embedding-type rope", _ROPE)
    longest = max(shape.seq_length, shape.decoder_seq_length or 0)
    if kind == "learned_absolute" and longest > shape.max_position_embeddings:
        raise ValueError(
            f"--seq-length {longest} is more than the {shape.max_position_embeddings} learned positions; "
            "shorten it or give --max-position-embeddings"
        )


def _check_window(shape: ModelShape) -> None:
    if shape.window_size is None:
        _refuse_without(shape, "--window-size", ("window_attn_skip_freq",))
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
    for name, of in (("decoder_seq_length", "t5"), ("num_tokentypes", "bert"), ("add_binary_head", "bert")):
        if getattr(shape, name) != DEFAULTS[name] and family != of:
            raise ValueError(f"{name} is for the family {of}, but the model's is {family}; leave it out")
    if family == "gpt":
        return
    # What Megatron's BertModel and T5Model, or their layer specs, would refuse or silently ignore.
    refused = {
        f"--normalization {shape.normalization}": shape.normalization != "LayerNorm",
        "--qk-layernorm": shape.qk_layernorm,
        "--window-size": shape.window_size is not None,
        "--position-embedding-type none": shape.position_embedding_type == "none",
        f"--rotary-base {shape.rotary_base}": shape.rotary_base != DEFAULTS["rotary_base"],
        "--use-rope-scaling": shape.use_rope_scaling,
        "--position-embedding-type yarn": shape.position_embedding_type == "yarn",
        f"--softmax-type {shape.softmax_type}": shape.softmax_type != "vanilla",
        f"--num-experts {shape.num_experts}": shape.num_experts is not None,
        "--multi-latent-attention": shape.multi_latent_attention,
        "--quick-geglu": shape.activation == QUICK_GEGLU,
        "--group-query-attention": family == "t5" and shape.num_query_groups != shape.num_attention_heads,
        "--disable-bias-linear": family == "bert" and not shape.add_bias_linear,
    }
    for option, is_given in refused.items():
        if is_given:
            raise ValueError(f"{option} is given, but Megatron's {family.upper()} has no such thing; leave it out")


_TYPES = {field.name: str(field.type) for field in dataclasses.fields(ModelShape)}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(ModelShape)}
NAMES = tuple(_TYPES)


def make_shape(**values: Any) -> ModelShape:
    """The shape of these values; values that are missing or None follow from the others, as in Megatron-LM.

    The MLP is 4 h wide. A gated one is 8/3 h wide, rounded down to a multiple of 64, so that it has about as many
    weights: Megatron-LM's rule for swiglu, here applied to all gated activations.

    Raises ValueError where a size without a default is missing, or where two values contradict each other.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name in REQUIRED:
        if name not in given:
            raise ValueError(f"{name_field(name)} is missing; give it, or --model with a file of configs/model")
    hidden_size, heads = given["hidden_size"], given["num_attention_heads"]
    if "kv_channels" not in given and hidden_size % heads:
        raise ValueError(
            f"--hidden-size {hidden_size} is not a multiple of --num-attention-heads {heads}; change one of them, or "
            "give --kv-channels"
        )
    is_gated = given.get("activation") in (*GATED, QUICK_GEGLU)
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
    if "moe_layer_freq" in completed:
        completed["moe_layer_freq"] = str(completed["moe_layer_freq"])
    found = ModelShape(**completed)
    if found.num_experts is not None and not any(found.layers_with_experts):
        raise ValueError(f"--moe-layer-freq {found.moe_layer_freq} gives no layer experts; leave --num-experts out")
    return found


def check_value(name: str, value: Any) -> str | None:
    """What is expected of a field of ModelShape, as a JSON type; None if `value` is as expected."""
    if name in CHOICES:
        return None if value in CHOICES[name] else f"one of {', '.join(CHOICES[name])}"
    if name == "moe_layer_freq":
        return None if isinstance(value, str) or _is_whole(value) else "a number, or lists such as ([0]*1+[1]*15)"
    if name == "window_size":
        is_pair = isinstance(value, list) and len(value) == 2 and all(_is_whole(n) and n >= -1 for n in value)
        return None if is_pair else "two whole numbers from -1, such as [128, 0]"
    kind = _TYPES[name]
    if "bool" in kind:
        return None if isinstance(value, bool) else "true or false"
    if "int" in kind:
        least = 0 if name == "num_tokentypes" else 1
        words = "a whole number from 0" if least == 0 else "a positive whole number"
        return None if _is_whole(value) and value >= least else words
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if name in _PROBABILITIES:
        return None if is_number and 0 <= value < 1 else "a probability in [0, 1)"
    if name == "rotary_percent":
        return None if is_number and 0 < value <= 1 else "a number in (0, 1]"
    if name in _FROM_ZERO:
        return None if is_number and value >= 0 else "a number from 0"
    return None if is_number and value > 0 else "a positive number"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

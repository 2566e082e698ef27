"""Counts the floating-point operations of a model's matrix products, two for each multiply-add.

`LayerWeights` says what one token of a layer is multiplied with. The plan, the `flops` command and the trainer's MFU
all count from it: the plan on one rank, with attention's masked half left out where a kernel skips it; the other two
for the whole model by equation 7 of arXiv 2205.05198, which counts the whole square.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from tempo_megatron.memory.run import Run
from tempo_megatron.models.shape import ModelShape

_PASSES = 3
"""Forward, and backward's two products for each of forward's."""


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """Weights that one token meets in a layer of the whole model; of experts those that it goes to."""

    down: int
    """Of latent attention: the projections to latent vectors, which tensor parallelism does not divide."""
    linear_qkv: int
    """The other projections in front of attention; with latent attention those from latent vectors."""
    linear_proj: int
    heads: int
    """The sizes of a query and a value of all heads together: twice as many FLOPs for each pair of tokens."""
    linear_fc1: int
    linear_fc2: int
    router: int

    @property
    def projections(self) -> int:
        return self.down + self.linear_qkv + self.linear_proj

    @property
    def mlp(self) -> int:
        return self.linear_fc1 + self.linear_fc2 + self.router


def count_layer_weights(shape: ModelShape, *, has_experts: bool) -> LayerWeights:
    """Count the weights of one layer.

    Args:
        shape: of the model.
        has_experts: whether the layer is one of those with experts, where the model has some.
    """
    h, heads, channels = shape.hidden_size, shape.num_attention_heads, shape.kv_channels
    num_experts = (shape.num_experts or 0) if has_experts else 0
    linear_fc2 = h * (count_inner(shape) if num_experts else shape.ffn_hidden_size)
    of_mlp = (2 if shape.is_gated else 1) * linear_fc2, linear_fc2, h * num_experts
    if not shape.multi_latent_attention:
        width = heads * channels
        return LayerWeights(0, h * (width + 2 * shape.num_query_groups * channels), width * h, 2 * width, *of_mlp)
    rank, key, position, value = shape.latent_sizes
    query, query_rank = key + position, shape.q_lora_rank
    up = heads * ((query_rank or h) * query + rank * (key + value))
    down = h * (rank + position + (query_rank or 0))
    return LayerWeights(down, up, heads * value * h, heads * (query + value), *of_mlp)


@dataclasses.dataclass(frozen=True)
class LayerFlops:
    """FLOPs of the matrix products of one layer's forward on one rank, for one micro batch."""

    linear_qkv: int
    linear_proj: int
    core_attention: int
    linear_fc1: int
    linear_fc2: int
    router: int
    up_projections: int
    """Of latent attention: the part of `linear_qkv` that begins with latent vectors."""

    @property
    def mlp(self) -> int:
        return self.linear_fc1 + self.linear_fc2 + self.router

    @property
    def linears(self) -> int:
        return self.linear_qkv + self.linear_proj + self.mlp

    @property
    def total(self) -> int:
        return self.linears + self.core_attention


def count_inner(shape: ModelShape) -> int:
    """Elements between the MLP's linears for one token, over all ranks; in a mixture those of all its experts."""
    if shape.num_experts is None:
        return shape.ffn_hidden_size
    return shape.moe_router_topk * shape.expert_size + (shape.moe_shared_expert_intermediate_size or 0)


def count_layer_flops(run: Run) -> LayerFlops:
    """Count one layer's forward on one rank. In a model of experts it is a layer with them.

    Fused attention does not compute the scores behind a causal mask.
    """
    s, b, t, c = run.model.seq_length, run.micro_batch_size, run.layout.tp, run.layout.cp
    weights = count_layer_weights(run.model, has_experts=True)
    tokens = s * b // c
    own = tokens // (t if run.layout.sp else 1)
    skips_masked = run.model.family == "gpt" and run.stock == "transformer_engine" and run.stock_attention != "unfused"
    num_scores = b * (s * (s + 1) // 2 if skips_masked else s * s)
    up = 2 * tokens * weights.linear_qkv // t
    return LayerFlops(
        linear_qkv=up + 2 * own * weights.down,
        linear_proj=2 * tokens * weights.linear_proj // t,
        core_attention=2 * num_scores * weights.heads // (t * c),
        linear_fc1=2 * tokens * weights.linear_fc1 // t,
        linear_fc2=2 * tokens * weights.linear_fc2 // t,
        router=2 * tokens * weights.router // t,
        up_projections=up if run.model.multi_latent_attention else 0,
    )


def count_head_flops(run: Run) -> int:
    """The output layer's forward on one rank, for one micro batch."""
    tokens = run.model.seq_length * run.micro_batch_size // run.layout.cp
    return 2 * tokens * run.model.hidden_size * run.padded_vocab_size // run.layout.tp


@dataclasses.dataclass(frozen=True)
class ForwardFlops:
    """One forward of a whole model."""

    projections: int
    """Queries, keys and values, and the projection behind attention, of all layers."""
    core_attention: int
    mlp: int
    head: int
    """The output layer, and the dense layer before it that a BERT has."""

    @property
    def layers(self) -> int:
        return self.projections + self.core_attention + self.mlp

    @property
    def total(self) -> int:
        return self.layers + self.head


@dataclasses.dataclass(frozen=True)
class HardwareFlops:
    """What the devices compute in a step."""

    total: int
    as_in_equation_8: int | None
    """Recomputed attention counted three times, as the paper's HFU has it; None without recomputed attention alone."""


def count_forward_flops(shape: ModelShape, num_samples: int, vocab_size: int) -> ForwardFlops:
    """One forward of `num_samples` through a GPT, a BERT or a T5.

    Args:
        shape: the model; its window of attention, if any, is not looked at.
        num_samples: B, of seq_length tokens each; in a T5's decoder of decoder_seq_length.
        vocab_size: v, rows of the output layer with their padding.
    """
    dense, mixed = (count_layer_weights(shape, has_experts=has) for has in (False, True))
    num_mixed = sum(shape.layers_with_experts)
    tokens, h = num_samples * shape.seq_length, shape.hidden_size
    through_weights, met, of_mlp, of_head = tokens * dense.projections, tokens * shape.seq_length, tokens, tokens
    if shape.decoder_seq_length is not None:
        of_head = num_samples * shape.decoder_seq_length
        of_mlp += of_head
        met += of_head * (shape.decoder_seq_length + shape.seq_length)
        # Cross attention has queries of the decoder, and keys and values of the encoder.
        of_queries, of_keys = shape.num_attention_heads * shape.kv_channels, shape.num_query_groups * shape.kv_channels
        through_weights += of_head * dense.projections + 2 * h * (of_head * of_queries + tokens * of_keys)
    return ForwardFlops(
        projections=shape.num_layers * 2 * through_weights,
        core_attention=shape.num_layers * 2 * met * dense.heads,
        mlp=2 * of_mlp * ((shape.num_layers - num_mixed) * dense.mlp + num_mixed * mixed.mlp),
        head=2 * of_head * (h * vocab_size + (h * h if shape.family == "bert" else 0)),
    )


def count_model_flops(forward: ForwardFlops) -> int:
    """Equation 7: what a step needs, however it is computed."""
    return _PASSES * forward.total


def count_hardware_flops(forward: ForwardFlops, recompute: Collection[str]) -> HardwareFlops:
    """What a step computes with Megatron's recomputation of `recompute`: any of core_attn, mlp and full."""
    model = count_model_flops(forward)
    if "full" in recompute:
        return HardwareFlops(model + forward.layers, None)
    again = forward.mlp * ("mlp" in recompute) + forward.core_attention * ("core_attn" in recompute)
    printed = model + _PASSES * forward.core_attention if set(recompute) == {"core_attn"} else None
    return HardwareFlops(model + again, printed)


def find_utilisation(flops: int, step_seconds: float, num_gpus: int, peak_flops_per_second: float) -> float:
    """The share of the peak of all GPUs: MFU of model FLOPs, HFU of hardware FLOPs."""
    return flops / step_seconds / (num_gpus * peak_flops_per_second)


def count_idle_weights(run: Run) -> int:
    """Weights of a rank's experts in one layer beyond those that the products of one token read; perhaps below 0."""
    model = run.model
    if model.num_experts is None:
        return 0
    local = run.num_local_experts * model.expert_size // run.layout.etp
    routed = model.moe_router_topk * model.expert_size // run.layout.tp
    return (3 if model.is_gated else 2) * model.hidden_size * (local - routed)

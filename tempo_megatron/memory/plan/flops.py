"""Counts the floating-point operations of a model's matrix products, two for each multiply-add.

The plan, the `flops` command and the trainer's MFU all count by `_count_layer`: the plan on one rank, with attention's
masked half left out where a kernel skips it; the other two for the whole model by equation 7 of arXiv 2205.05198, which
counts the whole square.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tempo_megatron.memory.run import Run
from tempo_megatron.models.shape import ModelShape

_PASSES = 3
"""Forward, and backward's two products for each of forward's."""


class Flops(NamedTuple):
    """FLOPs of the matrix products of one forward, of a layer or of a whole model."""

    linear_qkv: int
    """All projections in front of attention."""
    linear_proj: int
    core_attention: int
    linear_fc1: int
    linear_fc2: int
    router: int
    up_projections: int
    """Of latent attention: the part of `linear_qkv` that begins with latent vectors."""
    head: int = 0
    """The output layer, and the dense layer before it that a BERT has."""

    @property
    def projections(self) -> int:
        return self.linear_qkv + self.linear_proj

    @property
    def mlp(self) -> int:
        return self.linear_fc1 + self.linear_fc2 + self.router

    @property
    def linears(self) -> int:
        return self.projections + self.mlp

    @property
    def layers(self) -> int:
        return self.linears + self.core_attention

    @property
    def total(self) -> int:
        return self.layers + self.head


class HardwareFlops(NamedTuple):
    """What the devices compute in a step."""

    total: int
    as_in_equation_8: int | None
    """Recomputed attention counted three times, as the paper's HFU has it; None without recomputed attention alone."""


def count_inner(shape: ModelShape) -> int:
    """Elements between the MLP's linears for one token, over all ranks; in a mixture those of all its experts."""
    if shape.num_experts is None:
        return shape.ffn_hidden_size
    return shape.moe_router_topk * shape.expert_size + (shape.moe_shared_expert_intermediate_size or 0)


def _count_layer(
    shape: ModelShape, tokens: int, num_scores: int, *, has_experts: bool, own_tokens: int | None = None, tp: int = 1
) -> Flops:
    """The forward of one layer on one of `tp` ranks; of experts those count that a token goes to.

    `num_scores` are pairs of a query and a key that attention computes, `own_tokens` those that the rank has outside of
    attention and MLP; None is all.
    """
    h, heads, channels = shape.hidden_size, shape.num_attention_heads, shape.kv_channels
    width, down = heads * channels, 0
    up, of_scores = h * (width + 2 * shape.num_query_groups * channels), 2 * width
    if shape.multi_latent_attention:
        rank, key, position, value = shape.latent_sizes
        # The projections to latent vectors, which tensor parallelism does not divide, and those from them.
        down = h * (rank + position + (shape.q_lora_rank or 0))
        up = heads * ((shape.q_lora_rank or h) * (key + position) + rank * (key + value))
        width, of_scores = heads * value, heads * (key + position + value)
    num_experts = (shape.num_experts or 0) if has_experts else 0
    inner = count_inner(shape) if num_experts else shape.ffn_hidden_size
    of_up = 2 * tokens * up // tp
    return Flops(
        linear_qkv=of_up + 2 * (tokens if own_tokens is None else own_tokens) * down,
        linear_proj=2 * tokens * width * h // tp,
        core_attention=2 * num_scores * of_scores // tp,
        linear_fc1=2 * tokens * (2 if shape.is_gated else 1) * h * inner // tp,
        linear_fc2=2 * tokens * h * inner // tp,
        router=2 * tokens * h * num_experts // tp,
        up_projections=of_up if shape.multi_latent_attention else 0,
    )


def count_layer_flops(run: Run) -> Flops:
    """One layer's forward on one rank, for one micro batch. In a model of experts it is a layer with them.

    Fused attention does not compute the scores behind a causal mask.
    """
    s, b, tp = run.model.seq_length, run.micro_batch_size, run.layout.tp
    tokens = s * b // run.layout.cp
    skips_masked = run.model.family == "gpt" and run.stock == "transformer_engine" and run.stock_attention != "unfused"
    num_scores = b * (s * (s + 1) // 2 if skips_masked else s * s)
    own_tokens = tokens // (tp if run.layout.sp else 1)
    found = _count_layer(run.model, tokens, num_scores, has_experts=True, own_tokens=own_tokens, tp=tp)
    return found._replace(core_attention=found.core_attention // run.layout.cp)


def count_head_flops(run: Run) -> int:
    """The output layer's forward on one rank, for one micro batch."""
    tokens = run.model.seq_length * run.micro_batch_size // run.layout.cp
    return 2 * tokens * run.model.hidden_size * run.padded_vocab_size // run.layout.tp


def count_forward_flops(shape: ModelShape, num_samples: int, vocab_size: int) -> Flops:
    """One forward of `num_samples` through a GPT, a BERT or a T5, whose windows of attention are not looked at.

    A sample has seq_length tokens, in a T5's decoder decoder_seq_length. `vocab_size` are the rows of the output layer
    with their padding.
    """
    h, s = shape.hidden_size, shape.seq_length
    tokens = of_head = num_samples * s
    layers = [_count_layer(shape, tokens, tokens * s, has_experts=has) for has in shape.layers_with_experts]
    across = 0
    if shape.decoder_seq_length is not None:
        of_head = num_samples * shape.decoder_seq_length
        num_scores = of_head * (shape.decoder_seq_length + s)
        layers += [_count_layer(shape, of_head, num_scores, has_experts=False)] * shape.num_layers
        # Cross attention has queries of the decoder, and keys and values of the encoder.
        of_queries, of_keys = shape.num_attention_heads * shape.kv_channels, shape.num_query_groups * shape.kv_channels
        across = shape.num_layers * 2 * (of_head * 2 * h * of_queries + 2 * h * tokens * of_keys)
    found = Flops(*map(sum, zip(*layers, strict=True)))
    head = 2 * of_head * (h * vocab_size + (h * h if shape.family == "bert" else 0))
    return found._replace(linear_qkv=found.linear_qkv + across, head=head)


def count_model_flops(forward: Flops) -> int:
    """Equation 7: what a step needs, however it is computed."""
    return _PASSES * forward.total


def count_hardware_flops(forward: Flops, recompute: Collection[str]) -> HardwareFlops:
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

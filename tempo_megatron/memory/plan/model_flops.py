"""Counts the floating-point operations of a model's step, by equation 7 of arXiv 2205.05198, two per multiply-add."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from tempo_megatron.models.shape import ModelShape

_PASSES = 3
"""Forward, and backward's two products for each of forward's."""


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
        shape: the model; its window of attention, if any, is not looked at. Of experts those count that a token goes
            to, and of latent attention the projections to and from latent vectors.
        num_samples: B, of seq_length tokens each; in a T5's decoder of decoder_seq_length.
        vocab_size: v, rows of the output layer with their padding.
    """
    tokens, h = num_samples * shape.seq_length, shape.hidden_size
    dense = h * h if shape.family == "bert" else 0
    per_token, widths = _count_attention_weights(shape)
    through_weights, met, of_mlp, of_head = tokens * per_token, tokens * shape.seq_length, tokens, tokens
    if shape.decoder_seq_length is not None:
        of_head = num_samples * shape.decoder_seq_length
        of_mlp += of_head
        met += of_head * (shape.decoder_seq_length + shape.seq_length)
        # Cross attention has queries of the decoder, and keys and values of the encoder.
        of_queries, of_keys = shape.num_attention_heads * shape.kv_channels, shape.num_query_groups * shape.kv_channels
        through_weights += of_head * per_token + 2 * h * (of_head * of_queries + tokens * of_keys)
    return ForwardFlops(
        projections=shape.num_layers * 2 * through_weights,
        core_attention=shape.num_layers * 2 * met * widths,
        mlp=2 * of_mlp * count_active_mlp_weights(shape),
        head=2 * of_head * (h * vocab_size + dense),
    )


def _count_attention_weights(shape: ModelShape) -> tuple[int, int]:
    """Weights of the projections of one layer, and the sizes of a query and a value of all its heads together."""
    h, heads = shape.hidden_size, shape.num_attention_heads
    if not shape.multi_latent_attention:
        width, kv_width = heads * shape.kv_channels, shape.num_query_groups * shape.kv_channels
        return h * (2 * width + 2 * kv_width), 2 * width
    sizes = shape.kv_lora_rank, shape.qk_head_dim, shape.qk_pos_emb_head_dim, shape.v_head_dim
    rank, unrotated, rotated, v = (size or 0 for size in sizes)
    queries = heads * (unrotated + rotated)
    of_queries = h * queries if shape.q_lora_rank is None else shape.q_lora_rank * (h + queries)
    of_keys = h * (rank + rotated) + rank * heads * (unrotated + v)
    return of_queries + of_keys + heads * v * h, queries + heads * v


def count_active_mlp_weights(shape: ModelShape) -> int:
    """Weights of all layers' MLPs that one token meets: of experts those that it goes to, and the router."""
    products = 3 if shape.is_gated else 2
    mixed = sum(shape.layers_with_experts)
    inner = shape.moe_router_topk * shape.expert_size + (shape.moe_shared_expert_intermediate_size or 0)
    of_mixture = products * inner + (shape.num_experts or 0)
    return shape.hidden_size * ((shape.num_layers - mixed) * products * shape.ffn_hidden_size + mixed * of_mixture)


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

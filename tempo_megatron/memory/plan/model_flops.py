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
        shape: the model; its window of attention, if any, is not looked at.
        num_samples: B, of seq_length tokens each; in a T5's decoder of decoder_seq_length.
        vocab_size: v, rows of the output layer with their padding.
    """
    tokens, h = num_samples * shape.seq_length, shape.hidden_size
    width = shape.num_attention_heads * shape.kv_channels
    kv_width = shape.num_query_groups * shape.kv_channels
    dense = h * h if shape.family == "bert" else 0
    # Of each attention: tokens of its queries and of its keys, and keys that a query meets.
    attentions, of_mlp, of_head = [(tokens, tokens, shape.seq_length)], tokens, tokens
    if shape.decoder_seq_length is not None:
        of_head = num_samples * shape.decoder_seq_length
        of_mlp += of_head
        attentions += [(of_head, of_head, shape.decoder_seq_length), (of_head, tokens, shape.seq_length)]
    return ForwardFlops(
        projections=shape.num_layers * 2 * h * sum(2 * q * width + 2 * k * kv_width for q, k, _ in attentions),
        core_attention=shape.num_layers * 2 * 2 * width * sum(q * met for q, _, met in attentions),
        mlp=shape.num_layers * 2 * of_mlp * h * shape.ffn_hidden_size * (3 if shape.is_gated else 2),
        head=2 * of_head * (h * vocab_size + dense),
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

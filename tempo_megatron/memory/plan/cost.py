"""Computes the time that a choice for a layer costs, from products computed again and bytes moved beyond stock.

FLOPs are those of matrix products, two for each multiply-add; fused causal attention computes half of its square. Of
Tempo's operations only linears and attention that run again have some, as Megatron's recomputation does. The others
compute elementwise results again, or read one tensor instead of another: their time is that of the bytes which they
read and write. A choice that moves fewer bytes than stock counts as free, never as a gain. Collectives that are
repeated under tensor parallelism are not counted.

What a layer sends to the host has to be there when the next layer's forward ends, and to be back when the next layer's
backward does, or they would wait. These windows are the time of the products alone, so with rates of a data sheet,
which no program reaches, they are shorter than they will be. A copy out also reads the GPU's memory, and a copy back
writes it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import torch

from tempo_megatron.memory.plan.gpu import Gpu
from tempo_megatron.memory.run import Experts, Run
from tempo_megatron.models.build import DTYPES
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import INPUT, OFFLOAD_ROWS

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FEMTO = 10**15


@dataclasses.dataclass(frozen=True)
class LayerFlops:
    """FLOPs of the matrix products of one layer's forward on one rank."""

    linear_qkv: int
    linear_proj: int
    core_attention: int
    linear_fc1: int
    linear_fc2: int
    router: int = 0
    """With the projections of routed tokens to a latent space and back."""

    up_projections: int = 0
    """Of latent attention: the part of `linear_qkv` that begins with latent vectors."""

    more_weights: int = 0
    """Weights of the rank's experts beyond those that the products of one token read; perhaps fewer, below 0."""

    @property
    def mlp(self) -> int:
        return self.linear_fc1 + self.linear_fc2 + self.router

    @property
    def total(self) -> int:
        return self.linears + self.core_attention

    @property
    def linears(self) -> int:
        return self.linear_qkv + self.linear_proj + self.mlp


def count_layer_flops(run: Run, *, is_causal: bool, skips_masked: bool) -> LayerFlops:
    """Count the FLOPs of one layer's forward, without cross attention, on one rank.

    Args:
        run: model, layout and micro batch.
        is_causal: whether a token attends only to itself and to those before it.
        skips_masked: whether scores behind a causal mask are not computed, as by fused attention.
    """
    shape = run.model
    s, b, t = shape.seq_length, run.micro_batch_size, run.tensor_parallel
    heads, groups = shape.num_attention_heads // t, shape.num_query_groups // t
    tokens = s * b
    num_scores = s * (s + 1) // 2 if is_causal and skips_masked else s * s
    head_flops = 2 * tokens * shape.hidden_size * shape.kv_channels
    linear_fc2 = 2 * tokens * shape.hidden_size * _count_inner(run)
    flops = LayerFlops(
        linear_qkv=(heads + 2 * groups) * head_flops,
        linear_proj=heads * head_flops,
        core_attention=2 * 2 * b * heads * num_scores * shape.kv_channels,
        linear_fc1=2 * linear_fc2 if shape.is_gated else linear_fc2,
        linear_fc2=linear_fc2,
    )
    if run.experts is not None:
        experts = run.experts
        local = experts.num_experts // experts.expert_parallel * experts.ffn_hidden_size // experts.tensor_parallel
        products = 3 if shape.is_gated else 2
        flops = dataclasses.replace(
            flops,
            router=2 * shape.hidden_size * (tokens // t * experts.num_experts),
            more_weights=products * shape.hidden_size * (local - _count_routed(experts) // t),
        )
    if (latent := run.latent_attention) is not None:
        # Down projections are on every rank, of its own tokens under sequence parallelism.
        own = tokens // (t if run.sequence_parallel else 1)
        down = latent.kv_lora_rank + latent.qk_pos_emb_head_dim + (latent.q_lora_rank or 0)
        up = (latent.q_lora_rank or shape.hidden_size) * latent.query_size
        up += latent.kv_lora_rank * (latent.qk_head_dim + latent.v_head_dim)
        up_projections = 2 * tokens * heads * up
        flops = dataclasses.replace(
            flops,
            linear_qkv=2 * own * shape.hidden_size * down + up_projections,
            linear_proj=2 * tokens * shape.hidden_size * heads * latent.v_head_dim,
            core_attention=2 * b * heads * num_scores * (latent.query_size + latent.v_head_dim),
            up_projections=up_projections,
        )
    return flops


def _count_inner(run: Run) -> int:
    """Elements between the two linears of an MLP on one rank, per token of the sequence; of experts an equal share."""
    if run.experts is None:
        return run.model.ffn_hidden_size // run.tensor_parallel
    return (_count_routed(run.experts) + (run.experts.shared_ffn_hidden_size or 0)) // run.tensor_parallel


def _count_routed(experts: Experts) -> int:
    """Elements between the two linears of the experts that a token goes to."""
    return experts.per_token * experts.ffn_hidden_size


def count_recomputed_flops(flops: LayerFlops, recompute: frozenset[str], config: TempoConfig) -> int:
    """FLOPs that Megatron's recomputation of a layer and Tempo's repeat. Nothing is computed a third time."""
    if "full" in recompute:
        return flops.total
    found = flops.linear_qkv * (config.linear_qkv == "recompute")
    found += flops.core_attention * ("core_attn" in recompute or config.attention == "recompute")
    found += flops.up_projections * ("mla_up_proj" in recompute)
    of_mlp = {"recompute": flops.linear_fc1, "tile": flops.mlp}.get(config.linear_fc1, 0)
    return found + (flops.mlp if recompute & {"mlp", "moe"} else of_mlp)


def count_moved_bytes(run: Run, config: TempoConfig, recompute: frozenset[str]) -> int:
    """Bytes that elementwise work of one layer reads and writes beyond stock, per micro batch on one rank.

    Args:
        run: model, layout and micro batch.
        config: the layer's values, without "auto".
        recompute: what Megatron recomputes of the layer.
    """
    shape = run.model
    t, tokens, element_bytes = run.tensor_parallel, shape.seq_length * run.micro_batch_size, run.dtype.itemsize
    # With sequence parallelism a rank has only its part of the tokens outside of attention and MLP.
    hidden = tokens // (t if run.sequence_parallel else 1) * shape.hidden_size * element_bytes
    num_elements = tokens * _count_inner(run)
    y = num_elements * element_bytes
    x = 2 * y if shape.is_gated else y
    moved = 0
    if config.linear_fc1 in ("recompute", "tile"):
        # A recomputed MLP is counted below.
        moved += 0 if recompute & {"mlp", "full"} else x + y
    elif config.activation == "recompute":
        moved += 0 if "moe" in recompute else x + y
    elif config.activation == "inplace" and shape.activation == "gelu":
        # A bit per element is written and read. The output is read instead of the input, which costs nothing more.
        moved += 2 * (-(-num_elements // 8))
    # Each of a token's experts has a copy of it.
    copies = run.experts.per_token * hidden if run.experts is not None else 0
    if config.moe_permute != "off" and not recompute & {"moe", "full"}:
        moved += 2 * copies
    if config.norm == "recompute":
        moved += 2 * (2 * hidden)
    elif config.norm == "inplace":
        num_statistics = 2 if shape.normalization == "LayerNorm" else 1
        moved += 2 * (2 * 4 * num_statistics * shape.hidden_size)
    if "full" not in recompute:
        heads = (shape.num_attention_heads + shape.num_query_groups) // t
        queries_and_keys = tokens * heads * shape.kv_channels * element_bytes
        # With norms of their own they are normalised and rotated again, also where the projection is not repeated.
        is_normalised = config.norm == "recompute" and shape.qk_layernorm and config.attention != "off"
        is_rotated = config.linear_qkv == "recompute" or is_normalised
        # Once more for their statistics, which are not kept.
        moved += 2 * 2 * queries_and_keys * is_normalised
        moved += 2 * queries_and_keys * (is_rotated and shape.position_embedding_type == "rope")
    if config.attention == "softmax":
        # Backward reads the softmax's output and writes its dropout again.
        scores = tokens * shape.num_attention_heads // t * shape.seq_length * element_bytes
        moved += 2 * scores if shape.attention_dropout > 0 else 0
    # Elementwise work that runs again with the products around it.
    if "full" in recompute:
        # Two norms, and two sums of an output and the residual.
        moved += 2 * (2 * hidden) + 2 * (3 * hidden) + x + y + 2 * 2 * copies
    elif recompute & {"mlp", "moe"}:
        # Copies are made, and added up again.
        moved += x + y + 2 * 2 * copies
    return moved


def count_weight_bytes(num_weights: int, element_bytes: int) -> int:
    """Bytes that a micro batch of any size moves: forward and backward read each weight, and backward adds its gradient
    to a float32 sum."""
    return num_weights * (2 * element_bytes + 2 * 4)


def count_window_bytes(gpu: Gpu, dtype: torch.dtype, layer_flops: int) -> int:
    """The bytes that a layer can send to the host in the next layer's forward, and get back in its backward, which
    computes two products for each of forward's, while all GPUs that share an uplink copy.

    Raises ValueError where nothing says how fast the link is.
    """
    if gpu.host_link is None:
        raise ValueError(
            f"--host-memory is given, and the file of {gpu.title} has no host_link, the rates to the host's memory; "
            "write it as in configs/gpu/h100.json, or measure it with tempo-megatron bench --calibrate"
        )
    seconds = layer_flops / gpu.matmul_flops_per_second[_DTYPE_NAMES[dtype]]
    to_host, to_gpu = gpu.host_link.share()
    return int(min(seconds * to_host, 2 * seconds * to_gpu))


def choose_rows_to_move(rows: Mapping[str, int], window_bytes: int) -> dict[str, int]:
    """Values of `offload` -> what a layer with these movable rows sends: the largest sets of rows that fit the window,
    half of it and a quarter of it; none of 0 bytes, and no size twice.

    Of sets of one size the one with fewer rows, the larger rows first, is taken.
    """
    names = sorted((name for name in rows if rows[name]), key=lambda name: (-rows[name], OFFLOAD_ROWS.index(name)))
    sets: dict[int, tuple[str, ...]] = {}
    for number in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, number):
            sets.setdefault(sum(rows[name] for name in chosen), chosen)
    found = {}
    for size in sorted({max((s for s in sets if s <= window_bytes // part), default=0) for part in (1, 2, 4)} - {0}):
        is_all = len(sets[size]) == len(names) and sets[size] != (INPUT,)
        found["all" if is_all else "+".join(sorted(sets[size], key=OFFLOAD_ROWS.index))] = size
    return found


def convert_to_femtoseconds(gpu: Gpu, dtype: torch.dtype, *, flops: int = 0, moved_bytes: int = 0) -> int:
    """The time of products and then of elementwise work, as a whole number, so that sums are exact."""
    rate = gpu.matmul_flops_per_second[_DTYPE_NAMES[dtype]]
    return round(flops / rate * _FEMTO) + round(moved_bytes / gpu.bytes_per_second * _FEMTO)

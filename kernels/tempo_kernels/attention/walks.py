"""Chooses the tiles of attention's passes and how backward walks over queries and keys, and counts what backward holds
beside its results. Triton is not needed.

Two walks have a program for each block of queries, then one for each block of keys. One walk has one or more programs
for each key-value head, which add their parts of q's gradient up in float32 (kernel_heads.py).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch


class Shape(NamedTuple):
    """The tile, warps and pipeline stages of a pass."""

    queries: int
    keys: int
    warps: int
    stages: int
    # Whether a tile in which every query sees every key jumps over the masking code. Before sm_90 a branch costs more
    # than it saves: the compiler loses the tensor cores' layout there, which the next product needs.
    branches: bool


ROWS_OF_STATISTICS = 128
"""Backward's statistics and sums have a multiple of so many rows."""

PASSES = ("forward", "grad_q", "grad_kv", "one_walk")


def read_shapes(path: Path) -> dict[int, dict[str, dict[int, Shape]]]:
    """Reads {architecture: {pass: {head_dim up to: shape}}}, where a shape is [queries, keys, warps, stages]."""
    table = json.loads(path.read_text(encoding="utf-8"))
    return {
        int(architecture): {
            name: {
                int(head_dim): Shape._make([*numbers, int(architecture) >= 90]) for head_dim, numbers in rows.items()
            }
            for name, rows in passes.items()
        }
        for architecture, passes in table.items()
    }


# For 16-bit types. These are the largest tiles that do not spill registers in their loops and fit into shared memory
# (163 KiB on sm_80, 227 KiB from sm_90 on): the static model's choice, which no GPU
# has measured.
SHAPES = read_shapes(Path(__file__).with_name("shapes.json"))

# One walk for all three gradients is sm_90's. A thread of it takes 255 registers, so that a multiprocessor has 8 warps.
SHAPES_OF_HEADS, WARPS_OF_HEADS = SHAPES[90]["one_walk"], 8


class Splits(NamedTuple):
    """How many programs share a key-value head in one walk: so many have a share of its keys each, times so many of its
    queries."""

    keys: int
    queries: int = 1


class Costs(NamedTuple):
    """Of one walk, beside the time in which a multiprocessor takes a query through the tiles of 128 keys, by which all
    of these are divided."""

    two_walks: float
    """Of the programs of two walks that have as many keys."""
    block: float
    """Of what a program waits for before each block of keys."""
    launch: float
    """Of one launch more than two walks have."""
    byte: float
    """Of a byte of memory for each column of a query."""


# So many programs share a head as make it fastest. More than two may, as long as what they sum in float32 stays within
# so many bytes. Each block of keys goes through q, its gradient and the sums again. Of these the L2 cache, an H100's,
# keeps what it has room for. All of that, and COSTS by head size, is the model of benchmarks/roofline for an H100,
# without a causal limit, under which one walk gains more, halfway between dropout of 0.1 and none. None was measured.
KEY_SPLITS, QUERY_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), (1, 2, 4, 8)
MAX_SUMS_BYTES, L2_BYTES = 256 << 20, 50e6
COSTS = {64: Costs(1.20, 49, 89, 1 / 1365), 128: Costs(1.19, 30, 51, 1 / 1205)}


def name_architecture(major: int) -> int:
    """Returns the architecture whose kernels a GPU of this major compute capability runs: 80, 90 or 100."""
    # Consumer Blackwell (12) has neither sm_90's nor sm_100's matrix instructions.
    return {9: 90, 10: 100}.get(major, 80)


@functools.lru_cache(maxsize=4096)
def choose_splits(
    q_shape: torch.Size,
    k_shape: torch.Size,
    value_dim: int,
    dtype: torch.dtype,
    architecture: int,
    multiprocessors: int,
) -> Splits | None:
    """Returns how programs share a key-value head in kernel_heads.py, or None for two walks with a program per block.

    One walk has about five eighths of the instructions and products of two, but few and long programs. It is chosen
    where it is the faster one with the best number of splits.

    Args:
        q_shape, k_shape: [sq, b, a, d] and [sk, b, g, d], of a row that is not packed.
        value_dim: of v [sk, b, g, value_dim].
        dtype: of all three.
        architecture, multiprocessors: of the GPU; see `name_architecture`.
    """
    head_dim = max(q_shape[-1], value_dim)
    if dtype == torch.float32 or architecture != 90 or head_dim > max(SHAPES_OF_HEADS):
        return None
    num_queries, (num_keys, batch, groups, _) = q_shape[0], k_shape
    shape, programs = choose_shape_of_heads(head_dim)
    costs = next(costs for largest, costs in COSTS.items() if head_dim <= largest)
    heads, blocks, row_blocks = batch * groups, -(-num_keys // shape.keys), -(-num_queries // shape.queries)
    rows = num_queries * (q_shape[2] // groups)

    def find_cost(splits: Splits) -> float:
        """Programs that share a multiprocessor share its time; they share none while there are others."""
        num_programs = splits.keys * splits.queries * heads
        rounds = -(-num_programs // (programs * multiprocessors))
        sharing = min(programs, -(-num_programs // multiprocessors))
        running = min(num_programs, programs * multiprocessors) / splits.queries
        in_use = running / splits.keys * 4 * q_shape[-1] * rows * (1 + splits.keys)
        lost = max(0.0, 1.0 - L2_BYTES / in_use)
        reread = costs.byte * running * splits.queries * 4 * (2 + 1 / splits.keys) * lost
        share = -(-row_blocks // splits.queries) / row_blocks
        walk = (
            rounds * -(-blocks // splits.keys) * shape.keys / 128 * (share * max(sharing, reread) + costs.block / rows)
        )
        # Of queries, and of keys and values where they have parts, what the finishing launch reads.
        summed = 4 * splits.keys + 8 * splits.queries * num_keys / rows * (splits.queries > 1)
        return walk + costs.byte * heads * (6 + summed) + costs.launch / rows

    def fits(splits: Splits) -> bool:
        sums = list_workspaces(q_shape, k_shape, value_dim, dtype, splits)[1:]
        return splits.keys * splits.queries <= 2 or sum(sums) <= MAX_SUMS_BYTES

    several = (
        Splits(keys, queries)
        for keys in KEY_SPLITS
        if keys <= max(1, blocks)
        for queries in QUERY_SPLITS
        if queries <= row_blocks
    )
    best = min(filter(fits, several), key=find_cost)
    two_walks = costs.two_walks * -(-heads * -(-num_keys // 128) // multiprocessors)
    return best if find_cost(best) < 0.95 * two_walks else None


def group_heads(num_heads: int, head_bytes: int) -> int:
    """Returns how many heads, of all samples, take turns in a launch: the longest program of each comes first. Under a
    causal limit the short ones are then left for the end, when some multiprocessors have nothing else to do. What the
    programs of these heads read in turn, head_bytes each, has room in the L2 cache, of which each half may hold a copy.
    By the model of benchmarks/roofline for an H100, a causal forward with heads of 128 and 2048 tokens takes 19 % less
    time with 32 heads, and 6 % less with 128, than where one head follows the other."""
    groups = -(-num_heads // max(1, int(L2_BYTES / 2 / max(1, head_bytes))))
    return -(-num_heads // groups)


def choose_shape_of_heads(head_dim: int) -> tuple[Shape, int]:
    """Returns the shape of one walk, and how many of its programs share a multiprocessor."""
    shape = next(shape for largest, shape in SHAPES_OF_HEADS.items() if head_dim <= largest)
    return shape, max(1, WARPS_OF_HEADS // shape.warps)


def shape_statistics(q_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the float32 statistics that either way makes for q [sq, b, a, d]."""
    num_queries, batch, heads, _ = q_shape
    return (2, batch, heads, -(-num_queries // ROWS_OF_STATISTICS) * ROWS_OF_STATISTICS)


def shape_sums(q_shape: Sequence[int], splits: int) -> tuple[int, ...]:
    """The shape of the float32 sums of grad_q that one walk makes for q [sq, b, a, d]: blocks of rows and columns."""
    return (splits, *shape_statistics(q_shape)[1:], round_up(q_shape[-1]))


def shape_parts(k_shape: Sequence[int], value_dim: int, splits: Splits) -> list[tuple[int, ...]]:
    """The shapes of the float32 parts of grad_k and grad_v that one walk makes where it splits queries."""
    if splits.queries == 1:
        return []
    return [(splits.queries, *k_shape[:3], columns) for columns in (k_shape[-1], value_dim)]


def round_up(head_dim: int) -> int:
    """The columns of a tile: at least 16, and a power of two."""
    return max(16, 1 << (head_dim - 1).bit_length())


def list_workspaces(
    q_shape: Sequence[int], k_shape: Sequence[int], value_dim: int, dtype: torch.dtype, splits: Splits | None
) -> list[int]:
    """Returns the bytes of each tensor that backward's kernels hold beside its results, all of them at once.

    Args:
        q_shape, k_shape: [sq, b, a, d] and [sk, b, g, d].
        value_dim: of v [sk, b, g, value_dim].
        dtype: of q.
        splits: of `choose_splits`; None for a packed row, whose documents two walks share out.
    """
    shapes = [shape_statistics(q_shape)]
    if dtype == torch.float32:
        shapes.append(tuple(q_shape[:3]))
    elif splits is not None:
        shapes += [shape_sums(q_shape, splits.keys), *shape_parts(k_shape, value_dim, splits)]
    return [4 * math.prod(shape) for shape in shapes]


def list_flash_workspaces(
    q_shape: Sequence[int], k_shape: Sequence[int], dtype: torch.dtype, most_splits: int
) -> list[int]:
    """Returns the same of FlashAttention-2: softmax_d, dq_accum, and with grouped queries dk_expanded and dv_expanded.

    They are those of mha_bwd in its csrc/flash_attn/flash_api.cpp, and in torch's of
    aten/src/ATen/native/transformers/cuda/flash_attn.

    Args:
        q_shape, k_shape: [sq, b, a, d] and [sk, b, g, d].
        dtype: of both.
        most_splits: the GPU's multiprocessors, each of which has a head's sums where they are deterministic; else 1.
    """
    num_queries, batch, heads, head_dim = q_shape
    multiple = 32 if head_dim <= 128 else 64
    rows, columns = -(-num_queries // 128) * 128, -(-head_dim // multiple) * multiple
    expanded = [dtype.itemsize * k_shape[0] * batch * heads * head_dim] * (2 if k_shape[2] != heads else 0)
    splits = -(-most_splits // (batch * heads))
    return [4 * batch * heads * rows, 4 * splits * batch * heads * rows * columns, *expanded]

"""From the counts of attention's loops to the time of a pass: tiles of every program, and the order in which they run.

A program walks over tiles of queries by keys. A tile takes the cycles that issue its instructions and those of the
tensor cores, less the cycles in their shadow, divided by EFFICIENCY; across the diagonal it takes the code that masks,
too, and half of its scores are for nothing. Before its first tile, and before each block of keys of the walk for all
gradients, a program waits for memory twice, for its own rows and for the first of the others'. Multiprocessors take the
programs in the order of the launch, each as soon as it is free.

The warps of a program wait for one another at the barriers of a tile, while its multiprocessor has nothing to do unless
it has another program.

In the shadow is what the warps issue while their own products are executed, from the place in the machine code where
they are issued to where it waits for them (machine_code.py: find_shadow). The warps of a program are taken to be at the
same instruction, so that none issues in the shadow of another's products: whatever they gain there is in EFFICIENCY.
That a warp goes on behind an asynchronous product is what PTX promises; that it goes on at full speed, with any number
of products waiting, nobody measured: the slow choice has no shadow, in ours nor in the tutorial. FlashAttention-2's
products (mma.sync) keep a warp only while the tensor core is still at the one before. When their results are there is
not looked at, which shortens its dropout and so is not in our favour.

EFFICIENCY comes from outside: Triton's tutorial, counted in the same way, against what was measured of it. Nothing of
ours was measured, so its spread is in a row's error bar.

The walk for all gradients adds its part of grad_q to the L2 cache, and needs a launch before it that finds delta, and
one behind it that adds up the sums of its splits. Their bytes count at the bandwidth of a copy. Every program of it
goes through the queries of a head, their gradients and its sums once for each block of keys. Where those of all
programs that run at once do not fit into the L2 cache, they are read from memory again each time, and the sums written,
too. Programs of the other walks that run at once share few heads, whose keys or queries fit.

FlashAttention-2's speed with dropout, of which nothing is published, is that without times what this model says of both
in its machine code (flash_attention.py): find_speed_with_dropout.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from roofline import figures
from roofline.model import ARCHITECTURES, CENTRAL, FAST, SCHEDULERS, SLOW, Chosen, Device

SCORES = 8192
LENGTH, HEADS = 2048, 16384
"""Tokens of a sample, and samples x heads x head_dim: those of cases.py and of the published figures."""
PRODUCTS = {"forward": 2, "grad_q": 3, "grad_kv": 4, "backward": 5}
ATOMIC_BYTES_PER_S = {CENTRAL: 2.8e12, SLOW: 1.75e12, FAST: 5.6e12}
"""Additions in the L2 cache. Reckoned: half, and all, of the cache's bandwidth for reading, as an H100 PCIe has it
(Chips and Cheese, 2 July 2023); and what FlashAttention-3's backward adds at its published speed, 4 bytes a score."""

L2_BYTES = {CENTRAL: 50e6, SLOW: 25e6, FAST: 50e6}
"""An H100's, and half of it: each of its two halves may hold a copy of what multiprocessors of both read."""


SHADOWS = {CENTRAL: 1.0, SLOW: 0.0, FAST: 1.0}
"""Of the counted shadow, what there is of it."""

PRODUCT_SHARES = {CENTRAL: 0.63, SLOW: 1.0}
"""Of what wgmma does, what FlashAttention-2's mma.sync does in the same time. Chosen between an A100's rate, 0.5, and
1; with 1, products take least and dropout's instructions most of its time."""


class Program(NamedTuple):
    blocks: int
    """How often it loads rows of its own."""
    tiles: int
    edges: int
    """Tiles across the diagonal."""


class Walk(NamedTuple):
    """Seconds of a pass."""

    tiles: float
    """The tiles of all programs, evenly shared out."""
    atomics: float
    memory: float
    """What does not stay in the L2 cache from one block of keys to the next."""
    others: float
    """Launches around it."""
    total: float

    @property
    def bound(self) -> str:
        found = {"issue and tensor cores": self.tiles, "additions in the L2 cache": self.atomics}
        found["memory"] = self.memory
        found["waits and the last programs"] = self.total - self.others - max(found.values())
        found["launches around it"] = self.others
        return max(found, key=lambda name: found[name])


def list_programs(
    name: str, tile: tuple[int, int], splits: int, causal: bool, heads: int, heads_in_turn: int = 1
) -> list[Program]:
    """All programs in the order of their launch, of square attention over LENGTH tokens."""
    queries, keys = tile
    key_blocks = LENGTH // keys

    def find_column(block: int) -> Program:
        first = block * keys // queries * queries if causal else 0
        return Program(1, (LENGTH - first) // queries, max(1, keys // queries) if causal else 0)

    if name in ("forward", "grad_q"):
        stops = range(LENGTH, 0, -queries)  # the last block of queries goes first
        rows = [Program(1, (stop if causal else LENGTH) // keys, max(1, queries // keys) * causal) for stop in stops]
        return _take_turns(rows, heads, heads_in_turn)
    if name == "grad_kv":
        return _take_turns([find_column(block) for block in range(key_blocks)], heads, heads_in_turn)
    shares = []
    for split in range(splits):
        # As _find_block in attention/kernel_heads.py.
        turns = (split if step % 2 == 0 else splits - 1 - split for step in range(-(-key_blocks // splits)))
        blocks = [step * splits + turn for step, turn in enumerate(turns)]
        columns = [find_column(block) for block in blocks if block < key_blocks]
        shares.append(Program(*(sum(numbers) for numbers in zip(*columns, strict=True))))
    return shares * heads


def _take_turns(programs: list[Program], heads: int, heads_in_turn: int) -> list[Program]:
    """As find_turn in attention/kernel_tile.py."""
    sizes = [min(heads_in_turn, heads - first) for first in range(0, heads, heads_in_turn)]
    return [program for size in sizes for program in programs for _ in range(size)]


def find_reread_bytes(one: Mapping[str, Any], num_running: int, num_tiles: int, causal: bool, chosen: Chosen) -> float:
    """Bytes between the L2 cache and memory of the walk for all gradients: of what each block of keys needs again, the
    share that the cache cannot hold, where it keeps any of it as probably as any other."""
    splits, sums, row_bytes = one["splits"], one.get("sums", one["splits"]), one["head_dim"] * 4
    # Of a head, q and grad_out in 16 bits, and its sums; under a causal limit half of it on average.
    in_use = num_running / splits * LENGTH * row_bytes * (1 + sums) * (0.5 if causal else 1.0)
    lost = max(0.0, 1.0 - L2_BYTES[chosen] / in_use)
    return num_tiles * one["tile"][0] * row_bytes * (2 * sums + 1) / splits * lost


def find_walk(
    one: Mapping[str, Any], device: Device, causal: bool, chosen: Chosen = CENTRAL, efficiency: float = 1.0
) -> Walk:
    """Of the pass that a record of static_roofline.py describes: one of PRODUCTS, with its counts. Each split has sums
    of its own unless the record says how many a head has (`sums`); `product_share` is one of PRODUCT_SHARES."""
    queries, keys = one["tile"]
    head_dim, name, splits = one["head_dim"], one["walk"], one["splits"]
    heads, share = HEADS // head_dim, one["warps"] / SCHEDULERS
    tensor = 2 * queries * keys * head_dim * PRODUCTS[name] / ARCHITECTURES[device.capability].product_flops
    tensor /= one.get("product_share", 1.0)
    issued = one["issued"] - SHADOWS[chosen] * one["shadow"]
    per_tile, per_edge = (issued * share + tensor) / efficiency, one["others"] * share / efficiency
    per_block = 2 * chosen.latency_cycles + one["around"] * share
    programs = list_programs(name, (queries, keys), splits, causal, heads, one.get("heads_in_turn", 1))
    # Programs that share a multiprocessor share its cycles; the GPU gives each one of its own as long as there are any.
    sharing = min(one["programs_per_sm"], -(-len(programs) // device.multiprocessors))
    barriers = one["barriers"] * chosen.barrier_cycles / efficiency if sharing == 1 else 0.0
    cycles = [
        chosen.start_cycles
        + p.blocks * per_block
        + p.tiles * (sharing * per_tile + barriers)
        + sharing * p.edges * per_edge
        for p in programs
    ]
    total_tiles = sum(p.tiles for p in programs)
    num_slots = device.multiprocessors * one["programs_per_sm"]
    slots = [0.0] * num_slots
    for length in cycles:
        heapq.heapreplace(slots, slots[0] + length)
    tiles_s = total_tiles * per_tile / device.multiprocessors / device.clock_hz
    atomics_s = memory_s = others_s = 0.0
    if name == "backward":
        elements, sums = HEADS * LENGTH, one.get("sums", splits)
        atomics_s = total_tiles * queries * head_dim * 4 / ATOMIC_BYTES_PER_S[chosen]
        num_bytes = find_reread_bytes(one, min(len(programs), num_slots), total_tiles, causal, chosen)
        memory_s = num_bytes / device.copy_bytes_per_s
        # Before: out and grad_out, and zeros where all splits add to the same sums. Behind: the sums, and grad_q.
        zeros = 4 * sums if "sums" in one else 0
        others_s = elements * (2 * 2 + zeros + 4 * sums + 2) / device.copy_bytes_per_s
        others_s += 2 * chosen.launch_us * 1e-6
    if name == "grad_kv":
        others_s += chosen.launch_us * 1e-6
    walk_s = max(max(slots) / device.clock_hz, atomics_s, memory_s)
    return Walk(tiles_s, atomics_s, memory_s, others_s, walk_s + others_s)


def find_speed(records: list[Mapping[str, Any]], device: Device, causal: bool, *choice: Any) -> float:
    """TFLOP/s of passes one after the other, by the convention of the published figures: 2 products of forward and 5 of
    backward, however many are made, and half of them where attention is causal."""
    products = sum({"forward": 2, "grad_q": 0, "grad_kv": 5, "backward": 5}[one["walk"]] for one in records)
    seconds = sum(find_walk(one, device, causal, *choice).total for one in records)
    return products * 2 * LENGTH**2 * HEADS / (2 if causal else 1) / seconds / 1e12


def find_speed_with_dropout(
    records: Sequence[Mapping[str, Any]], head_dim: int, device: Device, chosen: Chosen = CENTRAL
) -> float:
    """TFLOP/s of FlashAttention-2, forward and backward, not causal: each published pass without dropout takes as many
    times longer with it as the model says. `records` are those of flash_attention.py."""
    found = {
        (one["walk"], one["dropout"]): find_walk(
            {**one, "product_share": PRODUCT_SHARES[chosen]}, device, False, chosen
        )
        for one in records
        if one["head_dim"] == head_dim
    }
    published = figures.ATTENTION["FlashAttention-2"][head_dim]
    assert published.backward is not None
    seconds = 2 / published.forward * found["forward", True].total / found["forward", False].total
    seconds += 5 / published.backward * found["backward", True].total / found["backward", False].total
    return 7 / seconds


def find_efficiencies(device: Device) -> tuple[float, float, float]:
    """What was measured of Triton's tutorial over what the model says at an efficiency of 1: (mean, least, most). The
    least is without the shadow, as the slow choice is."""

    def compare(**replaced: int) -> list[float]:
        found = []
        for head_dim, counts in figures.TUTORIAL.items():
            one = {"walk": "forward", "head_dim": head_dim, "splits": 1, "others": 0, **counts, **replaced}
            published = figures.ATTENTION["Triton's tutorial"][head_dim]
            for causal, speed in ((False, published.forward), (True, published.causal_forward)):
                found.append(speed / find_speed([one], device, causal))
        return found

    found = compare()
    return math.prod(found) ** (1 / len(found)), min(compare(shadow=0)), max(found)

"""Recomputes elementwise operations: `drop` frees an output after the next linear has used it, and makes it again for
the linear's backward, so that only the operation's input is kept."""

from tempo_kernels.recompute.function import adopt, recompute
from tempo_kernels.recompute.graph import drop, hold
from tempo_kernels.recompute.kept_outputs import keep_attention
from tempo_kernels.recompute.tiles import recompute_in_tiles
from tempo_kernels.saved import Kept, Refillable, can_refill, find_saved_tensors

__all__ = [
    "Kept", "Refillable", "adopt", "can_refill", "drop", "find_saved_tensors", "hold", "keep_attention", "recompute",
    "recompute_in_tiles",
]  # fmt: skip

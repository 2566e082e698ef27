"""Recomputes elementwise operations: `drop` frees an output after the next linear has used it, and makes it again for
the linear's backward, so that only the operation's input is kept."""

from tempo_kernels.recompute.function import adopt, recompute
from tempo_kernels.recompute.graph import Kept, drop, find_saved_tensors, hold
from tempo_kernels.refill import Refillable, can_refill

__all__ = ["Kept", "Refillable", "adopt", "can_refill", "drop", "find_saved_tensors", "hold", "recompute"]

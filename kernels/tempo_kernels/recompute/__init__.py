"""Drops the output of an elementwise operation once the next linear used it, and makes it again for that linear's
backward: what is kept is the operation's input."""

from tempo_kernels.recompute.function import recompute
from tempo_kernels.recompute.graph import Kept, Refillable, can_refill, drop

__all__ = ["Kept", "Refillable", "can_refill", "drop", "recompute"]

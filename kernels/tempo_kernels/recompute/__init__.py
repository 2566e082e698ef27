"""Drops the output of an elementwise operation once the next linear used it, and refills it before that linear's
backward: what is kept is the operation's input."""

from tempo_kernels.recompute.function import drop, recompute

__all__ = ["drop", "recompute"]

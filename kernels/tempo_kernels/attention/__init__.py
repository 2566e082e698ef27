"""Attention with dropout that keeps q, k, v, the output and one logsumexp per row: no s*s tensor, no mask."""

from tempo_kernels.attention.function import attention, describe, find_backend

__all__ = ["attention", "describe", "find_backend"]

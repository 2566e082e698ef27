"""Attention with dropout that keeps q, k, v, the output and one logsumexp per row: no s*s tensor, no mask."""

from tempo_kernels.attention.function import attention, backend, describe

__all__ = ["attention", "backend", "describe"]

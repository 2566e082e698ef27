"""GELU that keeps its output, which the next linear keeps anyway, and one bit per element, instead of its input."""

from tempo_kernels.gelu.cpu import make_tables
from tempo_kernels.gelu.function import gelu

__all__ = ["gelu", "make_tables"]

"""Squared ReLU that keeps its output, which the next linear keeps anyway, instead of its input."""

from tempo_kernels.squared_relu.function import squared_relu

__all__ = ["squared_relu"]

"""Activations of x + bias, gated or not, by one kernel pair. gelu, glu, silu and squared_relu name them singly."""

from tempo_kernels.activation.activations import ACTIVATIONS, Activation
from tempo_kernels.activation.cpu import make_tables
from tempo_kernels.activation.function import activate, get_gelu

__all__ = ["ACTIVATIONS", "Activation", "activate", "get_gelu", "make_tables"]

"""What several pointwise operations share: formulas of activations, here in torch and inside kernels in Triton."""

from tempo_kernels.pointwise.activations import ACTIVATIONS, Activation

__all__ = ["ACTIVATIONS", "Activation"]

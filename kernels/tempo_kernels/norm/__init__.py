"""LayerNorm that keeps its output, which the next linear keeps anyway, instead of its input."""

from tempo_kernels.norm.function import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]

"""LayerNorm and RMSNorm that keep their output, which the next linear keeps anyway, or their input, to be exact."""

from tempo_kernels.norm.function import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]

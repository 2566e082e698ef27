"""LayerNorm and RMSNorm that keep either their output, which the next linear keeps anyway, or, for exactness, x."""

from tempo_kernels.norm.function import fits_in_place, layer_norm, rms_norm

__all__ = ["fits_in_place", "layer_norm", "rms_norm"]

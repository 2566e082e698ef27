"""Gated linear units: one half of x times an activation of the other half, differentiated from x."""

from tempo_kernels.glu.function import geglu, glu, reglu, swiglu

__all__ = ["geglu", "glu", "reglu", "swiglu"]

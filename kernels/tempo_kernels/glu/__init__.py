"""Gated linear units: the product of one half of x and an activation of the other, differentiated from x."""

from tempo_kernels.glu.function import geglu, glu, reglu, swiglu

__all__ = ["geglu", "glu", "reglu", "swiglu"]

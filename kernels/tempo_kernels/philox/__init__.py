"""Philox4x32 (Salmon et al., SC 2011): computes random bits as a pure function of a key and a position."""

from tempo_kernels.philox.eager import (
    LANES,
    check_drawn_from,
    check_place,
    derive_key,
    drop_,
    effective_probability,
    philox4x32,
    threshold,
)
from tempo_kernels.philox.function import DRAWS, drop_mask, keep_bits

__all__ = ["DRAWS", "LANES", "check_drawn_from", "check_place", "derive_key", "drop_", "drop_mask"]
__all__ += ["effective_probability", "keep_bits", "philox4x32", "threshold"]

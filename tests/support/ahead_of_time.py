"""What the tests of compiled kernels share, which benchmarks/static_roofline.py takes from the same place."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

from roofline.launches import Launch, compiled, narrow_accesses, record_launches, resources, source_of

CAPABILITIES = [80, 90, 100]

__all__ = ["CAPABILITIES", "Launch", "compiled", "narrow_accesses", "record_launches", "resources", "source_of"]

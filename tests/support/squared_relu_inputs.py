"""What the tests of squared ReLU share: every number of a dtype whose square it can hold."""

from __future__ import annotations

import torch


def every_number(dtype):
    """Every 16-bit number whose square is in the normal range, and as many negative ones."""
    numbers = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    limits = torch.finfo(dtype)
    return numbers[(numbers.double() ** 2 >= limits.tiny) & (numbers.double() ** 2 <= limits.max)]

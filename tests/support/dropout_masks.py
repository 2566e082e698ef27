"""What the tests of dropout share: one draw of random numbers, and its mask from the definition."""

from __future__ import annotations

import torch

from tempo_kernels.philox import drop_mask

DRAW = {"p": 0.1, "key": 0xFEDCBA9876543210, "first_sample": 11, "first_row": 5}


def mask_of(x, p=0.1, key=DRAW["key"], first_sample=11, first_row=5):
    """The mask from its definition, over the whole tensor at once: [s, b, h]."""
    row = torch.arange(first_row, first_row + x.size(0)).unsqueeze(-1)
    sample = torch.arange(first_sample, first_sample + x.size(1))
    return drop_mask(key, p, sample=sample, head=torch.tensor(0), row=row, num_columns=x.size(2))

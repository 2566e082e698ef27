"""What the tests of gated linear units share: the activations, each beside torch's, and inputs over their range."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tempo_kernels.glu import geglu, reglu, swiglu

ACTIVATIONS = {
    "silu": (swiglu, F.silu),
    "gelu": (geglu, F.gelu),
    "gelu_tanh": (lambda x, bias=None: geglu(x, bias, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "relu": (reglu, F.relu),
}


def over_the_range(columns):
    """Gates in [-8, 8] beside random ups."""
    gate = torch.linspace(-8, 8, 101 * columns, dtype=torch.float64).view(101, columns)
    return torch.cat([gate, torch.randn(101, columns)], dim=1)

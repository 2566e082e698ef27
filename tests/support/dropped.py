"""What the tests of recompute and drop share: a function, its inputs, a linear behind it, and the memory between."""

from __future__ import annotations

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from tempo_kernels.recompute import drop


def bias_gelu(x, bias):
    return F.gelu(x + bias)


def leaves(width=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, requires_grad=True) for shape in [(6, 2, width), (24,)]]


def linear_of(seed=1):
    torch.manual_seed(seed)
    return nn.Linear(24, 16)


def run_dropped(use, operation, *args, **kwargs):
    """use(operation(...)), whose middle is dropped, and so lies in no memory."""
    y = operation(*args, **kwargs)
    out = use(y)
    drop(y, after=out)
    memory = StorageWeakRef(y.untyped_storage())
    del y
    assert memory.expired()
    return out


class Counted:
    """bias_gelu that counts its runs and remembers the memory that it made."""

    def __init__(self):
        self.made = []

    def __call__(self, x, bias):
        y = bias_gelu(x, bias)
        self.made.append(StorageWeakRef(y.untyped_storage()))
        return y

    @property
    def alive(self):
        return [not memory.expired() for memory in self.made]


def gradients_of(out, inputs, linear):
    return torch.autograd.grad(out.square().sum(), [*inputs, *linear.parameters()])

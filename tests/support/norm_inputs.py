"""Parameters to try a norm with, and torch's norms as the witnesses."""

from __future__ import annotations

import torch
from torch.nn import functional as F

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMS = ["inplace", "recompute"]
NAMES = ["y", "grad_x", "grad_weight", "grad_bias"]
PARAMETERS = {
    "initial": lambda h: (torch.ones(h), torch.zeros(h)),
    "trained": lambda h: (torch.randn(h) * 0.3 + 1, torch.randn(h) * 0.2),
    "one in a hundred gamma 0": lambda h: (
        torch.ones(h).masked_fill(torch.arange(h) % 100 == 0, 0.0),
        torch.randn(h) * 0.2,
    ),
    "one in a hundred beta / gamma 100": lambda h: (
        torch.ones(h).masked_fill(torch.arange(h) % 100 == 0, 0.01),
        (torch.randn(h) * 0.2).masked_fill(torch.arange(h) % 100 == 0, 1.0),
    ),
    "gamma 0 and beta 0": lambda h: (torch.zeros(h), torch.zeros(h)),
    "beta / gamma 100": lambda h: (torch.full((h,), 0.01), torch.ones(h)),
    "beta / gamma about 2": lambda h: (torch.ones(h), torch.full((h,), 1.99)),
    "tiny gamma": lambda h: (torch.full((h,), 1e-7), torch.zeros(h)),
    "negative gamma": lambda h: (-torch.rand(h) - 0.1, torch.randn(h) * 0.1),
}


def reference_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def reference_rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def float32_layer_norm(x, weight, bias):
    """As GPUs compute: in float32 and rounded at the end. torch's own on a CPU adds 16-bit gradients up in 16 bits."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.layer_norm(x.to(dtype), x.shape[-1:], weight.to(dtype), bias.to(dtype), 1e-5).to(x.dtype)


def float32_rms_norm(x, weight):
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(dtype), x.shape[-1:], weight.to(dtype), 1e-5).to(x.dtype)


def zero_centered_layer_norm(x, weight, bias):
    """Megatron's: the sum is rounded to weight's dtype."""
    return F.layer_norm(x, x.shape[-1:], weight + 1, bias, 1e-5)


def results(norm, tensors, grad):
    """y and the gradient of each tensor, in their own dtypes."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = norm(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]

"""Lets Megatron's local modules keep what Transformer Engine's keep, where the two differ.

References are to Transformer Engine 2.20, from transformer_engine/.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.norm import rms_norm
from tempo_megatron.memory.run import Run
from tempo_megatron.slots.norm import TorchRMSNorm


def choose_attention(run: Run) -> str:
    """ "fused", "flash" or "unfused": what DotProductAttention takes where both of the first two are installed.

    FlashAttention goes first before Hopper, cuDNN's from Hopper on (pytorch/attention/dot_product_attention/utils.py:
    1649); on Blackwell that has no deterministic backward with dropout (common/fused_attn/fused_attn.cpp:480-488).
    """
    if run.stock_attention != "fused" or run.gpu is None:
        return run.stock_attention
    is_refused = run.gpu == "gb200" and run.deterministic and run.model.attention_dropout > 0
    return "flash" if run.gpu == "a100" or is_refused else "fused"


def copy_outputs_of_attention(layer: torch.nn.Module) -> None:
    """Let attention hand out a copy of its output, which the projection then keeps beside the output itself.

    FlashAttention keeps its output as [b, s, ...], and the projection's input is that of [s, b, ...] in memory of its
    own (pytorch/attention/dot_product_attention/backends.py:1361-1369). With one sample both are one.
    """
    for name in ("self_attention", "cross_attention"):
        core = getattr(getattr(layer, name, None), "core_attention", None)
        if core is not None:
            core.register_forward_hook(lambda _, __, output: _HandOutACopy.apply(output))


class _HandOutACopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output


def put_norm_kernels(model: torch.nn.Module) -> None:
    """Let RMSNorm keep its input and one float32 a token, as a kernel does (common/normalization/rmsnorm, and
    pytorch/module/layernorm_linear.py:526-536); torch composes it of operations that keep more."""
    for module in model.modules():
        if type(module) is TorchRMSNorm:
            module.forward = functools.partial(_normalize, module)  # type: ignore[method-assign]


def _normalize(norm: TorchRMSNorm, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps, zero_centered=norm.zero_centered_gamma, keep="input")

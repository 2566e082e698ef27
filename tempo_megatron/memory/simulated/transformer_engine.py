"""Lets Megatron's local modules keep what Transformer Engine's keep, where the two differ.

References are to Transformer Engine 2.20, from transformer_engine/.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from tempo_kernels.norm import rms_norm
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.device import mark_as_stock
from tempo_megatron.memory.simulated.stand_in import DroppedOutput, stand_in
from tempo_megatron.slots.attention import TempoNormedSelfAttention, TempoRotarySelfAttention
from tempo_megatron.slots.norm import TorchRMSNorm


def choose_attention(run: Run) -> str:
    """ "fused", "flash" or "unfused": what DotProductAttention takes where both of the first two are installed; that of
    Megatron's own modules is unfused.

    FlashAttention goes first before Hopper, cuDNN's from Hopper on (pytorch/attention/dot_product_attention/utils.py:
    1649); on Blackwell that has no deterministic backward with dropout (common/fused_attn/fused_attn.cpp:480-488).
    """
    if run.stock != "transformer_engine":
        return "unfused"
    if run.stock_attention != "fused" or run.gpu is None:
        return run.stock_attention
    is_refused = run.gpu == "gb200" and run.deterministic and run.model.attention_dropout > 0
    return "flash" if run.gpu == "a100" or is_refused else "fused"


def put_stock_attention(layer: torch.nn.Module, *, copies: bool) -> None:
    """Let a layer whose core attention is Tempo's, in the place of Transformer Engine's, keep for the rest what
    Megatron's attention keeps.

    copies: whether core attention hands out a copy of its output, which the projection then keeps beside the output.
    FlashAttention keeps its output as [b, s, ...], and the projection's input is that of [s, b, ...] in memory of its
    own (pytorch/attention/dot_product_attention/backends.py:1361-1369). With one sample both are one.
    """
    for name in ("self_attention", "cross_attention"):
        holder = getattr(layer, name, None)
        if type(holder) in (TempoRotarySelfAttention, TempoNormedSelfAttention):
            holder.__class__ = SelfAttention
        core = getattr(holder, "core_attention", None)
        if core is not None:
            mark_as_stock(core)
        if copies and core is not None:
            core.register_forward_hook(lambda _, __, output: _hand_out_copy(output))


def _hand_out_copy(output: Tensor) -> Tensor:
    return stand_in(lambda x: (x.clone(), (x,)), output, differentiate=lambda _, grad: [grad])


def keep_padding_masks(model: torch.nn.Module) -> None:
    """Let unfused attention that masks padding keep its mask, [b, 1, s, s] of a byte each, in every layer.

    Each makes its own (pytorch/attention/dot_product_attention/utils.py: get_full_mask), with which it sets the
    probabilities of padding to 0 after the softmax (backends.py: UnfusedDotProductAttention). Causal has none.
    """
    for module in model.modules():
        if isinstance(module, DotProductAttention) and module.attn_mask_type is not AttnMaskType.causal:
            module.scale_mask_softmax.register_forward_hook(lambda _, __, output: _mask_padding(output))


def _mask_padding(probabilities: Tensor) -> Tensor:
    b, _, num_queries, num_keys = probabilities.shape
    mask = torch.empty((b, 1, num_queries, num_keys), dtype=torch.bool)
    return probabilities.masked_fill(mask, 0)


def put_norm_kernels(model: torch.nn.Module) -> None:
    """Let RMSNorm keep its input and one float32 a token, as a kernel does (common/normalization/rmsnorm, and
    pytorch/module/layernorm_linear.py:526-536); torch composes it of operations that keep more."""
    for module in model.modules():
        if type(module) is TorchRMSNorm:
            module.forward = functools.partial(_normalize, module)  # type: ignore[method-assign]


def _normalize(norm: TorchRMSNorm, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps, zero_centered=norm.zero_centered_gamma, keep="recompute")


def recompute_norms(model: torch.nn.Module, *, has_latent_attention: bool) -> None:
    """Let Megatron recompute the norms that are modules of their own: those before latent attention and before experts.

    Where a linear follows, norm and linear are one module (core/models/gpt/gpt_layer_specs.py:
    get_gpt_layer_with_transformer_engine_spec of megatron-core 0.16.1), which keeps the norm's output all the same.
    """
    for layer in model.modules():
        if not isinstance(layer, TransformerLayer):
            continue
        if has_latent_attention:
            _recompute_behind(layer.input_layernorm, layer.self_attention)
        if isinstance(layer.mlp, MoELayer):
            _recompute_behind(layer.pre_mlp_layernorm, layer.mlp)


def _recompute_behind(norm: torch.nn.Module, user: torch.nn.Module) -> None:
    """Drop the norm's output when `user`, which has it as its input, is done, as transformer_layer.py does."""
    calls: list[DroppedOutput] = []
    normalize, use = norm.forward, user.forward

    def run_norm(x: Tensor) -> Any:
        calls.append(DroppedOutput())
        return calls[-1].run(normalize, x)

    def run_user(*inputs: Any, **named: Any) -> Any:
        dropped = calls.pop()
        with dropped.use():
            output = use(*inputs, **named)
        dropped.recompute_for(output[0])
        return output

    norm.forward, user.forward = run_norm, run_user

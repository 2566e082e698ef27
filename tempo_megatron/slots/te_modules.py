"""Modules that stand where Megatron's spec of Transformer Engine has its own; see transformer_engine.py for the choice.

They are made when they are asked for: what they derive from exists only where Transformer Engine does.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.recompute import drop, hold
from tempo_megatron.slots.attention import TempoDotProductAttention, TempoRecomputeDotProductAttention
from tempo_megatron.slots.linear import NormInFront, name_as_stock
from tempo_megatron.slots.mlp import TempoLinearRecomputeMLP, TempoMLP, TempoRecomputeMLP

_WITHOUT_PADDING = (AttnMaskType.causal, AttnMaskType.no_mask)


class SplitNorm(NormInFront):
    """Tempo's norm, then Transformer Engine's linear: a base of classes whose next base is Megatron's
    `TELayerNormColumnParallelLinear`.

    It is that module in everything but what runs: its constructor, parameters, flags, checkpoint keys and class, which
    Megatron-Bridge's adapters and weight maps ask for, and which `return_layernorm_output` tells to give the norm's
    output too. The linear that runs is Transformer Engine's column-parallel one, on this module's weight and bias.

    Keeps for backward: with `keep` "output" y, which the linear keeps too, in the same memory, and rstd; with "input" x
        and the statistics, and neither y. Stock keeps x, y and the statistics.
    """

    linear_class: ClassVar[Any]
    """Megatron's class for Transformer Engine's column-parallel linear."""

    keep: ClassVar[str] = "output"
    runs_again: ClassVar[bool] = False
    """Whether a LinearCall asks for what the norm gave."""

    def __init__(self: Any, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)  # type: ignore[call-arg]
        bare = copy.copy(config)
        bare.use_cpu_initialization, bare.init_model_with_meta_device = False, True
        # In a tuple, and so none of this module's modules: it has no parameters of its own.
        self._linear = (self.linear_class(input_size, output_size, config=bare, **kwargs),)

    def forward(self: Any, x: Tensor) -> Any:
        """(output, bias or None) of x [s or s/t, b, h]; with `return_layernorm_output` the norm's output beside them,
        in the place where Transformer Engine puts it."""
        y = self._norm(x)
        if self.runs_again and torch.is_grad_enabled():
            self.normed = hold(y)
        result = self.run_linear(y)
        if self.keep == "input":
            drop(y, after=result[0])
        if not self.return_layernorm_output:
            return result
        if self.return_layernorm_output_gathered and self.sequence_parallel:
            y = gather_from_sequence_parallel_region(y, group=self.tp_group)
        output, bias = result
        return (output, bias, y) if self.te_return_bias else ((output, y), bias)

    def run_linear(self: Any, y: Tensor) -> Any:
        """(output, bias or None) of the norm's output."""
        (linear,) = self._linear
        # As they are now: FSDP and initialisation on the meta device put others in their place.
        linear._parameters.update({name: self._parameters[name] for name in linear._parameters})
        linear.is_first_microbatch, self.is_first_microbatch = self.is_first_microbatch, False
        return linear(y)

    def _norm(self: Any, x: Tensor) -> Tensor:
        settings = {"zero_centered": self.zero_centered_gamma, "keep": self.keep}
        if self.normalization == "RMSNorm":
            return rms_norm(x, self.layer_norm_weight, self.eps, **settings)
        return layer_norm(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, **settings)


class _EmptyExtraState:
    """The `_extra_state` that modules of Transformer Engine have, which is empty where there is no fp8."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if state is not None and state.numel():
            raise ValueError(
                "the checkpoint holds fp8 state for a module that Tempo replaced; expected one without; leave Tempo off"
            )


def _allow_no_extra_state(_: Any, incompatible_keys: Any) -> None:
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if not key.endswith("core_attention._extra_state")]


class TempoTEDotProductAttention(_EmptyExtraState, TempoDotProductAttention):
    """TempoDotProductAttention in the place of `TEDotProductAttention`, which with a causal mask, or none, looks at no
    mask that it is given. As there, a checkpoint may lack the extra state: sharded ones do not hold an attention's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_post_hook(_allow_no_extra_state)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[sq, b, a/p * d] of query [sq, b, a/p, d] and key, value [sk, b, g/p, d]."""
        if (attn_mask_type or self.attn_mask_type) in _WITHOUT_PADDING:
            attention_mask = None
        return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)


class TempoTESoftmaxDotProductAttention(TempoTEDotProductAttention):
    """The form of the Tempo paper; see TempoSoftmaxDotProductAttention."""

    form = value = "softmax"


class TempoTERecomputeDotProductAttention(TempoRecomputeDotProductAttention, TempoTEDotProductAttention):
    """TempoRecomputeDotProductAttention in the place of `TEDotProductAttention`."""


class TempoOpsMLP(TempoMLP):
    """TempoMLP in the place of `TEFusedMLP`, whose GELU has its tanh form."""

    approximate = "tanh"


class TempoRecomputeOpsMLP(TempoRecomputeMLP):
    """TempoRecomputeMLP in the place of `TEFusedMLP`."""

    approximate = "tanh"


class TempoLinearRecomputeOpsMLP(TempoLinearRecomputeMLP):
    """TempoLinearRecomputeMLP in the place of `TEFusedMLP`."""

    approximate = "tanh"


@functools.cache
def make_split_norm(norm_and_linear: Any, linear: Any, keep: str, runs_again: bool) -> Any:
    """SplitNorm in the place of `norm_and_linear`, and in front of `linear`: Megatron's classes for those modules."""
    contents = {"linear_class": linear, "keep": keep, "runs_again": runs_again}
    return name_as_stock(type(f"Tempo{norm_and_linear.__name__}", (SplitNorm, norm_and_linear), contents))


@functools.cache
def add_extra_state(norm: Any) -> Any:
    """A norm of norm.py with the `_extra_state` of Transformer Engine's norms."""
    return type(norm.__name__.replace("Tempo", "TempoTE"), (_EmptyExtraState, norm), {})


@functools.cache
def make_dropping_linear(mixin: Any, linear: Any) -> Any:
    """`linear` that does not keep the output of a norm, or an attention, that can make it again."""
    return name_as_stock(type(f"Tempo{linear.__name__}", (mixin, linear), {}))

"""Replaces modules in a spec of Transformer Engine (TE), Megatron's default on GPUs.

TE's linears stay, and with them every parameter and checkpoint key; Tempo takes what lies between them.

- `TELayerNormColumnParallelLinear` (norm and linear in one) is split into Tempo's norm and TE's own column-parallel
  linear, inside one module of a class derived from the fused one. Stock keeps the norm's input and its output; the
  split module keeps the output only, which is the linear's input. Without fp8, fusing saves one kernel launch: the norm
  writes its output to memory either way.
- `TENorm` becomes Tempo's norm, and `MLP` Tempo's MLP around TE's linears. The op fuser's `TEFusedMLP` stays.
- `TEDotProductAttention` becomes Tempo's attention in layers with a causal mask or none. It stays in layers with
  padding or arbitrary masks, because TE has its own conventions for these.
- If a linear runs again in backward, the split one takes the norm's output; with tempo.norm "off" the fused one runs,
  norm included. The linear of q, k and v runs again only beside Tempo's attention: TE's own may keep copies.

Features that do more with a linear's input than keep it (delayed weight gradients, overlapped communication,
offloading) are refused: y would be kept twice, or by code that does not know that it may be recomputed. In fp8 a norm
or activation that keeps its output has the linear behind it keep that output too, instead of a quantised copy.

Classes that derive from TE's are made on demand, because TE need not be installed.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from megatron.core.extensions import transformer_engine as extension
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.recompute import drop, hold
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.attention import CAUSAL, TempoDotProductAttention, TempoRecomputeDotProductAttention
from tempo_megatron.slots.choose import Obstacles, Refusal
from tempo_megatron.slots.linear import (
    HOLD_INPUTS,
    DropsInput,
    find_reason,
    is_quantised,
    keep_given_input,
    name_as_stock,
)
from tempo_megatron.slots.slot_content import find_class, find_submodules, list_fields

_MASKS = (AttnMaskType.causal, AttnMaskType.no_mask)
"""Under which TE's attention looks at no mask that it is given."""
_HOLD_INPUTS = {
    **HOLD_INPUTS,
    "tp_comm_overlap": "whose buffers hold linears' inputs",
    "quant_recipe": "by which linears may keep quantised copies of their inputs",
}
_ASK_ATTENTION = dict.fromkeys(("qk_clip", "log_max_attention_logit"), "which Tempo's attention does not support")


class SplitNorm:
    """Tempo's norm, then Transformer Engine's linear: a base of classes whose next base is Megatron's
    `TELayerNormColumnParallelLinear`.

    Only what runs differs from that module. Constructor, parameters, flags and checkpoint keys are its own, and so is
    the class, by which Megatron-Bridge chooses adapters and weight maps. With `return_layernorm_output` it returns the
    norm's output too. The linear that runs is Transformer Engine's column-parallel one, on this module's weight and
    bias.

    Keeps for backward: with `keep` "inplace" rstd and y, in the memory that the linear keeps too; with "recompute" x
        and the statistics, and no y. Stock keeps x, y and the statistics.
    """

    linear_class: ClassVar[Any]
    """Megatron's class for Transformer Engine's column-parallel linear."""

    keep: ClassVar[str] = "inplace"
    runs_again: ClassVar[bool] = False
    """Whether a LinearCall asks for the norm's output."""

    normed: Callable[[], Tensor] | None = None
    """The norm's output, as `hold` returns it, from a forward with a graph until `take_normed`."""

    def __init__(self: Any, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)  # type: ignore[call-arg]
        bare = copy.copy(config)
        bare.use_cpu_initialization, bare.init_model_with_meta_device = False, True
        # In a tuple, so that it is not registered as a submodule: it uses this module's parameters.
        self._linear = (self.linear_class(input_size, output_size, config=bare, **kwargs),)
        if self.keep == "inplace" and is_quantised(config):
            keep_given_input(self._linear[0])

    def forward(self: Any, x: Tensor) -> Any:
        """(output, bias or None) of x [s or s/t, b, h]; with `return_layernorm_output` also the norm's output, where
        Transformer Engine puts it."""
        settings = {"zero_centered": self.zero_centered_gamma, "keep": self.keep}
        if self.normalization == "RMSNorm":
            y = rms_norm(x, self.layer_norm_weight, self.eps, **settings)
        else:
            y = layer_norm(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, **settings)
        if self.runs_again and torch.is_grad_enabled():
            self.normed = hold(y)
        result = self.run_linear(y)
        if self.keep == "recompute":
            drop(y, after=result[0])
        if not self.return_layernorm_output:
            return result
        if self.return_layernorm_output_gathered and self.sequence_parallel:
            y = gather_from_sequence_parallel_region(y, group=self.tp_group)
        output, bias = result
        return (output, bias, y) if self.te_return_bias else ((output, y), bias)

    def take_normed(self) -> Callable[[], Tensor]:
        """The norm's output of the last forward, which it then no longer holds."""
        normed, self.normed = self.normed, None
        assert normed is not None
        return normed

    def run_linear(self: Any, y: Tensor) -> Any:
        """(output, bias or None) of the norm's output."""
        (linear,) = self._linear
        # Look parameters up in each call: FSDP and initialisation on the meta device replace them.
        linear._parameters.update({name: self._parameters[name] for name in linear._parameters})
        linear.is_first_microbatch, self.is_first_microbatch = self.is_first_microbatch, False
        return linear(y)


class _EmptyExtraState:
    """The `_extra_state` of Transformer Engine's modules, which is empty without fp8."""

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
    """TempoDotProductAttention in the place of `TEDotProductAttention`, which loads checkpoints without extra state:
    sharded ones do not hold an attention's.

    What is hidden is what Transformer Engine hides (2.20, check_set_window_size of pytorch/attention/
    dot_product_attention/utils.py). A given mask counts if the mask type is neither causal nor none. A window counts
    beside the mask type: in a causal layer no token sees those after it, whatever `right` says. -1 is no limit, and
    without a mask (-1, 0) is no window.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_post_hook(_allow_no_extra_state)
        # Before 0.15 Transformer Engine's attention alone has a window, in each layer.
        window = getattr(self.scale_mask_softmax, "window_size", self.config.window_size)
        self._window_size = None if window is None else tuple(window)
        if window is not None and window[0] < 0:  # stock's own, which answers one token beside a cache of keys
            self.scale_mask_softmax.window_size = None

    def _hide(
        self, query: Tensor, key: Tensor, mask: Tensor | None, mask_type: AttnMaskType, *, is_packed: bool
    ) -> dict[str, Any]:
        heeded = None if mask_type in _MASKS else mask
        is_causal = heeded is None and mask_type in CAUSAL
        window = None if self._window_size == (-1, 0) and not is_causal else self._window_size
        return {"causal": is_causal, "mask": heeded, **({} if window is None else {"window_size": window})}


class TempoTESoftmaxDotProductAttention(TempoTEDotProductAttention):
    """The form of the Tempo paper; see TempoSoftmaxDotProductAttention."""

    form = "softmax"


class TempoTERecomputeDotProductAttention(TempoRecomputeDotProductAttention, TempoTEDotProductAttention):
    """TempoRecomputeDotProductAttention in the place of `TEDotProductAttention`."""


@functools.cache
def make_split_norm(norm_and_linear: Any, linear: Any, keep: str, runs_again: bool) -> Any:
    """SplitNorm in the place of `norm_and_linear`, and in front of `linear`; both are Megatron's classes."""
    contents = {"linear_class": linear, "keep": keep, "runs_again": runs_again}
    return name_as_stock(type(f"Tempo{norm_and_linear.__name__}", (SplitNorm, norm_and_linear), contents))


@functools.cache
def make_with(mixin: Any, stock: Any, name: str | None = None) -> Any:
    """`stock` behind a mixin, by default with its name, as of linears."""
    made = type(name or f"Tempo{stock.__name__}", (mixin, stock), {})
    return made if name else name_as_stock(made)


_HOLDERS = ("self_attention", "cross_attention", "mlp", "mixer")
_NORM_AND_LINEAR = "TELayerNormColumnParallelLinear"
_LINEARS = ("TEColumnParallelLinear", "TERowParallelLinear")


def is_installed() -> bool:
    """Whether Megatron found Transformer Engine."""
    return bool(extension.HAVE_TE)


def _is_stock(slot: Any, *names: str) -> bool:
    module = find_class(slot)
    return is_installed() and module is not None and any(module is getattr(extension, name, None) for name in names)


def is_residual_norm(slot: Any, transformer_config: Any) -> bool:
    """Whether a slot holds the TENorm that can also add the residual (since 0.17), but does not in this run."""
    provider = sys.modules.get("megatron.core.extensions.transformer_engine_spec_provider")
    stock = getattr(provider, "_TENormWithResidual", None)
    does_both = getattr(transformer_config, "fused_residual_rmsnorm", False)
    return is_installed() and stock is not None and slot is stock and not does_both


def is_attention(slot: Any, params: Any) -> bool:
    """Whether a core attention is TE's, in a layer whose mask type means the same to Tempo's attention."""
    return _is_stock(slot, "TEDotProductAttention") and params.get("attn_mask_type") in _MASKS


def replace_norm(stock: Any, tempo_norm: Any) -> Any:
    """Tempo's norm in the place of `stock`, with an extra state if `stock` is TE's and has one."""
    is_te = _is_stock(stock, "TENorm") or getattr(stock, "__name__", "") == "_TENormWithResidual"
    if not is_te:
        return tempo_norm
    te_norm = getattr(extension.te.pytorch, "LayerNorm", torch.nn.Module)
    if te_norm.get_extra_state is torch.nn.Module.get_extra_state:
        return tempo_norm
    return make_with(_EmptyExtraState, tempo_norm, tempo_norm.__name__.replace("Tempo", "TempoTE"))


def replace_linears(submodules: Any, tempo_config: TempoConfig, after_norms: tuple[str, ...]) -> dict[str, Any]:
    """Replacements for the linears of an attention's or MLP's submodules."""
    if not is_installed():
        return {}
    changes: dict[str, Any] = {}
    linear_proj = getattr(submodules, "linear_proj", None)
    if tempo_config.attention == "recompute" and _is_stock(linear_proj, "TERowParallelLinear"):
        changes["linear_proj"] = make_with(DropsInput, extension.TERowParallelLinear)
    keep = tempo_config.norm
    for name, slot in list_fields(submodules).items() if keep != "off" else ():
        if _is_stock(slot, _NORM_AND_LINEAR):
            runs_again = getattr(tempo_config, name, "off") == "recompute"
            stock = getattr(extension, _NORM_AND_LINEAR)
            changes[name] = make_split_norm(stock, extension.TEColumnParallelLinear, keep, runs_again)
        elif keep == "recompute" and name in after_norms and _is_stock(slot, "TEColumnParallelLinear"):
            changes[name] = make_with(DropsInput, extension.TEColumnParallelLinear)
    return changes


def is_norm_and_linear(slot: Any) -> bool:
    """Whether a slot holds a norm and a linear in one: stock's, or Tempo's norm in front of TE's linear."""
    module = find_class(slot)
    return _is_stock(slot, _NORM_AND_LINEAR) or (isinstance(module, type) and issubclass(module, SplitNorm))


def find_obstacles(layer_specs: Any, transformer_config: Any) -> Obstacles:
    """Why TE's modules in these layers make Tempo's operations impossible, because they do more with a linear's input
    than keep it, or useless."""
    if not any(map(has_transformer_engine, layer_specs)):
        return {}
    obstacles: dict[str, Refusal] = {}
    holders = [getattr(layer.submodules, name, None) for layer in layer_specs for name in _HOLDERS]
    attentions = (getattr(find_submodules(holder), "core_attention", None) for holder in holders)
    if any(_is_stock(attention, "TEDotProductAttention") for attention in attentions):
        why = "Transformer Engine's attention keeps no s*s tensor and no mask either"
        obstacles["attention"] = Refusal(why, is_for_auto=True)
    if any(_is_stock(holder, "TEFusedMLP") for holder in holders):
        why = "a layer's MLP is TEFusedMLP, which Transformer Engine's op fuser runs as one operation"
        refusal = Refusal(why, "leave use_transformer_engine_op_fuser off")
        obstacles |= dict.fromkeys(("activation", "linear_fc1"), refusal)
    if reason := find_reason(transformer_config, _HOLD_INPUTS):
        refusal = Refusal(reason, "leave it off")
        obstacles |= dict.fromkeys(("activation", "norm", "linear_fc1", "linear_qkv"), refusal)
    if reason := find_reason(transformer_config, _ASK_ATTENTION):
        obstacles["attention"] = Refusal(reason, "leave it off")
    return obstacles


def has_transformer_engine(layer: Any) -> bool:
    """Whether a layer's spec holds a module of TE, or Tempo's around one."""
    slots = [layer.submodules, *(find_submodules(getattr(layer.submodules, name, None)) for name in _HOLDERS)]
    values = [value for each in slots for value in list_fields(each).values()]
    names = ("TEDotProductAttention", "TENorm", "TEFusedMLP", *_LINEARS)
    return any(is_norm_and_linear(value) or _is_stock(value, *names) for value in values)


def describe_stock(slot: Any) -> str | None:
    """Which module of TE a slot holds, as the reason why it was left; None if it holds none."""
    if _is_stock(slot, "TEDotProductAttention"):
        return "Transformer Engine's attention, under a mask whose conventions are its own"
    if _is_stock(slot, _NORM_AND_LINEAR, "TEFusedMLP"):
        return "Transformer Engine's fused module"
    module = find_class(slot)
    is_te = getattr(module, "__module__", "").startswith((extension.__name__, "transformer_engine"))
    return "Transformer Engine's module" if is_te else None

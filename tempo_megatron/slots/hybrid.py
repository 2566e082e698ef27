"""Builds the stack of Megatron's HybridModel with a spec of its own for each layer of its pattern.

In a pattern such as `M*-M*E` every symbol is a layer. The stock stack has one spec for each kind of layer. Tempo's has
one for each layer, because dropout masks are a function of the layer, and values may be set for single layers.

Masks are numbered as in the GPT that the pattern describes: the n-th attention and the n-th MLP or mixture of experts
draw the masks of layer n of a GPTModel. So a GPT whose checkpoint is read as a HybridModel keeps its masks. Mamba
layers are counted by themselves and draw at a site of their own.

HybridStack does not fork Megatron's RNG tracker as TransformerBlock does. Tempo's masks need no fork: nothing is drawn
from a generator.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any, NamedTuple

from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from tempo_megatron.slots.block_slots import TempoBlockSubmodules
from tempo_megatron.slots.linear import name_as_stock
from tempo_megatron.slots.slot_content import find_submodules

# Symbol of a layer -> (its field in HybridStackSubmodules, the field of the layer by which it is counted).
_ATTENTION, _MLP, _MAMBA = "self_attention", "mlp", "mixer"
_KINDS = {
    "M": ("mamba_layer", _MAMBA),
    "G": ("gdn_layer", _ATTENTION),
    "*": ("attention_layer", _ATTENTION),
    "D": ("dsa_layer", _ATTENTION),
    "+": ("mla_layer", _ATTENTION),
    "-": ("mlp_layer", _MLP),
    "E": ("moe_layer", _MLP),
}


class PatternLayer(NamedTuple):
    """A layer of a pattern: the field of HybridStackSubmodules that says what it is, and its number in the keys of
    dropout masks, from 1."""

    spec: str
    mask_layer: int


def is_hybrid(spec: Any) -> bool:
    """Whether a spec is that of a HybridStack (megatron-core 0.18 and newer)."""
    module = sys.modules.get("megatron.core.models.hybrid.hybrid_block")
    return module is not None and isinstance(find_submodules(spec), module.HybridStackSubmodules)


def predicts_tokens(layer_pattern: str) -> bool:
    """Whether a pattern has layers of multi-token prediction."""
    return "/" in layer_pattern


def list_layers(layer_pattern: str) -> list[PatternLayer]:
    """The layers of a pattern, in order, over all pipeline stages; those of multi-token prediction are left out.

    Raises ValueError where the pattern has a symbol that is not one of Megatron's.
    """
    symbols = layer_pattern.partition("/")[0].replace("|", "")
    if unknown := sorted(set(symbols) - set(_KINDS)):
        raise ValueError(
            f"the layer pattern is {layer_pattern}, which has {' '.join(unknown)}; expected symbols of "
            f"{' '.join(_KINDS)}; leave Tempo off for other layers"
        )
    counts = dict.fromkeys((_ATTENTION, _MLP, _MAMBA), 0)
    layers = []
    for symbol in symbols:
        spec, counted = _KINDS[symbol]
        counts[counted] += 1
        layers.append(PatternLayer(spec, counts[counted]))
    return layers


def make_stack_spec(spec: ModuleSpec, block: TempoBlockSubmodules, layers: list[PatternLayer]) -> ModuleSpec:
    """`spec` of a HybridStack whose layers and final norm are those of `block`, one for each layer of the pattern.

    The submodules stay stock's: layers of multi-token prediction, which Megatron builds from them too, are left.
    """
    kinds = tuple(dict.fromkeys(layer.spec for layer in layers))
    return ModuleSpec(_make_stack_class(spec.module), {**spec.params, "block": block, "kinds": kinds}, spec.submodules)


class _LayerOfPattern:
    """Stands for the spec of a kind of layer, and builds the layer of its number by the spec that this one has."""

    def __new__(cls, *args: Any, layer_number: int, layer_specs: list[ModuleSpec], **kwargs: Any) -> Any:
        return build_module(layer_specs[layer_number - 1], *args, layer_number=layer_number, **kwargs)


@functools.cache
def _make_stack_class(stock: Any) -> Any:
    class TempoHybridStack(stock):
        """HybridStack with Tempo's modules; constructor, parameters and checkpoint keys are its own."""

        def __init__(
            self,
            config: Any,
            submodules: Any,
            *args: Any,
            block: TempoBlockSubmodules,
            kinds: tuple[str, ...],
            pp_layer_offset: int = 0,
            **kwargs: Any,
        ) -> None:
            layer = ModuleSpec(_LayerOfPattern, {"layer_specs": block.layer_specs})
            chosen = dataclasses.replace(submodules, **dict.fromkeys(kinds, layer))
            super().__init__(config, chosen, *args, pp_layer_offset=pp_layer_offset, **kwargs)
            if hasattr(self, "final_norm"):  # which the stock constructor does not take from a spec
                self.final_norm = build_module(
                    block.layer_norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
                )
            here = slice(pp_layer_offset, pp_layer_offset + len(self.layers))
            of_stage: Any = {name: (getattr(block, name) or [])[here] for name in ("layer_specs", "stock_layers")}
            self.submodules = dataclasses.replace(block, first_layer=pp_layer_offset, **of_stage)

    return name_as_stock(TempoHybridStack)

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
from typing import Any

from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots import transformer_engine as te
from tempo_megatron.slots.block_slots import TempoBlockSubmodules
from tempo_megatron.slots.choose import Obstacles, Refusal, choose
from tempo_megatron.slots.dropout_rng import Stack
from tempo_megatron.slots.layer_spec import fill_block
from tempo_megatron.slots.linear import name_as_stock
from tempo_megatron.slots.slot_content import find_class, find_submodules

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
# Stands in front of the layers of multi-token prediction.
_PREDICTION = "/"


def tempoize_hybrid(
    spec: ModuleSpec,
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig,
    layer_pattern: str | None,
    *,
    obstacles: Obstacles | None = None,
) -> ModuleSpec:
    """`spec` of a HybridStack with Tempo's modules in the layers of `layer_pattern`, and a final norm of Tempo's.

    Args:
        spec: such as Megatron's `hybrid_stack_spec`, which is not changed.
        transformer_config, tempo_config, obstacles: as of `tempoize`. `layers` are numbered over the pattern, where
            each symbol is a layer, as in checkpoint keys.
        layer_pattern: HybridModel's `hybrid_layer_pattern`, with pipeline stages and multi-token prediction.

    Returns:
        The spec for HybridModel. Its `params["block"]` is a TempoBlockSubmodules of all layers, for `report_on`. Layers
        of multi-token prediction stay stock.

    Raises ValueError as `tempoize`, and where there is no pattern or it has an unknown symbol.
    """
    # Of megatron-core 0.18 and newer.
    module = sys.modules.get("megatron.core.models.hybrid.hybrid_block")
    if module is None or not isinstance(find_submodules(spec), module.HybridStackSubmodules):
        raise ValueError(
            f"the spec is one of {getattr(find_class(spec), '__name__', spec)}; expected that of a HybridStack; give "
            "the specs of other models to tempoize"
        )
    if layer_pattern is None:
        raise ValueError(
            "the model has no hybrid_layer_pattern, by which layers and their dropout masks are numbered; expected "
            "one; write --hybrid-layer-pattern in place of the ratios"
        )
    layers = _list_layers(layer_pattern)
    kinds = tuple(dict.fromkeys(kind for kind, _ in layers))
    stock: list[Any] = [getattr(spec.submodules, kind) for kind, _ in layers]
    if "mla_layer" in kinds and getattr(transformer_config, "mla_down_proj_fusion", False):
        raise ValueError(
            "mla_down_proj_fusion is on, by which HybridStack changes the spec of layers with latent attention; "
            "expected it off; leave Tempo off, or the fusion"
        )
    found = {**te.find_obstacles(stock, transformer_config), **(obstacles or {})}
    if _PREDICTION in layer_pattern and transformer_config.hidden_dropout > 0:
        # The embedding, whose dropout is drawn once, is called once more for each depth of prediction.
        reason = f"the layer pattern is {layer_pattern}, whose multi-token prediction embeds tokens again"
        found["dropout"] = Refusal(f"{reason}, so they would have the same dropout masks")
    choices = choose(transformer_config, tempo_config, found)
    choices.written.check_layers("decoder", len(layers))
    # The stack's own norm, which no spec names. Without Transformer Engine no HybridStack can be built.
    block = TempoBlockSubmodules(layer_specs=stock, layer_norm=TENorm, stack=Stack.DECODER)
    made = fill_block(block, transformer_config, choices, [mask_layer for _, mask_layer in layers])
    # The submodules stay stock's: layers of multi-token prediction, which Megatron builds from them too, are left.
    return ModuleSpec(_make_stack_class(spec.module), {**spec.params, "block": made, "kinds": kinds}, spec.submodules)


def _list_layers(layer_pattern: str) -> list[tuple[str, int]]:
    """The layers of a pattern, in order, over all pipeline stages; those of multi-token prediction are left out. Of
    each its field in HybridStackSubmodules, and its number in the keys of dropout masks, from 1.

    Raises ValueError where the pattern has a symbol that is not one of Megatron's.
    """
    symbols = layer_pattern.partition(_PREDICTION)[0].replace("|", "")
    if unknown := sorted(set(symbols) - set(_KINDS)):
        raise ValueError(
            f"the layer pattern is {layer_pattern}, which has {' '.join(unknown)}; expected symbols of "
            f"{' '.join(_KINDS)}; leave Tempo off for other layers"
        )
    counts = dict.fromkeys((_ATTENTION, _MLP, _MAMBA), 0)
    layers = []
    for symbol in symbols:
        kind, counted = _KINDS[symbol]
        counts[counted] += 1
        layers.append((kind, counts[counted]))
    return layers


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

"""Puts Tempo's modules into Megatron's layer specs.

A spec is never changed: every function returns a new one. Modules that Tempo does not know stay (a user's own);
`tempo_megatron.slots.report.report_on` lists them.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset

from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import OPERATIONS, keeps_copies
from tempo_megatron.slots import transformer_engine as te
from tempo_megatron.slots.attention import (
    CAUSAL,
    LatentSelfAttention,
    TempoMLASelfAttention,
    TempoNormedSelfAttention,
    TempoRotarySelfAttention,
    recomputes_latent_projections,
)
from tempo_megatron.slots.block_slots import (
    ATTENTIONS,
    CLASSES,
    INNER_NORMS,
    TempoBlockSubmodules,
    TempoPredictionSubmodules,
    find_inner_layer,
    find_inner_name,
    list_slots,
)
from tempo_megatron.slots.choose import Choices, Obstacles, choose
from tempo_megatron.slots.dropout import tempo_bias_dropout_add
from tempo_megatron.slots.dropout_rng import Site, Stack
from tempo_megatron.slots.experts import TempoRoutedMoELayer, is_mixture, replace_experts
from tempo_megatron.slots.linear import TempoColumnParallelLinear, TempoRowParallelLinear
from tempo_megatron.slots.norm import NORMALIZATIONS, TorchNorm
from tempo_megatron.slots.slot_content import change_slot, find_class, find_submodules, is_there, list_fields

_NORM_SLOTS = OPERATIONS["norm"].slots
# Linears whose input is a norm's output that no other module reads.
_LINEARS_AFTER_NORMS = ("linear_qkv", "linear_q", "linear_fc1")
_LATENT_LINEARS_AFTER_NORMS = ("linear_q_up_proj", "linear_kv_up_proj")
_SITES = (Site.SELF_ATTENTION_OUTPUT, Site.CROSS_ATTENTION_OUTPUT, Site.MLP_OUTPUT, Site.MAMBA_OUTPUT)
_BDA_SITES = dict(zip(OPERATIONS["dropout"].slots, _SITES, strict=True))
# Megatron gives a process group to the MLP classes it knows, and warns in every layer about any other class. TempoMLP
# takes its group from `pg_collection`.
logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(
    lambda record: "Unknown MLP type" not in record.getMessage()
)


def tempo_block_spec(
    transformer_config: TransformerConfig, tempo_config: TempoConfig | Choices, *, vp_stage: int | None = None
) -> TempoBlockSubmodules:
    """The decoder block of a GPT: Megatron's local block spec with Tempo in the slots that `tempo_config` names.

    Give it to GPTModel as `transformer_layer_spec`. With `TempoConfig.off()` it is stock, except that TorchNorm
    replaces Megatron's wrapper around torch's norms, which refuses sequence parallelism. As in Megatron, the
    configuration decides which layers have experts, which leave out attention or MLP, and whether queries and keys have
    norms.

    Raises ValueError where a value that is not "auto" cannot be had; see `tempoize`.
    """
    variant = getattr(transformer_config, "experimental_attention_variant", None)
    if variant is not None:
        raise ValueError(
            f"experimental_attention_variant is {variant}; expected none, as Megatron has no local spec for it; "
            "give the spec that Megatron makes of it to tempoize"
        )
    if getattr(transformer_config, "heterogeneous_block_specs", False):
        spec = get_gpt_heterogeneous_layer_spec(transformer_config, use_te=False, vp_stage=vp_stage)
    else:
        spec = get_stock_block_spec(transformer_config, use_transformer_engine=False, vp_stage=vp_stage)
    made: TempoBlockSubmodules = tempoize(spec, transformer_config, tempo_config, vp_stage=vp_stage)
    return made


def get_stock_block_spec(config: Any, **others: Any) -> Any:
    """Megatron's decoder block of a GPT with the norms of `config`."""
    norms = {"normalization": config.normalization, "qk_l2_norm": getattr(config, "qk_l2_norm", False)}
    block = get_gpt_decoder_block_spec(config, **norms, **others)
    if getattr(config, "multi_latent_attention", False) and getattr(config, "q_lora_rank", 0) is None:
        # Without Transformer Engine it names a norm for the latent vector of q also where there is none, which
        # MLASelfAttention refuses from megatron-core 0.19 on.
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.q_layernorm = IdentityOp
    return block


def tempoize(
    spec: Any,
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig | Choices,
    *,
    vp_stage: int | None = None,
    stack: Stack | None = None,
    obstacles: Obstacles | None = None,
) -> Any:
    """`spec` with Tempo's modules in the slots that `tempo_config` names and that hold a module Tempo replaces.

    Args:
        spec: a layer spec, which is repeated for every layer of this pipeline rank, or a block's submodules; or those
            of multi-token prediction (GPTModel's mtp_block_spec), whose layers have the values that hold for all.
        transformer_config: Megatron's.
        tempo_config: the operations' values. "auto" becomes what `tempo_megatron.slots.choose.choose` says for the
            configuration and the layers' modules. `layers` are numbered over the whole model, as in checkpoint keys.
            Choices that were made already are taken as they are.
        vp_stage: this block's virtual pipeline stage, as GPTModel's argument of that name.
        stack: the stack whose dropout masks the layers draw, in a model that has two. By default a block with causal
            self attention or with cross attention is a decoder, and any other (BERT, T5's encoder) an encoder.
        obstacles: further reasons against operations.

    Returns:
        TransformerBlockSubmodules for GPTModel, BertModel or T5Model (a bare layer spec would get a stock final norm),
        or MultiTokenPredictionBlockSubmodules.
        `tempo_megatron.slots.report.report_on` lists what was replaced and left in it, and in a model built with it.

    Raises ValueError where `spec` is not a transformer's, where a value that is not "auto" cannot be had with
    `transformer_config`, or where `layers` names layers that the stack does not have.
    """
    prediction = spec.submodules if isinstance(spec, ModuleSpec) else spec
    if isinstance(prediction, MultiTokenPredictionBlockSubmodules):
        return _tempoize_prediction(prediction, transformer_config, tempo_config, obstacles or {})
    block = _make_block(spec, transformer_config, vp_stage)
    layer_specs = block.layer_specs or []
    found = {**te.find_obstacles(layer_specs, transformer_config), **(obstacles or {})}
    choices = choose(transformer_config, tempo_config, found)
    block.stack = _get_stack(layer_specs) if stack is None else stack
    block.first_layer = get_transformer_layer_offset(transformer_config, vp_stage)
    choices.written.check_layers(block.stack.name.lower(), transformer_config.num_layers)
    return fill_block(block, transformer_config, choices)


def fill_block(
    block: TempoBlockSubmodules,
    transformer_config: TransformerConfig,
    choices: Choices,
    mask_layers: list[int] | None = None,
) -> TempoBlockSubmodules:
    """`block`, whose modules are stock's, with Tempo's.

    mask_layers: the number of each layer in the keys of dropout masks, from 1, if that is not its number in the model.
    """
    stack, layer_specs = block.stack.name.lower(), block.layer_specs or []
    changes: dict[str, Any] = {
        "layer_specs": [
            tempoize_layer(
                layer,
                transformer_config,
                choices.config.for_layer(number, stack),
                number + 1 if mask_layers is None else mask_layers[number],
                block.stack,
                is_numbered=mask_layers is not None,
            )
            for number, layer in enumerate(layer_specs, block.first_layer)
        ],
        "layer_norm": _Values(transformer_config, choices.config).replace_norm(block.layer_norm),
        "stock_layers": block.stock_layers or layer_specs,
    }
    made = dataclasses.replace(block, choices=choices, **changes)
    _refuse_other_values(made, choices.config)
    return made


def _tempoize_prediction(
    spec: MultiTokenPredictionBlockSubmodules,
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig | Choices,
    obstacles: Obstacles,
) -> TempoPredictionSubmodules:
    """The spec of multi-token prediction with Tempo's norms, and with Tempo's modules in the layers inside.

    The norms before eh_proj keep their input: torch.cat copies their outputs, so that nothing else keeps these. The
    decoder's output is one of the inputs, which the loss head keeps anyway.
    """
    layers = spec.layer_specs or []
    inner_layers = [find_inner_layer(layer.submodules) for layer in layers]
    _make_block(TransformerBlockSubmodules(layer_specs=inner_layers), transformer_config, None)
    found = {**te.find_obstacles(inner_layers, transformer_config), **obstacles}
    choices = choose(transformer_config, tempo_config, found)
    config = dataclasses.replace(choices.config, layers={})
    values = _Values(transformer_config, config)
    copied = _Values(
        transformer_config, config if config.norm == "off" else dataclasses.replace(config, norm="recompute")
    )
    made = []
    for depth, (layer, inner) in enumerate(zip(layers, inner_layers, strict=True), 1):
        slots = layer.submodules
        changes = {
            # The number only tells its depth to those who read it: masks are drawn for the depth that is counted.
            find_inner_name(slots): tempoize_layer(inner, transformer_config, config, depth, Stack.PREDICTION),
            "enorm": copied.replace_norm(slots.enorm),
            "hnorm": copied.replace_norm(slots.hnorm),
            "layer_norm": values.replace_norm(slots.layer_norm),
        }
        made.append(change_slot(layer, **changes))
    return TempoPredictionSubmodules(layer_specs=made, choices=choices)


def _refuse_other_values(block: TempoBlockSubmodules, tempo_config: TempoConfig) -> None:
    """Raise ValueError where the given spec already held a module of Tempo's that belongs to another value than
    `tempo_config` has. Only Megatron's modules are replaced."""
    for slot in list_slots(block):
        values = slot.get_values(tempo_config)
        asked = getattr(values, slot.operation)
        # If the first linear runs again, any activation has its input at hand.
        is_free = slot.operation == "activation" and asked != "off" and ("linear_fc1", values.linear_fc1) in CLASSES
        if slot.value not in ("off", asked) and not is_free:
            raise ValueError(
                f"{slot.name} of {slot.where} holds {find_class(slot.content).__name__} already, by "
                f'tempo.{slot.operation} "{slot.value}", and now "{asked}" is asked for; give a spec without Tempo\'s '
                f'modules (leave --spec out), or set tempo.{slot.operation} to "{slot.value}"'
            )


def _make_block(spec: Any, transformer_config: TransformerConfig, vp_stage: int | None) -> TempoBlockSubmodules:
    block = spec.submodules if isinstance(spec, ModuleSpec) else spec
    is_block = isinstance(block, TransformerBlockSubmodules)
    layer_specs = (block.layer_specs or []) if is_block else [spec]
    for layer in layer_specs:
        if not isinstance(getattr(layer, "submodules", None), TransformerLayerSubmodules):
            found = layer.module if isinstance(layer, ModuleSpec) else type(layer)
            raise ValueError(
                f"the spec is one of {getattr(found, '__name__', found)}; expected a spec of TransformerLayer, or "
                "TransformerBlockSubmodules of such layers, as GPTModel, BertModel and T5Model take, or "
                "tempoize_hybrid for the spec of a HybridModel; leave Tempo off for other layers"
            )
        if "tempo_config" in getattr(layer, "params", {}):
            raise ValueError(
                f"the spec is one of {layer.module.__name__}, whose layers choose Tempo's modules by themselves; "
                "expected a spec whose slots say what is built; leave that spec (--spec) out, or Tempo's other "
                "switches (--use-tempo)"
            )
    if isinstance(block, TempoBlockSubmodules):
        return copy.copy(block)
    submodules = layer_specs[0].submodules if layer_specs else None
    if is_block:
        return TempoBlockSubmodules(layer_specs, block.layer_norm, submodules)
    num_layers = get_num_layers_to_build(transformer_config, vp_stage)
    return TempoBlockSubmodules([spec] * num_layers, transformer_block.LayerNormImpl, submodules)


def _get_stack(layer_specs: list[ModuleSpec]) -> Stack:
    submodules: list[Any] = [layer.submodules for layer in layer_specs]
    masks = {getattr(slots.self_attention, "params", {}).get("attn_mask_type") for slots in submodules} - {None}
    has_cross_attention = any(is_there(slots.cross_attention) for slots in submodules)
    # Layers without attention, or without a mask type, may belong to any block. A block of these alone is a decoder.
    is_decoder = has_cross_attention or not masks or bool(masks & set(CAUSAL))
    return Stack.DECODER if is_decoder else Stack.ENCODER


def tempoize_layer(
    layer: ModuleSpec,
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig,
    layer_number: int,
    stack: Stack,
    *,
    is_numbered: bool = False,
) -> ModuleSpec:
    """The spec of one layer with Tempo's modules by the values of `tempo_config`, of which none is "auto".

    layer_number: from 1; with the stack it decides which dropout masks are drawn.
    is_numbered: whether attention is told this number too, because Megatron will give it another.
    """
    params = {"stack": stack, "mask_layer": layer_number} if is_numbered else {"stack": stack}
    values = _Values(transformer_config, tempo_config)
    slots: Any = layer.submodules
    fields = list_fields(slots)
    changes: dict[str, Any] = {name: values.replace_norm(fields[name]) for name in _NORM_SLOTS if name in fields}
    changes |= {name: values.replace_attention(fields[name], params) for name in ATTENTIONS if name in fields}
    if tempo_config.dropout == "recompute":
        for name, site in _BDA_SITES.items():
            if fields.get(name) is get_bias_dropout_add:
                changes[name] = tempo_bias_dropout_add(transformer_config, layer_number, site, stack)
    if "mlp" in fields:
        changes["mlp"] = values.replace_mlp(slots.mlp)
    if linears := te.replace_linears(find_submodules(fields.get("mixer")), tempo_config, ()):
        changes["mixer"] = change_slot(slots.mixer, **linears)
    return change_slot(layer, **changes)


@dataclasses.dataclass(frozen=True)
class _Values:
    """What becomes of the slots of a layer, or of a block's norm, by these values."""

    config: TransformerConfig
    tempo: TempoConfig

    def replace_norm(self, slot: Any) -> Any:
        stock = (FusedLayerNorm, WrappedTorchNorm, transformer_block.LayerNormImpl)
        if slot not in stock and not te.is_residual_norm(slot, self.config):
            return slot
        if norms := CLASSES.get(("norm", self.tempo.norm)):
            return te.replace_norm(slot, norms[0])
        return TorchNorm if slot is WrappedTorchNorm and self.config.normalization in NORMALIZATIONS else slot

    def replace_linears(self, submodules: Any, after_norms: tuple[str, ...] = _LINEARS_AFTER_NORMS) -> dict[str, Any]:
        """Replacements for the linears whose input a norm or attention can recompute: Tempo's linears drop it after
        use. Transformer Engine's fused linears contain a norm, and are replaced unless `norm` is "off".

        after_norms: the linears whose input is a norm's output that nothing else reads.
        """
        changes = te.replace_linears(submodules, self.tempo, after_norms)
        if self.tempo.attention == "recompute" and getattr(submodules, "linear_proj", None) is RowParallelLinear:
            changes["linear_proj"] = TempoRowParallelLinear
        if self.tempo.norm == "recompute":
            names = [name for name in after_norms if getattr(submodules, name, None) is ColumnParallelLinear]
            changes |= dict.fromkeys(names, TempoColumnParallelLinear)
        return changes

    def replace_attention(self, slot: Any, params: dict[str, Any]) -> Any:
        """params: further arguments of Tempo's core attention."""
        module, submodules = find_class(slot), find_submodules(slot)
        is_latent = isinstance(module, type) and issubclass(module, MultiLatentAttention)
        is_known = module in (MLASelfAttention, LatentSelfAttention)
        if is_latent and (not is_known or getattr(self.config, "cache_mla_latents", False)):
            # Inference with cached latents takes norms and projections apart, and other classes may do as they like.
            return slot
        after_norms: tuple[str, ...] = _LINEARS_AFTER_NORMS
        if is_latent:
            module = TempoMLASelfAttention if self.tempo.norm == "recompute" else LatentSelfAttention
            # Megatron's recomputation of the up projections begins with the norms' outputs, and so keeps them.
            after_norms = () if recomputes_latent_projections(self.config) else _LATENT_LINEARS_AFTER_NORMS
        fields = list_fields(submodules)
        norms = {name: self.replace_norm(fields[name]) for name in INNER_NORMS if name in fields}
        changes = self.replace_linears(submodules, after_norms) | norms
        is_plain = module in (SelfAttention, TempoRotarySelfAttention)
        drops_projection = is_plain and self.tempo.linear_qkv == "recompute"
        core = fields.get("core_attention")
        is_te = te.is_attention(core, getattr(slot, "params", {}))
        has_tempo = self.tempo.attention != "off" and (core is DotProductAttention or is_te)
        if has_tempo:
            # The norms of latent attention are in front of the projections.
            keeps = () if is_latent else [getattr(n, "keep", "recompute") for n in norms.values() if is_there(n)]
            pins = {"has_pinned_projection": drops_projection or "recompute" in keeps}
            changes["core_attention"] = ModuleSpec(CLASSES["attention", self.tempo.attention][is_te], params | pins)
        elif drops_projection:
            _refuse_kept_operands(core, self.config)
        if drops_projection:
            module = CLASSES["linear_qkv", "recompute"][0]
        elif is_plain and has_tempo:
            are_recomputed = any(getattr(norm, "keep", "") == "recompute" for norm in norms.values())
            module = TempoNormedSelfAttention if are_recomputed else TempoRotarySelfAttention
        return slot if module is find_class(slot) and not changes else change_slot(slot, module, **changes)

    def replace_mlp(self, slot: Any) -> Any:
        stock = find_class(slot)
        if slot is stock:  # a bare class, whose linears nobody names
            return slot
        if is_mixture(slot):
            return self._replace_mixture(slot)
        if stock is not MLP:
            return slot
        module = CLASSES.get(("activation", self.tempo.activation), (stock,))[0]
        if linears := CLASSES.get(("linear_fc1", self.tempo.linear_fc1)):
            # The activation's input is at hand here, so its derivative is exact even with activation "inplace".
            module = linears[-1] if self.tempo.activation == "off" else linears[0]
        return change_slot(slot, module, **self.replace_linears(find_submodules(slot)))

    def _replace_mixture(self, slot: Any) -> Any:
        keeps_input, drops_input = self.tempo.activation == "recompute", self.tempo.norm == "recompute"
        submodules = find_submodules(slot)
        changes = replace_experts(submodules, self.config, keeps_input=keeps_input, drops_input=drops_input)
        shared = changes.get("shared_experts", getattr(submodules, "shared_experts", None))
        if shared is not None and dataclasses.is_dataclass(find_submodules(shared)):
            changes["shared_experts"] = change_slot(shared, **self.replace_linears(find_submodules(shared)))
        module = find_class(slot)
        if module is MoELayer and (mixtures := CLASSES.get(("moe_permute", self.tempo.moe_permute))):
            module = mixtures[0]
        elif module is MoELayer and (keeps_input or drops_input):
            module = TempoRoutedMoELayer
        return change_slot(slot, module, **changes)


def _refuse_kept_operands(core_attention: Any, config: TransformerConfig) -> None:
    """Raise ValueError where a core attention that is not Tempo's keeps copies of q, k and v, so that running the
    projection again would save nothing. Core attention that Megatron recomputes keeps no copies."""
    is_recomputed = config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ())
    is_grouped = config.num_query_groups not in (None, config.num_attention_heads)
    is_megatrons = core_attention is DotProductAttention
    if not is_recomputed and keeps_copies(is_megatrons=is_megatrons, is_grouped=is_grouped):
        name = getattr(find_class(core_attention), "__name__", core_attention)
        raise ValueError(
            f'tempo.linear_qkv is "recompute" in a layer whose core attention is {name}, which may keep copies of q, k '
            "and v; expected Tempo's attention, or one that Megatron recomputes (core_attn); set tempo.attention to "
            '"flash", or tempo.linear_qkv to "off"'
        )

"""Puts Tempo's modules into Megatron's layer specs.

A spec is never changed: every function returns a new one. Modules that Tempo does not know stay (latent attention,
multi-token prediction, a user's own); `tempo_megatron.slots.report.report_on` lists them.
"""

from __future__ import annotations

import dataclasses
import functools
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
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset

from tempo_kernels import KEEPS
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.slots import transformer_engine as te
from tempo_megatron.slots.attention import (
    TempoDotProductAttention,
    TempoNormedSelfAttention,
    TempoRecomputeDotProductAttention,
    TempoSelfAttention,
    TempoSoftmaxDotProductAttention,
)
from tempo_megatron.slots.block_slots import ATTENTIONS, TempoBlockSubmodules, list_slots
from tempo_megatron.slots.choose import Choices, Obstacles, choose
from tempo_megatron.slots.dropout import tempo_bias_dropout_add
from tempo_megatron.slots.dropout_rng import Site, Stack
from tempo_megatron.slots.experts import TempoMoELayer, is_mixture, replace_experts
from tempo_megatron.slots.linear import TempoColumnParallelLinear, TempoRowParallelLinear
from tempo_megatron.slots.mlp import LinearRecomputeMLP, TempoLinearRecomputeMLP, TempoMLP, TempoRecomputeMLP
from tempo_megatron.slots.norm import (
    TempoLayerNorm,
    TempoRecomputeLayerNorm,
    TempoRecomputeRMSNorm,
    TempoRMSNorm,
    TorchLayerNorm,
    TorchRMSNorm,
)
from tempo_megatron.slots.slot_content import find_class, find_submodules, is_there, put_submodules

_EXPECTED_SPEC = (
    "expected a spec of TransformerLayer, or TransformerBlockSubmodules of such layers, as GPTModel, BertModel and "
    "T5Model take; leave Tempo off for other layers"
)
_NORM_SLOTS = OPERATIONS["norm"].slots
_QUERY_KEY_NORMS = ("q_layernorm", "k_layernorm")
_NORMS: dict[Any, Any] = {
    (norm.normalization, norm.keep): norm
    for norm in (TempoLayerNorm, TempoRecomputeLayerNorm, TempoRMSNorm, TempoRecomputeRMSNorm)
}
_ATTENTIONS = {
    attention.value: attention
    for attention in (TempoDotProductAttention, TempoSoftmaxDotProductAttention, TempoRecomputeDotProductAttention)
}
_MLPS = {mlp.keep: mlp for mlp in (TempoMLP, TempoRecomputeMLP)}
# Linears whose input is a norm's output that no other module reads.
_LINEARS_AFTER_NORMS = ("linear_qkv", "linear_q", "linear_fc1")
_BDA_SITES = dict(
    zip(
        OPERATIONS["dropout"].slots,
        (Site.SELF_ATTENTION_OUTPUT, Site.CROSS_ATTENTION_OUTPUT, Site.MLP_OUTPUT),
        strict=True,
    )
)


class _DropUnknownMLP(logging.Filter):
    """Drops a warning: Megatron gives a process group to the MLP classes it knows, and warns in every layer about any
    other class. TempoMLP takes its group from `pg_collection`."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Unknown MLP type" not in record.getMessage()


logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(_DropUnknownMLP())


def tempo_block_spec(
    transformer_config: TransformerConfig, tempo_config: TempoConfig | Choices, *, vp_stage: int | None = None
) -> TempoBlockSubmodules:
    """The decoder block of a GPT: Megatron's local block spec with Tempo in the slots that `tempo_config` names.

    Give it to GPTModel as `transformer_layer_spec`. With `TempoConfig.off()` it is stock, except that TorchLayerNorm
    replaces Megatron's wrapper around torch's LayerNorm, which refuses sequence parallelism. As in Megatron, the
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
    config: Any = transformer_config
    if getattr(config, "heterogeneous_block_specs", False):
        spec = get_gpt_heterogeneous_layer_spec(config, use_te=False, vp_stage=vp_stage)
    else:
        norms = {"normalization": config.normalization, "qk_l2_norm": getattr(config, "qk_l2_norm", False)}
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage, **norms)
    return tempoize(spec, transformer_config, tempo_config, vp_stage=vp_stage)


def tempoize(
    spec: ModuleSpec | TransformerBlockSubmodules,
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig | Choices,
    *,
    vp_stage: int | None = None,
    stack: Stack | None = None,
    obstacles: Obstacles | None = None,
) -> TempoBlockSubmodules:
    """`spec` with Tempo's modules in the slots that `tempo_config` names and that hold a module Tempo replaces.

    Args:
        spec: a layer spec, which is repeated for every layer of this pipeline rank, or a block's submodules.
        transformer_config: Megatron's.
        tempo_config: the operations' values. "auto" becomes what `tempo_megatron.slots.choose.choose` says for the
            configuration and the layers' modules. `layers` are numbered over the whole model, as in checkpoint keys.
            Choices that were made already are taken as they are.
        vp_stage: this block's virtual pipeline stage, as GPTModel's argument of that name.
        stack: the stack whose dropout masks the layers draw, in a model that has two. By default a block with causal
            self attention or with cross attention is a decoder, and any other (BERT, T5's encoder) an encoder.
        obstacles: further reasons against operations.

    Returns:
        TransformerBlockSubmodules for GPTModel, BertModel or T5Model (a bare layer spec would get a stock final norm).
        `tempo_megatron.slots.report.report_on` lists what was replaced and left in it, and in a model built with it.

    Raises ValueError where `spec` is not a transformer's, where a value that is not "auto" cannot be had with
    `transformer_config`, or where `layers` names layers that the stack does not have.
    """
    block = _make_block(spec, transformer_config, vp_stage)
    layer_specs = block.layer_specs or []
    if isinstance(tempo_config, Choices):
        choices = tempo_config
    else:
        found = {**te.find_obstacles(layer_specs, transformer_config), **(obstacles or {})}
        choices = choose(transformer_config, tempo_config, found)
    stack = _find_stack(layer_specs) if stack is None else stack
    stack_name, first_layer = stack.name.lower(), get_transformer_layer_offset(transformer_config, vp_stage)
    choices.written.check_layers(stack_name, transformer_config.num_layers)
    made = TempoBlockSubmodules(
        layer_specs=[
            _tempoize_layer(layer, transformer_config, choices.config.for_layer(number, stack_name), number + 1, stack)
            for number, layer in enumerate(layer_specs, first_layer)
        ],
        layer_norm=_replace_norm(block.layer_norm, transformer_config, choices.config),
        submodules=block.submodules,
        choices=choices,
        stack=stack,
        first_layer=first_layer,
    )
    _refuse_other_values(made, choices.config)
    return made


def _refuse_other_values(block: TempoBlockSubmodules, tempo_config: TempoConfig) -> None:
    """Raise ValueError where the given spec already held a module of Tempo's that belongs to another value than
    `tempo_config` has. Only Megatron's modules are replaced."""
    stack = block.stack.name.lower()
    for slot in list_slots(block):
        layer = None if slot.layer is None else block.first_layer + slot.layer
        values = tempo_config if layer is None else tempo_config.for_layer(layer, stack)
        asked = getattr(values, slot.operation)
        # If the first linear runs again, any activation has its input at hand.
        is_free = slot.operation == "activation" and asked != "off" and values.linear_fc1 == "recompute"
        if slot.value not in ("off", asked) and not is_free:
            where = stack if layer is None else f"{stack}.layers.{layer}"
            raise ValueError(
                f"{slot.name} of {where} holds {find_class(slot.content).__name__} already, by tempo.{slot.operation} "
                f'"{slot.value}", and now "{asked}" is asked for; give a spec without Tempo\'s modules (leave --spec '
                f'out), or set tempo.{slot.operation} to "{slot.value}"'
            )


def _make_block(spec: Any, transformer_config: TransformerConfig, vp_stage: int | None) -> TempoBlockSubmodules:
    block = spec.submodules if isinstance(spec, ModuleSpec) else spec
    is_block = isinstance(block, TransformerBlockSubmodules)
    layer_specs = (block.layer_specs or []) if is_block else [spec]
    for layer in layer_specs:
        if not isinstance(getattr(layer, "submodules", None), TransformerLayerSubmodules):
            found = layer.module if isinstance(layer, ModuleSpec) else type(layer)
            raise ValueError(f"the spec is one of {getattr(found, '__name__', found)}; {_EXPECTED_SPEC}")
        if "tempo_config" in getattr(layer, "params", {}):
            raise ValueError(
                f"the spec is one of {layer.module.__name__}, whose layers choose Tempo's modules by themselves; "
                "expected a spec whose slots say what is built; leave that spec (--spec) out, or Tempo's other "
                "switches (--use-tempo)"
            )
    if isinstance(block, TempoBlockSubmodules):
        return block
    submodules = layer_specs[0].submodules if layer_specs else None
    if is_block:
        return TempoBlockSubmodules(layer_specs, block.layer_norm, submodules)
    num_layers = get_num_layers_to_build(transformer_config, vp_stage)
    return TempoBlockSubmodules([spec] * num_layers, transformer_block.LayerNormImpl, submodules)


def _find_stack(layer_specs: list[ModuleSpec]) -> Stack:
    masks = set()
    for layer in layer_specs:
        slots: Any = layer.submodules
        if is_there(slots.cross_attention):
            return Stack.DECODER
        masks.add(getattr(slots.self_attention, "params", {}).get("attn_mask_type"))
    # Layers without attention, or without a mask type, may belong to any block. A block of these alone is a decoder.
    masks.discard(None)
    is_causal = bool(masks & {AttnMaskType.causal, AttnMaskType.padding_causal})
    return Stack.ENCODER if masks and not is_causal else Stack.DECODER


def _tempoize_layer(
    layer: ModuleSpec,
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig,
    layer_number: int,
    stack: Stack,
) -> ModuleSpec:
    changes: dict[str, Any] = {}
    slots: Any = layer.submodules
    for name in _NORM_SLOTS:
        changes[name] = _replace_norm(getattr(slots, name), transformer_config, tempo_config)
    for name in ATTENTIONS:
        changes[name] = _replace_attention(getattr(slots, name), transformer_config, tempo_config, stack)
    if tempo_config.dropout == "recompute":
        for name, site in _BDA_SITES.items():
            if getattr(slots, name) is get_bias_dropout_add:
                changes[name] = tempo_bias_dropout_add(transformer_config, layer_number, site, stack)
    changes["mlp"] = _replace_mlp(slots.mlp, transformer_config, tempo_config)
    return dataclasses.replace(layer, submodules=dataclasses.replace(slots, **changes))


def _replace_norm(slot: Any, transformer_config: TransformerConfig, tempo_config: TempoConfig) -> Any:
    stock = (FusedLayerNorm, WrappedTorchNorm, transformer_block.LayerNormImpl)
    if slot not in stock and not te.is_residual_norm(slot, transformer_config):
        return slot
    tempo_norm = te.replace_norm(slot, _NORMS.get((transformer_config.normalization, KEEPS.get(tempo_config.norm))))
    if tempo_norm is not None or slot is not WrappedTorchNorm:
        return tempo_norm or slot
    return {"LayerNorm": TorchLayerNorm, "RMSNorm": TorchRMSNorm}.get(transformer_config.normalization, slot)


def _replace_linears(submodules: Any, tempo_config: TempoConfig) -> dict[str, Any]:
    """Replacements for the linears whose input a norm or attention can recompute: Tempo's linears drop it after use.

    Transformer Engine's fused linears contain a norm, and are replaced unless `norm` is "off"."""
    changes = te.replace_linears(submodules, tempo_config, _LINEARS_AFTER_NORMS)
    if tempo_config.attention == "recompute" and getattr(submodules, "linear_proj", None) is RowParallelLinear:
        changes["linear_proj"] = TempoRowParallelLinear
    if tempo_config.norm == "recompute":
        names = [name for name in _LINEARS_AFTER_NORMS if getattr(submodules, name, None) is ColumnParallelLinear]
        changes |= dict.fromkeys(names, TempoColumnParallelLinear)
    return changes


def _replace_attention(
    slot: Any, transformer_config: TransformerConfig, tempo_config: TempoConfig, stack: Stack
) -> Any:
    module, submodules = find_class(slot), find_submodules(slot)
    if isinstance(module, type) and issubclass(module, MultiLatentAttention):
        return slot
    changes = _replace_linears(submodules, tempo_config)
    drops_projection = module is SelfAttention and tempo_config.linear_qkv == "recompute"
    for name in _QUERY_KEY_NORMS:
        if hasattr(submodules, name):
            changes[name] = _replace_norm(getattr(submodules, name), transformer_config, tempo_config)
    stock_attention = getattr(submodules, "core_attention", None)
    is_te = te.is_attention(stock_attention, getattr(slot, "params", {}))
    if tempo_config.attention != "off" and (stock_attention is DotProductAttention or is_te):
        norms = [norm for name in _QUERY_KEY_NORMS if is_there(norm := changes.get(name))]
        pins = drops_projection or any(getattr(norm, "keep", "input") == "input" for norm in norms)
        core_attention = (te.ATTENTIONS if is_te else _ATTENTIONS)[tempo_config.attention]
        changes["core_attention"] = ModuleSpec(core_attention, {"stack": stack, "has_pinned_projection": pins})
    if drops_projection:
        _refuse_kept_operands(stock_attention, transformer_config, "core_attention" in changes)
        slot = dataclasses.replace(slot, module=TempoSelfAttention)
    elif module is SelfAttention and "core_attention" in changes and _recomputes_norms(changes):
        slot = dataclasses.replace(slot, module=TempoNormedSelfAttention)
    return dataclasses.replace(slot, submodules=dataclasses.replace(submodules, **changes)) if changes else slot


def _recomputes_norms(changes: dict[str, Any]) -> bool:
    """Whether queries and keys have norms that keep their input."""
    norms = (changes.get(name) for name in _QUERY_KEY_NORMS)
    return any(getattr(norm, "keep", "") == "input" for norm in norms)


def keeps_copies(*, is_megatrons: bool, is_grouped: bool) -> bool:
    """Whether stock core attention may keep copies of q, k and v. Megatron's own does if keys and values are grouped,
    because it repeats them; nothing is known about other classes."""
    return is_grouped or not is_megatrons


def _refuse_kept_operands(core_attention: Any, transformer_config: TransformerConfig, is_tempo: bool) -> None:
    """Raise ValueError where core attention keeps copies of q, k and v, so that running the projection again would save
    nothing. Core attention that Megatron recomputes keeps no copies."""
    config = transformer_config
    is_recomputed = config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ())
    is_grouped = config.num_query_groups not in (None, config.num_attention_heads)
    is_megatrons = core_attention is DotProductAttention
    if is_tempo or is_recomputed or not keeps_copies(is_megatrons=is_megatrons, is_grouped=is_grouped):
        return
    name = getattr(find_class(core_attention), "__name__", core_attention)
    raise ValueError(
        f'tempo.linear_qkv is "recompute" in a layer whose core attention is {name}, which may keep copies of q, k and '
        "v; expected Tempo's attention, or one that Megatron recomputes (core_attn); set tempo.attention to "
        '"flash", or tempo.linear_qkv to "off"'
    )


def _replace_mlp(slot: Any, transformer_config: TransformerConfig, tempo_config: TempoConfig) -> Any:
    stock = find_class(slot)
    if slot is stock:  # a bare class, whose linears nobody names
        return slot
    if is_mixture(slot):
        submodules = replace_experts(
            find_submodules(slot),
            transformer_config,
            keeps_input=tempo_config.activation == "recompute",
            drops_input=tempo_config.norm == "recompute",
        )
        shared = getattr(submodules, "shared_experts", None)
        if shared is not None and dataclasses.is_dataclass(find_submodules(shared)):
            linears = dataclasses.replace(
                find_submodules(shared), **_replace_linears(find_submodules(shared), tempo_config)
            )
            submodules = dataclasses.replace(
                submodules, shared_experts=put_submodules(shared, find_class(shared), linears)
            )
        module = TempoMoELayer if stock is MoELayer and tempo_config.moe_permute == "recompute" else stock
        return put_submodules(slot, module, submodules)
    module = te.replace_mlp_class(stock, tempo_config)
    if stock is MLP and tempo_config.linear_fc1 == "recompute":
        # The activation's input is at hand here, so its derivative is exact even with activation "inplace".
        module = LinearRecomputeMLP if tempo_config.activation == "off" else TempoLinearRecomputeMLP
    elif stock is MLP:
        module = _MLPS.get(KEEPS.get(tempo_config.activation, ""), MLP)
    if module is None:
        return slot
    if isinstance(slot, functools.partial):
        keywords = dict(slot.keywords)
        if "submodules" in keywords:
            submodules = keywords["submodules"]
            keywords["submodules"] = dataclasses.replace(submodules, **_replace_linears(submodules, tempo_config))
        build = module if slot.func is stock else getattr(module, slot.func.__name__)
        return functools.partial(build, *slot.args, **keywords)
    submodules = dataclasses.replace(slot.submodules, **_replace_linears(slot.submodules, tempo_config))
    return dataclasses.replace(slot, module=module, submodules=submodules)

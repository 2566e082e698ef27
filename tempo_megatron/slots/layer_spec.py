"""Tempo's modules in Megatron's layer specs.

A spec is never changed: every function returns a new one and leaves alone what it does not know
(Transformer Engine's fused modules, mixtures of experts, latent attention).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from tempo_megatron.config import TempoConfig
from tempo_megatron.slots.attention import (
    TempoDotProductAttention,
    TempoSoftmaxDotProductAttention,
    refuse_attention,
)
from tempo_megatron.slots.bias_dropout_add import TempoEmbeddingDropout, tempo_bias_dropout_add
from tempo_megatron.slots.dropout_rng import Site
from tempo_megatron.slots.linear import TempoColumnParallelLinear
from tempo_megatron.slots.mlp import TempoMLP, TempoRecomputeMLP, refuse_activation
from tempo_megatron.slots.norm import (
    TempoLayerNorm,
    TempoRecomputeLayerNorm,
    TempoRecomputeRMSNorm,
    TempoRMSNorm,
    TorchLayerNorm,
    TorchRMSNorm,
)

_NORM_SLOTS = ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm")
_NORMS = {
    ("LayerNorm", "inplace"): TempoLayerNorm,
    ("LayerNorm", "recompute"): TempoRecomputeLayerNorm,
    ("RMSNorm", "inplace"): TempoRMSNorm,
    ("RMSNorm", "recompute"): TempoRecomputeRMSNorm,
}
_ATTENTIONS = {
    "off": DotProductAttention,
    "flash": TempoDotProductAttention,
    "softmax": TempoSoftmaxDotProductAttention,
}
# Linears that nothing but a norm feeds, and that alone read what it gives.
_LINEARS_AFTER_NORMS = ("linear_qkv", "linear_q", "linear_fc1")
_BDA_SITES = {
    "self_attn_bda": Site.SELF_ATTENTION_OUTPUT,
    "cross_attn_bda": Site.CROSS_ATTENTION_OUTPUT,
    "mlp_bda": Site.MLP_OUTPUT,
}


class _DropUnknownMLP(logging.Filter):
    """Megatron warns once a layer that it gives an MLP it does not know no process group; TempoMLP finds its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Unknown MLP type" not in record.getMessage()


logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(_DropUnknownMLP())


def tempo_block_spec(
    transformer_config: TransformerConfig, tempo_config: TempoConfig, *, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The decoder block of a GPT: Megatron's local layer spec with Tempo in the slots that `tempo_config` names.

    Give it to GPTModel as `transformer_layer_spec`. With `TempoConfig.off()` it is stock, except that torch's
    LayerNorm honours sequence parallelism where Megatron would fall back on its wrapper that refuses it.

    Raises ValueError where the configuration asks for what an operation cannot do; see `tempoize`.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=transformer_config.num_moe_experts,
        moe_grouped_gemm=transformer_config.moe_grouped_gemm,
        qk_layernorm=transformer_config.qk_layernorm,
        multi_latent_attention=transformer_config.multi_latent_attention,
        normalization=transformer_config.normalization,
    )
    return tempoize(spec, transformer_config, tempo_config, vp_stage=vp_stage)


def tempoize(
    spec: ModuleSpec | TransformerBlockSubmodules,
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig,
    *,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """`spec` with Tempo's modules in the slots that `tempo_config` names and that hold a module Tempo replaces.

    Args:
        spec: a layer spec, which is repeated for every layer of this pipeline rank, or a block's submodules.
        transformer_config: Megatron's.
        tempo_config: which operations.
        vp_stage: this block's virtual pipeline stage, as GPTModel's argument of that name.

    Returns:
        TransformerBlockSubmodules; hand it to the model (a bare layer spec would get a stock final norm).

    Raises ValueError where an operation that is switched on cannot do what `transformer_config` asks for.
    """
    check_against(transformer_config, tempo_config)
    if isinstance(spec, TransformerBlockSubmodules):
        layer_specs, final_norm = spec.layer_specs, spec.layer_norm
    else:
        layer_specs = [spec] * get_num_layers_to_build(transformer_config, vp_stage)
        final_norm = transformer_block.LayerNormImpl
    offset = get_transformer_layer_offset(transformer_config, vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[
            _tempoize_layer(layer, transformer_config, tempo_config, offset + index + 1)
            for index, layer in enumerate(layer_specs)
        ],
        layer_norm=_norm(final_norm, transformer_config, tempo_config),
    )


def tempoize_embedding(model: Any, tempo_config: TempoConfig) -> None:
    """Replace the dropout of a built model's embedding by the layout-free one; no spec names that module."""
    embedding = getattr(model, "embedding", None)
    if embedding is not None and tempo_config.dropout == "recompute":
        embedding.embedding_dropout = TempoEmbeddingDropout(embedding.embedding_dropout.p, embedding.config)


def check_against(transformer_config: TransformerConfig, tempo_config: TempoConfig) -> None:
    """Raise ValueError where an operation that is switched on cannot do what `transformer_config` asks for."""
    if tempo_config.is_off:
        return
    if transformer_config.fp8 or getattr(transformer_config, "fp4", None):
        raise ValueError(
            "fp8 or fp4 is on, whose linears keep quantised copies, so that keeping outputs saves nothing; "
            "leave Tempo off"
        )
    if getattr(transformer_config, "enable_autocast", False):
        raise ValueError(
            "autocast is on, under which linears keep cast copies, so that keeping outputs saves nothing; "
            "use bf16 or fp16 parameters"
        )
    if tempo_config.gelu != "off":
        refuse_activation(transformer_config, tempo_config.gelu)
    if tempo_config.norm != "off":
        _refuse_norm(transformer_config, tempo_config.norm)
    if tempo_config.attention != "off":
        refuse_attention(transformer_config)


def _refuse_norm(transformer_config: TransformerConfig, choice: str) -> None:
    if (transformer_config.normalization, choice) not in _NORMS:
        raise ValueError(
            f"normalization is {transformer_config.normalization}; LayerNorm or RMSNorm is wanted; "
            'set tempo.norm to "off"'
        )
    if choice == "recompute" and transformer_config.apply_residual_connection_post_layernorm:
        raise ValueError(
            "apply_residual_connection_post_layernorm is on, which reads a norm's output once more after the linear "
            'that follows it; set tempo.norm to "inplace" or "off"'
        )


def count_slots(spec: TransformerBlockSubmodules) -> dict[str, tuple[int, int]]:
    """Per operation, how many slots of a block hold Tempo's module and how many there are, for a run's banner."""
    counts = dict.fromkeys(("norm", "attention", "dropout", "gelu"), (0, 0))

    def count(operation: str, is_tempo: bool) -> None:
        ours, total = counts[operation]
        counts[operation] = (ours + is_tempo, total + 1)

    count("norm", _holds(spec.layer_norm, TempoLayerNorm, TempoRMSNorm))
    for layer in spec.layer_specs:
        slots = layer.submodules
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            count("norm", _holds(getattr(slots, name), TempoLayerNorm, TempoRMSNorm))
        count("attention", _holds(slots.self_attention.submodules.core_attention, TempoDotProductAttention))
        for name in ("self_attn_bda", "mlp_bda"):
            count("dropout", getattr(getattr(slots, name), "__module__", "") == tempo_bias_dropout_add.__module__)
        count("gelu", _holds(_mlp_class(slots.mlp), TempoMLP))
    return counts


def _tempoize_layer(
    layer: ModuleSpec, transformer_config: TransformerConfig, tempo_config: TempoConfig, layer_number: int
) -> ModuleSpec:
    changes: dict[str, Any] = {}
    slots: Any = layer.submodules
    for name in _NORM_SLOTS:
        changes[name] = _norm(getattr(slots, name), transformer_config, tempo_config)
    for name in ("self_attention", "cross_attention"):
        changes[name] = _attention(getattr(slots, name), transformer_config, tempo_config)
    if tempo_config.dropout == "recompute":
        for name, site in _BDA_SITES.items():
            if getattr(slots, name) is get_bias_dropout_add:
                changes[name] = tempo_bias_dropout_add(transformer_config, layer_number, site)
    changes["mlp"] = _mlp(slots.mlp, tempo_config)
    return dataclasses.replace(layer, submodules=dataclasses.replace(slots, **changes))


def _holds(slot: Any, *classes: type) -> bool:
    return isinstance(slot, type) and issubclass(slot, classes)


def _norm(slot: Any, transformer_config: TransformerConfig, tempo_config: TempoConfig) -> Any:
    if slot not in (FusedLayerNorm, WrappedTorchNorm, transformer_block.LayerNormImpl):
        return slot
    tempo_norm = _NORMS.get((transformer_config.normalization, tempo_config.norm))
    if tempo_norm is not None or slot is not WrappedTorchNorm:
        return tempo_norm or slot
    return {"LayerNorm": TorchLayerNorm, "RMSNorm": TorchRMSNorm}.get(transformer_config.normalization, slot)


def _linears(submodules: Any, tempo_config: TempoConfig) -> dict[str, Any]:
    """What changes in the submodules of attention or MLP, for their linears to drop what a norm can make again."""
    if tempo_config.norm != "recompute":
        return {}
    names = [name for name in _LINEARS_AFTER_NORMS if getattr(submodules, name, None) is ColumnParallelLinear]
    return dict.fromkeys(names, TempoColumnParallelLinear)


def _attention(slot: Any, transformer_config: TransformerConfig, tempo_config: TempoConfig) -> Any:
    submodules: Any = getattr(slot, "submodules", None)
    changes = _linears(submodules, tempo_config)
    for name in ("q_layernorm", "k_layernorm"):
        if hasattr(submodules, name):
            changes[name] = _norm(getattr(submodules, name), transformer_config, tempo_config)
    if getattr(submodules, "core_attention", None) is DotProductAttention:
        changes["core_attention"] = _ATTENTIONS[tempo_config.attention]
    return dataclasses.replace(slot, submodules=dataclasses.replace(submodules, **changes)) if changes else slot


def _mlp_class(slot: Any) -> Any:
    """The MLP class in a slot: a ModuleSpec's, or the class that `partial(MLP.as_mlp_submodule, ...)` is bound to."""
    return (
        getattr(slot.func, "__self__", None) if isinstance(slot, functools.partial) else getattr(slot, "module", None)
    )


def _mlp(slot: Any, tempo_config: TempoConfig) -> Any:
    if _mlp_class(slot) is not MLP:
        return slot
    module = {"off": MLP, "inplace": TempoMLP, "recompute": TempoRecomputeMLP}[tempo_config.gelu]
    if isinstance(slot, functools.partial):
        keywords = dict(slot.keywords)
        if "submodules" in keywords:
            submodules = keywords["submodules"]
            keywords["submodules"] = dataclasses.replace(submodules, **_linears(submodules, tempo_config))
        return functools.partial(getattr(module, slot.func.__name__), *slot.args, **keywords)
    submodules = dataclasses.replace(slot.submodules, **_linears(slot.submodules, tempo_config))
    return dataclasses.replace(slot, module=module, submodules=submodules)

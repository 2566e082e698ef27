"""Checks that this process's megatron-core is one that Tempo knows: its version, and the names that Tempo builds upon.

`tests/slots/test_megatron_versions.py` compares Tempo with stock in the versions from FIRST to LAST; another one is
tried, with a warning. docs/megatron_versions.md lists what differs between them.
"""

from __future__ import annotations

import importlib
import operator
import warnings

import megatron.core
from packaging.version import Version

# Megatron-DeepSpeed carries the core of 0.2.0, which does not say so.
VERSION = Version(getattr(megatron.core, "__version__", "0.2.0"))
FIRST, LAST = "0.14.0", "0.20"
"""The range that has been compared with stock; the patches of a version are taken to be alike."""

HOOKS = {
    "megatron.core.activations": "squared_relu",
    "megatron.core.fusions.fused_bias_dropout": "get_bias_dropout_add",
    "megatron.core.fusions.fused_layer_norm": "FusedLayerNorm",
    "megatron.core.models.bert.bert_model": "BertModel",
    "megatron.core.models.gpt.gpt_model": "GPTModel._postprocess GPTModel.compute_language_model_loss",
    "megatron.core.models.gpt.gpt_layer_specs": "get_gpt_decoder_block_spec",
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs": "get_gpt_heterogeneous_layer_spec",
    "megatron.core.models.T5.t5_model": "T5Model",
    "megatron.core.tensor_parallel": "ColumnParallelLinear get_cuda_rng_tracker",
    "megatron.core.tensor_parallel.random": "CheckpointWithoutOutput _get_cuda_rng_state _set_cuda_rng_state",
    "megatron.core.transformer.attention": "SelfAttention.forward",
    "megatron.core.transformer.dot_product_attention": "DotProductAttention.forward",
    "megatron.core.transformer.identity_op": "IdentityFuncOp IdentityOp",
    "megatron.core.transformer.mlp": "MLP.forward MLPSubmodules",
    "megatron.core.transformer.moe.experts": "SequentialMLP.forward",
    "megatron.core.transformer.moe.moe_layer": "MoELayer.forward",
    "megatron.core.transformer.moe.router": "TopKRouter",
    "megatron.core.transformer.moe.shared_experts": "SharedExpertMLP.forward",
    "megatron.core.transformer.moe.token_dispatcher": "MoEAllGatherTokenDispatcher",
    "megatron.core.transformer.spec_utils": "ModuleSpec",
    "megatron.core.transformer.torch_norm": "WrappedTorchNorm",
    "megatron.core.transformer.transformer_block": "LayerNormImpl TransformerBlockSubmodules get_num_layers_to_build",
    "megatron.core.transformer.transformer_layer": "TransformerLayerSubmodules get_transformer_layer_offset",
    "megatron.core.utils": "get_pg_rank get_pg_size",
}
"""Module -> the attributes of it that Tempo builds upon; a dot leads into a class."""


def is_since(version: str) -> bool:
    """Whether this process's Megatron is `version`, a pre-release of it, or newer."""
    return Version(f"{version}.dev0") <= VERSION


def check_megatron() -> None:
    """Warn where this process's megatron-core is none that Tempo has been compared with.

    Raises ImportError naming the first of HOOKS that it lacks.
    """
    if not hasattr(megatron.core, "__version__"):
        # tempo_megatron.megatron_lm.megatron_deepspeed uses dropout_rng alone, which needs nothing newer.
        return
    if not Version(FIRST).release[:2] <= VERSION.release[:2] <= Version(LAST).release[:2]:
        warnings.warn(
            f"megatron-core is {VERSION}; Tempo has been compared with {FIRST} to {LAST}; it is tried all the same, so "
            "compare a few steps of your run with and without Tempo at dropout 0",
            stacklevel=2,
        )
    remedy = f"expected one of {FIRST} to {LAST}; install such a megatron-core, or leave Tempo off"
    for name, attributes in HOOKS.items():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ImportError(f"megatron-core {VERSION} cannot import {name} ({error}); {remedy}") from error
        for attribute in attributes.split():
            try:
                operator.attrgetter(attribute)(module)
            except AttributeError as error:
                raise ImportError(f"megatron-core {VERSION} has no {name}.{attribute}; {remedy}") from error

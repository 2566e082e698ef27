"""Builds the TransformerConfig of a run, and names its activation."""

from __future__ import annotations

import importlib.util

from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron.models import build as models
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.training import pipeline
from tempo_megatron.training.run.run_config import RunConfig

_FUSED_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda"


def build_transformer_config(run: RunConfig) -> TransformerConfig:
    """Builds Megatron's configuration of the layers. A fusion needs a GPU and its extension, except that of GELU.

    As in Megatron-LM, the fused GELU is the tanh form and the unfused one the erf form.
    """
    on_gpu = run.on_gpu
    return models.build_transformer_config(
        run.model,
        dtype=models.DTYPES[run.precision],
        tensor_model_parallel_size=run.tensor_model_parallel_size,
        **pipeline.list_settings(run),
        sequence_parallel=run.sequence_parallel,
        fuse_gelu=run.bias_gelu_fusion,
        fuse_swiglu=on_gpu and run.bias_swiglu_fusion,
        use_cpu_initialization=run.use_cpu_initialization or not on_gpu,
        bias_dropout_fusion=on_gpu and run.bias_dropout_fusion,
        masked_softmax_fusion=on_gpu and run.masked_softmax_fusion and has_fused_softmax(),
        # Needs Apex. gradient_accumulation_fusion stays off: it needs buffers of Megatron's own optimizer.
        persist_layer_norm=on_gpu and importlib.util.find_spec("apex") is not None,
        recompute_granularity=run.recompute_granularity,
        recompute_method=run.recompute_method,
        recompute_num_layers=run.recompute_num_layers,
        recompute_modules=None if run.recompute_modules is None else list(run.recompute_modules),
    )


def has_fused_softmax() -> bool:
    """Whether Apex's softmax kernels, which Megatron's fused softmax calls, are installed."""
    return importlib.util.find_spec(_FUSED_SOFTMAX) is not None


def find_gelu_form(shape: ModelShape, config: TransformerConfig) -> str | None:
    """Returns tanh or erf, or None for an activation without GELU."""
    if shape.activation not in ("gelu", "geglu"):
        return None
    return "tanh" if config.bias_activation_fusion else "erf"


def describe_activation(shape: ModelShape, gelu_form: str | None) -> str:
    """Names an activation for the banner: `erf GELU`, `swiglu`."""
    name = {"gelu": "GELU", "geglu": "GEGLU"}.get(shape.activation, shape.activation)
    return f"{gelu_form} {name}" if gelu_form else name

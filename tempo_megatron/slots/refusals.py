"""What Tempo's operations cannot do with a TransformerConfig, said before anything is built."""

from __future__ import annotations

from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron.config import TempoConfig
from tempo_megatron.slots.attention import refuse_attention
from tempo_megatron.slots.mlp import refuse_activation

_NORMALIZATIONS = ("LayerNorm", "RMSNorm")


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
    _refuse_recomputation(transformer_config)
    if tempo_config.activation != "off":
        refuse_activation(transformer_config, tempo_config.activation)
    if tempo_config.norm != "off":
        _refuse_norm(transformer_config, tempo_config.norm)
    refuse_shared_masks(transformer_config, tempo_config)
    if tempo_config.attention != "off":
        refuse_attention(transformer_config)


def refuse_shared_masks(transformer_config: TransformerConfig, tempo_config: TempoConfig) -> None:
    """Raise ValueError where two places of the model, or two ranks, would draw the same dropout masks."""
    switches = {"attention": transformer_config.attention_dropout, "dropout": transformer_config.hidden_dropout}
    drawing = [f"tempo.{name}" for name, p in switches.items() if p > 0 and getattr(tempo_config, name) != "off"]
    if not drawing:
        return
    remedy = f'set {" and ".join(drawing)} to "off"'
    if transformer_config.context_parallel_size > 1:
        raise ValueError(
            f"context_parallel_size is {transformer_config.context_parallel_size}; expected 1, as Tempo's dropout does "
            f"not know which rows of a sequence such a rank holds, so that all would draw the same masks; {remedy}"
        )
    if transformer_config.mtp_num_layers:
        raise ValueError(
            f"mtp_num_layers is {transformer_config.mtp_num_layers}; expected none, as the layers of multi-token "
            f"prediction have the numbers, and so the dropout masks, of the decoder's; {remedy}"
        )


def _refuse_norm(transformer_config: TransformerConfig, choice: str) -> None:
    if transformer_config.normalization not in _NORMALIZATIONS:
        raise ValueError(
            f"normalization is {transformer_config.normalization}; expected LayerNorm or RMSNorm; "
            'set tempo.norm to "off"'
        )
    if choice == "recompute" and transformer_config.apply_residual_connection_post_layernorm:
        raise ValueError(
            "apply_residual_connection_post_layernorm is on, which reads a norm's output once more after the linear "
            'that follows it; set tempo.norm to "inplace" or "off"'
        )


def _refuse_recomputation(transformer_config: TransformerConfig) -> None:
    modules = transformer_config.recompute_modules or ()
    if transformer_config.recompute_granularity != "selective" or "layernorm" not in modules:
        return
    # What Megatron asks about fp8 comes from Transformer Engine, and it asks whether or not fp8 is on.
    has_fp8_state = hasattr(megatron_random, "FP8GlobalStateManager")
    if megatron_random.CheckpointWithoutOutput().fp8 and not has_fp8_state:
        raise ValueError(
            "recompute_modules holds layernorm, in which this megatron-core ends in a NameError without Transformer "
            'Engine; take it out, and set tempo.norm to "recompute" for the same saving'
        )

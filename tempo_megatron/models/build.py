"""Builds the modules of a ModelShape: GPTModel, BertModel or T5Model with stock or Tempo modules in their slots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.bert import bert_lm_head
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tempo_megatron.models.shape import ModelShape
from tempo_megatron.settings.activations import ACTIVATIONS
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.block_slots import TempoBlockSubmodules
from tempo_megatron.slots.choose import Choices, choose
from tempo_megatron.slots.dropout import tempoize_embedding
from tempo_megatron.slots.layer_spec import tempo_block_spec, tempoize
from tempo_megatron.slots.loss import TempoBertModel, TempoGPTModel, TempoT5Model
from tempo_megatron.slots.mlp import FUNCTIONS
from tempo_megatron.slots.norm import TorchLayerNorm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_transformer_config(
    shape: ModelShape,
    *,
    dtype: torch.dtype = torch.float32,
    tensor_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
    fuse_gelu: bool = False,
    fuse_swiglu: bool = False,
    **settings: Any,
) -> TransformerConfig:
    """Megatron's configuration of the layers.

    Args:
        shape: the model.
        dtype: of the parameters.
        tensor_model_parallel_size, sequence_parallel: of the layout.
        fuse_gelu: use Megatron's fused GELU (and gate) if the activation is one. As in Megatron-LM the fused one has
            the tanh form, and the unfused one the erf form.
        fuse_swiglu: use Megatron's fused SwiGLU if that is the activation.
        settings: more fields of TransformerConfig: pipeline, recomputation, initialisation, fusions. By default there
            are no fusions that need a GPU or an extension.

    Raises ValueError where the fused GELU has no bias to add.
    """
    fuses = {"swiglu": fuse_swiglu, "gelu": fuse_gelu, "geglu": fuse_gelu}.get(shape.activation, False)
    if fuses and shape.activation == "gelu" and not shape.add_bias_linear:
        raise ValueError(
            "--disable-bias-linear leaves nothing for the fused GELU to add, which Megatron refuses; add "
            "--no-bias-gelu-fusion for the unfused one, which is the erf form"
        )
    return TransformerConfig(
        **{
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "ffn_hidden_size": shape.ffn_hidden_size,
            "num_attention_heads": shape.num_attention_heads,
            "num_query_groups": shape.num_query_groups,
            "kv_channels": shape.kv_channels,
            "normalization": shape.normalization,
            "layernorm_epsilon": shape.norm_epsilon,
            "activation_func": FUNCTIONS[ACTIVATIONS[shape.activation].formula],
            "gated_linear_unit": shape.is_gated,
            "bias_activation_fusion": fuses,
            "qk_layernorm": shape.qk_layernorm,
            "window_size": shape.window_size,
            "add_bias_linear": shape.add_bias_linear,
            "add_qkv_bias": shape.add_qkv_bias,
            "init_method_std": shape.init_method_std,
            "attention_dropout": shape.attention_dropout,
            "hidden_dropout": shape.hidden_dropout,
            "tensor_model_parallel_size": tensor_model_parallel_size,
            "sequence_parallel": sequence_parallel,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "use_cpu_initialization": True,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            **settings,
        }
    )


def make_specs(
    shape: ModelShape, config: TransformerConfig, tempo_config: TempoConfig | Choices, *, vp_stage: int | None = None
) -> dict[str, TempoBlockSubmodules]:
    """Stack, "encoder" or "decoder" -> its block's spec, with Tempo's modules.

    Raises ValueError where a value that is not "auto" cannot be had.
    """
    if shape.family == "gpt":
        return {"decoder": tempo_block_spec(config, tempo_config, vp_stage=vp_stage)}
    stock = {"encoder": bert_layer_local_spec}
    if shape.family == "t5":
        stock = {"encoder": encoder_model_with_local_spec(), "decoder": decoder_model_with_local_spec()}
    return {stack: tempoize(spec, config, tempo_config, vp_stage=vp_stage) for stack, spec in stock.items()}


def build_model(
    shape: ModelShape,
    config: TransformerConfig,
    tempo_config: TempoConfig | Choices,
    padded_vocab_size: int,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> Any:
    """This rank's part of the model: a GPTModel, BertModel or T5Model.

    Args:
        shape: the model.
        config: of build_transformer_config, perhaps with changes.
        tempo_config: "auto" becomes what `choose` says. May also be what it returned for this model.
        padded_vocab_size: rows of the embedding.
        pre_process, post_process, vp_stage: of its pipeline stage, as GPTModel's arguments of these names.

    Raises ValueError where a value that is not "auto" cannot be had.
    """
    choices = tempo_config if isinstance(tempo_config, Choices) else choose(config, tempo_config)
    common: dict[str, Any] = {
        "vocab_size": padded_vocab_size,
        "max_sequence_length": shape.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not shape.untie_embeddings_and_output_weights,
        "position_embedding_type": shape.position_embedding_type,
        "rotary_percent": shape.rotary_percent,
    }
    specs = make_specs(shape, config, choices, vp_stage=vp_stage)
    model_class = _CLASSES[shape.family][choices.config.loss == "fused"]
    with _norm_of_the_head():
        model = model_class(config=config, **_list_own_arguments(shape, config, specs, vp_stage), **common)
    tempoize_embedding(model, choices.config)
    for stack in specs:
        prepare_for_recomputation(getattr(model, stack), config)
    return model


def prepare_for_recomputation(part: torch.nn.Module, config: TransformerConfig) -> None:
    """Let Megatron recompute the MLPs of a part of a model, where `config` says so. One of experts it never does."""
    if config.recompute_granularity != "selective" or "mlp" not in (config.recompute_modules or ()):
        return
    for layer in part.modules():
        linear = getattr(getattr(layer, "mlp", None), "linear_fc2", None)
        if isinstance(linear, torch.nn.Module):
            linear.register_forward_hook(_hand_out_a_view_of_the_bias)


def _list_own_arguments(
    shape: ModelShape, config: TransformerConfig, specs: dict[str, TempoBlockSubmodules], vp_stage: int | None
) -> dict[str, Any]:
    """The arguments that only the class of this family takes."""
    if shape.family == "gpt":
        return {
            "transformer_layer_spec": specs["decoder"],
            "rotary_base": shape.rotary_base,
            "rope_scaling": shape.use_rope_scaling,
            "rope_scaling_factor": shape.rope_scaling_factor,
            "vp_stage": vp_stage,
        }
    if shape.family == "bert":
        return {
            "transformer_layer_spec": specs["encoder"],
            "num_tokentypes": shape.num_tokentypes,
            "add_binary_head": shape.add_binary_head,
            "vp_stage": vp_stage,
        }
    return {
        "encoder_config": config,
        "transformer_encoder_layer_spec": specs["encoder"],
        "transformer_decoder_layer_spec": specs["decoder"],
    }


# Megatron's class, and the one with the fused loss.
_CLASSES = {"gpt": (GPTModel, TempoGPTModel), "bert": (BertModel, TempoBertModel), "t5": (T5Model, TempoT5Model)}


@contextlib.contextmanager
def _norm_of_the_head() -> Iterator[None]:
    """Inside the context BERT's head is built with TorchLayerNorm, for sequence parallelism.

    The head names its norm itself (models/bert/bert_lm_head.py:16 of megatron-core 0.16.1). Without Apex that is
    Megatron's wrapper around torch's LayerNorm, which refuses sequence parallelism (transformer/torch_norm.py:32)."""
    if bert_lm_head.LNImpl is not WrappedTorchNorm:
        yield
        return
    bert_lm_head.LNImpl = TorchLayerNorm
    try:
        yield
    finally:
        bert_lm_head.LNImpl = WrappedTorchNorm


def _hand_out_a_view_of_the_bias(
    module: torch.nn.Module, inputs: Any, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Make the MLP return a view of its output bias, which is added later. If it returned the parameter itself, the
    checkpoint around the MLP would become the parameter's grad_fn, and its backward would recompute the MLP without
    end."""
    return output[0], None if output[1] is None else output[1].view_as(output[1])


def count_parameters(model: torch.nn.Module, tensor_parallel_size: int = 1) -> int:
    """Parameters of the whole model; `model` holds one tensor-parallel rank's part, perhaps partitioned by ZeRO-3."""
    total = 0
    for parameter in model.parameters():
        split = tensor_parallel_size if getattr(parameter, "tensor_model_parallel", False) else 1
        total += getattr(parameter, "ds_numel", parameter.numel()) * split
    return total


def make_inputs(
    shape: ModelShape, vocab_size: int, micro_batch_size: int, *, seq_length: int | None = None, causal_mask: bool
) -> dict[str, Any]:
    """The keyword arguments of the model's forward.

    Args:
        shape: the model.
        vocab_size: tokens are drawn below it.
        micro_batch_size: samples.
        seq_length: in place of the shape's; a T5's decoder is shortened to it too.
        causal_mask: whether a GPT gets a mask, which stock needs on a CPU.
    """
    s = seq_length or shape.seq_length
    tokens = torch.randint(vocab_size, (micro_batch_size, s), dtype=torch.int64)
    if shape.family == "bert":
        segments = {"tokentype_ids": torch.zeros_like(tokens)} if shape.num_tokentypes else {}
        padding = torch.ones(micro_batch_size, s, dtype=torch.float32)
        return {"input_ids": tokens, "attention_mask": padding, "lm_labels": tokens, **segments}
    if shape.family == "t5":
        d = min(s, shape.decoder_seq_length or s)
        return {
            "encoder_input_ids": tokens,
            "decoder_input_ids": tokens[:, :d].contiguous(),
            "encoder_attn_mask": torch.zeros(micro_batch_size, 1, s, s, dtype=torch.bool),
            "decoder_attn_mask": hide_the_future(d).expand(micro_batch_size, 1, d, d).contiguous(),
            "encoder_decoder_attn_mask": torch.zeros(micro_batch_size, 1, d, s, dtype=torch.bool),
            "lm_labels": tokens[:, :d].contiguous(),
        }
    positions = torch.arange(s, dtype=torch.int64).expand(micro_batch_size, -1).contiguous()
    mask = hide_the_future(s) if causal_mask else None
    return {"input_ids": tokens, "position_ids": positions, "attention_mask": mask, "labels": tokens}


def hide_the_future(length: int) -> Tensor:
    """[1, 1, length, length], True = hidden."""
    return torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

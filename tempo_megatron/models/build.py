"""Builds the modules of a ModelShape: GPTModel, BertModel or T5Model with stock or Tempo modules in their slots."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import __version__ as MEGATRON_VERSION
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.bert import bert_lm_head
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from tempo_megatron.models.shape import LATENT, QUICK_GEGLU, SAME, SAME_IN_EXPERTS, ModelShape
from tempo_megatron.settings.activations import ACTIVATIONS
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.block_slots import TempoBlockSubmodules
from tempo_megatron.slots.choose import Choices, choose
from tempo_megatron.slots.dropout import tempoize_embedding
from tempo_megatron.slots.layer_spec import tempo_block_spec, tempoize
from tempo_megatron.slots.loss import TempoBertModel, TempoGPTModel, TempoT5Model
from tempo_megatron.slots.megatron_versions import find_version, is_since
from tempo_megatron.slots.mlp import FUNCTIONS
from tempo_megatron.slots.norm import TorchNorm
from tempo_megatron.slots.slot_content import find_class

# Fields of TransformerConfig that megatron-core 0.16 has, and an older version perhaps not.
_YOUNG = ("softmax_type", "activation_func_clamp_value", "glu_linear_offset", "window_attn_skip_freq")
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

    Raises ValueError where the fused GELU has no bias to add, and for what this version of Megatron does not have.
    """
    fuses = {"swiglu": fuse_swiglu, "gelu": fuse_gelu, "geglu": fuse_gelu}.get(shape.activation, False)
    # Megatron's fused functions weight the outputs of experts for these alone.
    fuses &= shape.num_experts is None or shape.activation == "swiglu"
    if fuses and shape.activation == "gelu" and not shape.add_bias_linear:
        raise ValueError(
            "--disable-bias-linear leaves nothing for the fused GELU to add, which Megatron refuses; add "
            "--no-bias-gelu-fusion for the unfused one, which is the erf form"
        )
    config_class, parts = _configure_parts(shape, settings.get("num_layers", shape.num_layers))
    is_quick = shape.activation == QUICK_GEGLU
    found: TransformerConfig = config_class(
        **{
            **{name: getattr(shape, name) for name in (*SAME, "add_qkv_bias", "init_method_std")},
            "layernorm_epsilon": shape.norm_epsilon,
            "activation_func": quick_gelu if is_quick else FUNCTIONS[ACTIVATIONS[shape.activation].formula],
            "gated_linear_unit": shape.is_gated,
            "bias_activation_fusion": fuses,
            "tensor_model_parallel_size": tensor_model_parallel_size,
            "sequence_parallel": sequence_parallel,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "use_cpu_initialization": True,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            **parts,
            **settings,
        }
    )
    return found


@dataclasses.dataclass
class YarnTransformerConfig(TransformerConfig):  # type: ignore[misc,unused-ignore]
    """With the fields that a GPTModel of "yarn" looks for, and no TransformerConfig has (models/gpt/gpt_model.py)."""

    yarn_rotary_scaling_factor: float = 40.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = True


def _configure_parts(shape: ModelShape, num_layers: int) -> tuple[Any, dict[str, Any]]:
    """The class of the configuration, and its fields for experts, latent attention, Yarn, sinks and clamps."""
    found: dict[str, Any] = {}
    known = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    for name in _YOUNG:
        value = getattr(shape, name)
        if name in known:
            found[name] = value
        elif value not in (None, 0.0, "vanilla"):
            raise ValueError(
                f"--{name.replace('_', '-')} {value} is given, which megatron-core {MEGATRON_VERSION} does not have; "
                "install megatron-core 0.16, or leave it out"
            )
    if shape.num_experts is not None:
        others = "moe_router_load_balancing_type", "moe_router_topk_scaling_factor", "moe_expert_capacity_factor"
        found |= {name: getattr(shape, name) for name in (*SAME_IN_EXPERTS, "moe_aux_loss_coeff", *others)}
        found |= {"num_moe_experts": shape.num_experts, "moe_ffn_hidden_size": shape.expert_size}
        found["expert_tensor_parallel_size"] = 1 if shape.add_bias_linear else None
        has = [int(each) for each in shape.layers_with_experts]
        # Of fewer layers, those of the first.
        found["moe_layer_freq"] = has[:num_layers] + has[-1:] * (num_layers - len(has))
    if shape.multi_latent_attention:
        names = "rotary_base", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"
        found |= {name: getattr(shape, name) for name in (*LATENT, *names)}
        # What stands for both being left out, 0.1 log(factor) + 1, is that of 1 and 0.
        mscale = 1.0 if shape.mscale is None else shape.mscale
        found |= {"mscale": mscale, "mscale_all_dim": shape.mscale_all_dim or 0.0}
        return MLATransformerConfig, found | {"rope_type": shape.position_embedding_type}
    if shape.position_embedding_type == "yarn":
        fields = [field.name for field in dataclasses.fields(YarnTransformerConfig) if field.name.startswith("yarn_")]
        own = {name: name if hasattr(shape, name) else name.removeprefix("yarn_") for name in fields}
        return YarnTransformerConfig, found | {name: getattr(shape, of) for name, of in own.items()}
    return TransformerConfig, found


def make_specs(
    shape: ModelShape, config: TransformerConfig, tempo_config: TempoConfig | Choices, *, vp_stage: int | None = None
) -> dict[str, TempoBlockSubmodules]:
    """Stack, "encoder" or "decoder" -> its block's spec, with Tempo's modules.

    Raises ValueError where a value that is not "auto" cannot be had.
    """
    if shape.family == "gpt":
        spec = tempo_block_spec(config, tempo_config, vp_stage=vp_stage)
        if shape.multi_latent_attention:
            for layer in spec.layer_specs:
                _put_latent(layer)
        return {"decoder": spec}
    stock = {"encoder": bert_layer_local_spec}
    if shape.family == "t5":
        stock = {"encoder": encoder_model_with_local_spec(), "decoder": decoder_model_with_local_spec()}
    return {stack: tempoize(spec, config, tempo_config, vp_stage=vp_stage) for stack, spec in stock.items()}


class LatentDotProductAttention(DotProductAttention):  # type: ignore[misc,unused-ignore]
    """Megatron's own core attention with values of another size than keys, which latent attention tells of and the
    stock constructor does not take (transformer/multi_latent_attention.py:214 of megatron-core 0.16.1).

    Keeps for backward what the stock class does: q, k, v and the s*s tensors of scores.
    """

    def __init__(self, config: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels


def _put_latent(layer: Any) -> None:
    """Let a layer whose core attention is Megatron's own have LatentDotProductAttention."""
    submodules = layer.submodules.self_attention.submodules
    if find_class(submodules.core_attention) is DotProductAttention:
        submodules.core_attention = LatentDotProductAttention


def build_layer(spec: Any, *, config: Any, **arguments: Any) -> Any:
    """A layer of `spec`, which is not changed, as `build_model` builds it."""
    if getattr(config, "multi_latent_attention", False):
        spec = copy.deepcopy(spec)
        _put_latent(spec)
    with _mend_names():
        return build_module(spec, config=config, **arguments)


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

    Raises ValueError where a value that is not "auto" cannot be had, or this megatron-core cannot build the model.
    """
    choices = choose(config, tempo_config)
    common: dict[str, Any] = {
        "vocab_size": padded_vocab_size,
        "max_sequence_length": shape.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not shape.untie_embeddings_and_output_weights,
        # Latent attention rotates its own heads, and a GPTModel leaves that to it for "rope".
        "position_embedding_type": "rope" if shape.multi_latent_attention else shape.position_embedding_type,
        "rotary_percent": shape.rotary_percent,
    }
    if shape.multi_latent_attention and shape.q_lora_rank is None and config.qk_layernorm and is_since("0.19"):
        # mla_qk_norm_config.py: the norm of q is part of Transformer Engine's linear.
        raise ValueError(
            f"latent attention without q_lora_rank has no norm of Megatron's own modules in megatron-core "
            f"{find_version()}; expected 0.14 to 0.18; install one of these"
        )
    specs = make_specs(shape, config, choices, vp_stage=vp_stage)
    if shape.num_experts is not None and not hasattr(moe_utils, "te_general_gemm"):
        # Without Transformer Engine the router looks for a name that nobody defines (moe_utils.py:1192 of 0.16.1).
        moe_utils.te_general_gemm = None
    model_class = _CLASSES[shape.family][choices.config.loss == "fused"]
    with _mend_names():
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
def _mend_names() -> Iterator[None]:
    """Inside the context two of Megatron's names hold what its constructors need without Apex and Transformer Engine.

    BERT's head names its norm itself (models/bert/bert_lm_head.py:16 of megatron-core 0.16.1): Megatron's wrapper
    around torch's LayerNorm, which refuses sequence parallelism (transformer/torch_norm.py:32). Latent attention asks
    whether a linear is a TELinear, which is no class then (transformer/multi_latent_attention.py:185).
    """
    changes: dict[tuple[Any, str], Any] = {}
    if bert_lm_head.LNImpl is WrappedTorchNorm:
        changes[bert_lm_head, "LNImpl"] = TorchNorm
    if not isinstance(getattr(multi_latent_attention, "TELinear", _NoLinear), type):
        changes[multi_latent_attention, "TELinear"] = _NoLinear
    with contextlib.ExitStack() as undo:
        for (module, name), value in changes.items():
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


class _NoLinear(torch.nn.Module):
    """What no module is."""


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


def make_inputs(shape: ModelShape, vocab_size: int, micro_batch_size: int, *, causal_mask: bool) -> dict[str, Any]:
    """The keyword arguments of the model's forward.

    Args:
        shape: the model.
        vocab_size: tokens are drawn below it.
        micro_batch_size: samples.
        causal_mask: whether a GPT gets a mask, which stock needs on a CPU.
    """
    s = shape.seq_length
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

"""The GPT of a run: megatron-core's GPTModel with stock or Tempo modules in its slots."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from tempo_megatron import TempoGPTModel, tempo_block_spec, tempoize_embedding
from tempo_megatron.training.run_config import RunConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FUSED_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda"


def build_transformer_config(run: RunConfig) -> TransformerConfig:
    """Megatron's configuration of the layers. Its fusions are on where a GPU and their extensions are there.

    As in Megatron-LM the fused GELU is the tanh form and the unfused one the erf form.
    """
    on_gpu = run.on_gpu
    return TransformerConfig(
        num_layers=run.num_layers,
        hidden_size=run.hidden_size,
        ffn_hidden_size=run.ffn_hidden_size,
        num_attention_heads=run.num_attention_heads,
        tensor_model_parallel_size=run.tensor_model_parallel_size,
        sequence_parallel=run.sequence_parallel,
        params_dtype=DTYPES[run.precision],
        pipeline_dtype=DTYPES[run.precision],
        bf16=run.precision == "bf16",
        fp16=run.precision == "fp16",
        attention_dropout=run.attention_dropout,
        hidden_dropout=run.hidden_dropout,
        init_method_std=run.init_method_std,
        activation_func=F.gelu,
        add_bias_linear=True,
        use_cpu_initialization=run.use_cpu_initialization or not on_gpu,
        bias_activation_fusion=on_gpu and not run.no_bias_gelu_fusion,
        bias_dropout_fusion=on_gpu and not run.no_bias_dropout_fusion,
        masked_softmax_fusion=on_gpu and not run.no_masked_softmax_fusion and has_fused_softmax(),
        # Both need buffers of Megatron's own optimizer, or Apex.
        gradient_accumulation_fusion=False,
        persist_layer_norm=on_gpu and importlib.util.find_spec("apex") is not None,
        recompute_granularity=run.recompute_granularity,
        recompute_method=run.recompute_method,
        recompute_num_layers=run.recompute_num_layers,
        recompute_modules=None if run.recompute_modules is None else list(run.recompute_modules),
    )


def has_fused_softmax() -> bool:
    """Whether Apex's softmax kernels, which Megatron's fused softmax calls, are installed."""
    return importlib.util.find_spec(_FUSED_SOFTMAX) is not None


def build_model(run: RunConfig, config: TransformerConfig, padded_vocab_size: int) -> GPTModel:
    """GPTModel with learned positions, as GPT-2, and this rank's part of the weights.

    `run.tempo` holds values only, no "auto". Raises ValueError where one cannot be had with `config`.
    """
    # The class is ours to choose: nothing built has to change.
    model_class = TempoGPTModel if run.tempo.loss == "fused" else GPTModel
    model = model_class(
        config=config,
        transformer_layer_spec=tempo_block_spec(config, run.tempo),
        vocab_size=padded_vocab_size,
        max_sequence_length=run.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=not run.untie_embeddings_and_output_weights,
        position_embedding_type="learned_absolute",
    )
    tempoize_embedding(model, run.tempo)
    if config.recompute_granularity == "selective" and "mlp" in config.recompute_modules:
        for layer in model.decoder.layers:
            layer.mlp.linear_fc2.register_forward_hook(_hand_out_a_view_of_the_bias)
    return model


def _hand_out_a_view_of_the_bias(module: torch.nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> Any:
    """The MLP returns its output bias to be added later. Were it the parameter itself, the checkpoint around the MLP
    would become that parameter's grad_fn, and its backward would recompute the MLP without end."""
    return output[0], output[1].view_as(output[1])


def count_parameters(model: torch.nn.Module, tensor_parallel_size: int) -> int:
    """Parameters of the whole model; `model` holds one tensor-parallel rank's part, perhaps partitioned by ZeRO-3."""
    total = 0
    for parameter in model.parameters():
        split = tensor_parallel_size if getattr(parameter, "tensor_model_parallel", False) else 1
        total += getattr(parameter, "ds_numel", parameter.numel()) * split
    return total


class ForwardStep:
    """Micro batch -> mean loss of its tokens, with what does not change between micro batches made once.

    Args:
        run: with Tempo's attention no mask is needed. Its `tempo` holds values only, no "auto".
        device: where the model is.
    """

    def __init__(self, run: RunConfig, device: torch.device) -> None:
        seq_length = run.seq_length
        self.position_ids = torch.arange(seq_length, dtype=torch.int64, device=device).unsqueeze(0)
        self.attention_mask: Tensor | None = None
        if "off" in run.tempo.values_of("attention") and device.type == "cpu":
            # Megatron's own causal mask is made on the literal device "cuda". True = hidden.
            hidden = torch.ones(seq_length, seq_length, dtype=torch.bool, device=device).triu(1)
            self.attention_mask = hidden.view(1, 1, seq_length, seq_length)

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss, float32, averaged over the tokens that count; 0 where none does."""
        tokens, mask = batch["tokens"], batch["loss_mask"]
        losses = model(
            input_ids=tokens,
            position_ids=self.position_ids.expand_as(tokens),
            attention_mask=self.attention_mask,
            labels=batch["labels"],
            loss_mask=mask,
        )
        return torch.sum(losses.float() * mask) / mask.sum().clamp(min=1.0)

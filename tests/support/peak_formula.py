"""What a GPT holds at the peak of a training step beyond weights, gradients and optimizer state, as a formula.

Without pipeline stages the peak is where the last layer's forward meets the loss: every layer's activations are there,
and the logits twice, in the model's dtype and as the float32 copy that Megatron's cross entropy takes. In backward it
is the same again, of their gradients. Nothing in the sum is fitted: each row is a tensor of Megatron's modules.

Assumed, where a configuration does not say: the cross entropy is Megatron's unfused one, which keeps its softmax in
the float32 copy's memory; the micro batch lies on the device, with the attention mask that Megatron-LM's data loader
makes unless told not to; rounding by the allocator, workspaces of cuBLAS and NCCL, and single numbers are left out.
"""

from __future__ import annotations

from kept_formula import KeptRow, LayerShape, count_layer_bytes

from tempo_megatron.settings.config import TempoConfig

_INT64, _FLOAT32 = 8, 4


def list_rows_at_peak(
    shape: LayerShape,
    tempo_config: TempoConfig,
    *,
    num_layers: int,
    padded_vocab_size: int,
    gives_mask: bool = True,
    stock_attention: str = "fused",
) -> tuple[KeptRow, ...]:
    """Bytes on one rank of a GPT without pipeline stages, on a GPU whose stock modules are Transformer Engine's.

    Args:
        shape: one layer.
        tempo_config: without "auto", and with loss "off".
        num_layers: of the whole model.
        padded_vocab_size: rows of the output layer over all ranks.
        gives_mask: whether the data loader makes a mask [b, 1, s, s], a byte each.
        stock_attention: as `list_layer_rows` takes it.

    Raises ValueError for another loss than "off": the fused one has no logits of all tokens, and its peak is elsewhere.
    """
    if tempo_config.loss != "off":
        raise ValueError(f'tempo.loss is "{tempo_config.loss}"; expected "off", whose logits this formula is about')
    tokens = shape.seq_length * shape.micro_batch_size
    layer = count_layer_bytes(shape, tempo_config, stock="transformer_engine", stock_attention=stock_attention)
    num_statistics = 2 if shape.normalization == "LayerNorm" else 1
    has_embedding_mask = shape.hidden_dropout > 0 and tempo_config.dropout == "off"
    # The final norm feeds the output layer: one of input and output where Tempo's norm is in place.
    num_hidden = 1 if tempo_config.norm == "inplace" else 2
    logits = tokens * padded_vocab_size // shape.tensor_parallel
    mask = shape.seq_length * tokens if gives_mask else 0
    return (
        KeptRow("layers", num_layers * layer),
        # Ids within this rank's part of the vocabulary, and which are outside of it; dropout's mask.
        KeptRow("embedding", tokens * (_INT64 + 1) + (shape.rows * shape.hidden_size if has_embedding_mask else 0)),
        KeptRow("final_layernorm", num_hidden * shape.hidden_bytes + num_statistics * _FLOAT32 * shape.rows),
        KeptRow("output_layer", logits * shape.element_bytes),
        # The copy; per token the label within the vocabulary's part, and whether it is outside, and three numbers.
        KeptRow("loss", logits * _FLOAT32 + tokens * (_INT64 + 1 + 3 * _FLOAT32)),
        # Tokens, labels, positions; the loss mask.
        KeptRow("micro batch", tokens * (3 * _INT64 + _FLOAT32) + mask),
    )

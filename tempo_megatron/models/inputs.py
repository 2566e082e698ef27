"""Makes a micro batch for any family of models: random tokens, each of which counts, and the masks of its forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_megatron.models.shape import ModelShape


def make_inputs(
    shape: ModelShape, vocab_size: int, micro_batch_size: int, *, seq_length: int | None = None, causal_mask: bool
) -> dict[str, Any]:
    """The keyword arguments of the model's forward.

    Args:
        shape: the model.
        vocab_size: tokens are drawn below it.
        micro_batch_size: samples.
        seq_length: instead of the shape's; in T5 the decoder's is shortened to it too.
        causal_mask: whether a GPT is given its mask, as stock needs it on a CPU.
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

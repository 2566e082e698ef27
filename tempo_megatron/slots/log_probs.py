"""Computes log-probabilities and entropies of a GPTModel's tokens, for RL trainers, without logits of all tokens.

They come out of the fused loss head: the output layer is told the labels, and that it is not to give losses.
"""

from __future__ import annotations

from typing import Any

from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from tempo_megatron.slots.loss import find_loss_head


def log_probs(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    vocab_size: int | None = None,
    **inputs: Any,
) -> Any:
    """Calls a GPTModel for the log-probabilities of labels, in place of model(...) and a log-softmax of its logits.

    Args:
        model: a GPTModel with the fused loss head (`TempoGPTModel`, or one that `tempoize_loss` was called with), in
            whatever wraps it; of a pipeline any stage.
        input_ids, position_ids, attention_mask, inputs: as the model's.
        labels: [b, s], what the token at each position is to be, as the model's own labels: shifting them, and dividing
            a packed sequence, is the caller's. A label outside of the vocabulary gives 0, and no gradient.
        temperature, softcap, return_entropy: as of tempo_kernels' linear_log_prob. Where the model scales its logits
            (MuP), these are scaled first.
        vocab_size: the tokenizer's; rows that pad it have probability 0 then. By default they are in the softmax.

    Returns:
        log_prob [b, s], or (log_prob, entropy), float32 and differentiable: those of the whole vocabulary and sequence
        on every rank of the tensor-parallel group. On a pipeline's other stages what the model returns.

    Raises ValueError where the model has no fused loss head, for loss_mask and output_processor, and for what
    linear_log_prob refuses.
    """
    inner = get_attr_wrapped_model(model, "post_process", return_model_obj=True)
    if unused := inputs.keys() & {"loss_mask", "output_processor"}:
        raise ValueError(
            f"log_probs was given {', '.join(sorted(unused))}, which is for losses; expected none; leave it out"
        )
    if not inner.post_process:
        return model(input_ids, position_ids, attention_mask, labels=labels, **inputs)
    head = find_loss_head(inner)
    if head is None:
        raise ValueError(
            f"the {type(inner).__name__} has no fused loss head, which log_probs needs; call "
            'tempoize_loss(model, TempoConfig(loss="fused")) before it is wrapped'
        )
    head.log_prob = {
        "temperature": temperature,
        "softcap": softcap,
        "return_entropy": return_entropy,
        "vocab_size": vocab_size,
    }
    try:
        found = model(input_ids, position_ids, attention_mask, labels=labels, **inputs)
    finally:
        head.log_prob = None
    return (found[0], found[1]) if return_entropy else found[0]

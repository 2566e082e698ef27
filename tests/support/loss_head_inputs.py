"""What the tests of the loss head share: its inputs, settings, and the whole computation in torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

S, B, H, V = 7, 3, 24, 101


def reference(
    hidden,
    weight,
    bias,
    labels,
    *,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    vocab_size=None,
    token_weights=None,
    chunk_tokens=None,
):
    """The whole computation in torch, with the target distribution written out."""
    logits = F.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32)).transpose(0, 1)
    num_real = vocab_size or weight.size(0)
    expected = torch.zeros_like(logits)
    if label_smoothing:
        expected[..., :num_real] = label_smoothing / (num_real - 1)
    expected.scatter_(-1, labels.clamp_min(0).unsqueeze(-1), 1.0 - label_smoothing)
    losses = -(expected * logits.log_softmax(-1)).sum(-1) + z_loss * logits.logsumexp(-1).square()
    losses = losses.masked_fill(labels == ignore_index, 0.0)
    return losses if token_weights is None else ((token_weights * losses).sum(), losses)


def head_inputs(has_bias=True, s=S, b=B, v=V, scale=1.0):
    hidden, weight = torch.randn(s, b, H) * scale, torch.randn(v, H)
    return [hidden, weight, torch.randn(v) if has_bias else None]


def random_labels(s=S, b=B, v=V, ignored=(0, 5)):
    labels = torch.randint(v, (b, s))
    for place in ignored:
        labels.view(-1)[place] = -100
    return labels


CASES = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z loss": {"z_loss": 1e-2},
    "padded rows": {"vocab_size": 90},
    "everything": {"label_smoothing": 0.3, "z_loss": 1e-2, "vocab_size": 90},
}

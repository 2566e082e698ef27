"""What the tests of linear_log_prob share: the whole computation in torch, and which settings they try."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def reference(
    hidden, weight, bias, labels, *, temperature=1.0, softcap=None, return_entropy=True, ignore_index=-100,
    vocab_size=None, chunk_tokens=None,
):  # fmt: skip
    """The whole computation in torch: [log_prob, entropy] stacked, or log_prob."""
    logits = F.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32)).transpose(0, 1)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = (logits / temperature)[..., :vocab_size]
    log_probs = logits.log_softmax(-1)
    is_ignored = labels == ignore_index
    found = log_probs.gather(-1, labels.masked_fill(is_ignored, 0).unsqueeze(-1)).squeeze(-1)
    results = [found]
    if return_entropy:
        # Of a logit of -inf there is no part; torch's 0 * -inf is NaN.
        results.append(-(log_probs.exp() * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1))
    results = [t.masked_fill(is_ignored, 0.0) for t in results]
    return torch.stack(results) if return_entropy else results[0]


CASES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 5.0},
    "padded rows": {"vocab_size": 90},
    "everything": {"temperature": 1.3, "softcap": 3.0, "vocab_size": 90},
}

"""What the tests of the loss head share: both its functions, inputs, settings, and the whole computation in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob

S, B, H, V = 7, 3, 24, 101


def reference(
    hidden, weight, bias, labels, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, vocab_size=None,
    token_weights=None, chunk_tokens=None,
):  # fmt: skip
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


def log_prob_reference(
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
LOG_PROB_CASES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 5.0},
    "padded rows": {"vocab_size": 90},
    "everything": {"temperature": 1.3, "softcap": 3.0, "vocab_size": 90},
}


def losses(hidden, weight, bias, labels, **settings):
    return linear_cross_entropy(hidden, weight, labels, bias=bias, **settings)


def log_probs(hidden, weight, bias, labels, *, return_entropy=True, **settings):
    """[log_prob, entropy] stacked, or log_prob."""
    found = linear_log_prob(hidden, weight, labels, bias=bias, return_entropy=return_entropy, **settings)
    return torch.stack(found) if return_entropy else found


class Head(NamedTuple):
    """A function of hidden, weight, bias and labels, and the whole computation of the same in torch."""

    ours: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    cases: dict[str, dict[str, Any]]
    """Settings of both."""

    def random_grad(self, labels, return_entropy=True, **_):
        """Of what the function returns: [b, s], or [2, b, s]."""
        return torch.randn(*[2] * (self.ours is log_probs and return_entropy), *labels.shape)


HEADS = {
    "losses": Head(losses, reference, CASES),
    "log_probs": Head(log_probs, log_prob_reference, LOG_PROB_CASES),
}
EVERY_CASE = {f"{name}, {case}": (head, head.cases[case]) for name, head in HEADS.items() for case in head.cases}


def chunk_of_logits(rows, columns, dtype, scale=8.0, device="cpu"):
    """Logits, and targets of which some are on other shards."""
    logits = (torch.randn(rows, columns, device=device) * scale).to(dtype)
    targets = torch.randint(-columns // 4, columns + columns // 4 + 1, (rows,), device=device)
    targets[:2] = torch.tensor([0, columns - 1], device=device)[:rows]
    return logits, targets

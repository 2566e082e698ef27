"""The head: a vocabulary-parallel linear, and the cross entropy or the log-probabilities and entropies of its logits,
with the logits of a few tokens at a time."""

from tempo_kernels.linear_cross_entropy.function import linear_cross_entropy, linear_log_prob

__all__ = ["linear_cross_entropy", "linear_log_prob"]

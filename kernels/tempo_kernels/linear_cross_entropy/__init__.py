"""The loss head: a vocabulary-parallel linear and the cross entropy, or log-probabilities and entropies, of its logits.
Only the logits of one chunk of tokens exist at a time."""

from tempo_kernels.linear_cross_entropy.function import linear_cross_entropy, linear_log_prob

__all__ = ["linear_cross_entropy", "linear_log_prob"]

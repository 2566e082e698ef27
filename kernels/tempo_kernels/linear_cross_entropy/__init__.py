"""The loss head: a vocabulary-parallel linear and its cross entropy, with the logits of a few tokens at a time."""

from tempo_kernels.linear_cross_entropy.function import linear_cross_entropy

__all__ = ["linear_cross_entropy"]

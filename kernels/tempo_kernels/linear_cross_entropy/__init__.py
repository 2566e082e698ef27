"""The loss head: a vocabulary-parallel linear and the cross entropy, or log-probabilities and entropies, of its logits.
Only the logits of one chunk of tokens exist at a time."""

from tempo_kernels.linear_cross_entropy.checks import CHUNK_BYTES, use_chunk_bytes
from tempo_kernels.linear_cross_entropy.function import OPERATIONS, linear_cross_entropy, linear_log_prob

__all__ = ["CHUNK_BYTES", "OPERATIONS", "linear_cross_entropy", "linear_log_prob", "use_chunk_bytes"]

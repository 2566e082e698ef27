"""Bias, dropout, residual addition and the norm that follows, in one pass: what is added and what is normalised."""

from tempo_kernels.dropout_add_norm.function import bias_dropout_add_layer_norm, bias_dropout_add_rms_norm

__all__ = ["bias_dropout_add_layer_norm", "bias_dropout_add_rms_norm"]

"""Bias, dropout and residual addition in one operation that keeps nothing for backward."""

from tempo_kernels.dropout_add.function import bias_dropout_add
from tempo_kernels.dropout_add.settings import Draw

__all__ = ["Draw", "bias_dropout_add"]

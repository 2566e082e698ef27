"""Bias, dropout and residual addition in one operation that keeps nothing for backward."""

from tempo_kernels.dropout_add.draw import Draw
from tempo_kernels.dropout_add.function import bias_dropout_add

__all__ = ["Draw", "bias_dropout_add"]

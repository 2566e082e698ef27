"""Bias, dropout, residual addition and norm in plain torch: the specification is that of the two rooms in a row."""

from __future__ import annotations

from tempo_kernels.dropout_add import eager as dropout_add
from tempo_kernels.dropout_add_norm.in_a_row import InARow
from tempo_kernels.norm import eager as norm

_in_a_row = InARow(dropout_add, norm)
forward, backward, has_no_data = _in_a_row.forward, _in_a_row.backward, norm.has_no_data

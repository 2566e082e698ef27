"""Activations of x + bias that keep their input, and what operations with an activation share: its formulas, in torch
here and for Triton in kernel_activations.py, its bits, sums over rows, tiles."""

from tempo_kernels.pointwise.activations import ACTIVATIONS, Activation, double_product
from tempo_kernels.pointwise.cpu import choose_chunk_size
from tempo_kernels.pointwise.eager import smallest_at_least, sum_rows, unpack_bits
from tempo_kernels.pointwise.function import (
    ACTIVATE,
    OperationOfInput,
    activate,
    check_tensors,
    forward_with_bits,
    list_gradients,
    shape_gradients,
)

__all__ = [
    "ACTIVATE",
    "ACTIVATIONS",
    "Activation",
    "OperationOfInput",
    "activate",
    "check_tensors",
    "choose_chunk_size",
    "double_product",
    "forward_with_bits",
    "list_gradients",
    "shape_gradients",
    "smallest_at_least",
    "sum_rows",
    "unpack_bits",
]

"""Activations of x + bias that keep their input. Other operations share the formulas (activations.py, for Triton
kernel_activations.py), the packed bits, the tiles and the sums over rows."""

from tempo_kernels.activation.activations import ACTIVATIONS, Activation, double_product
from tempo_kernels.activation.cpu import choose_chunk_size
from tempo_kernels.activation.eager import smallest_at_least, sum_rows, unpack_bits
from tempo_kernels.activation.function import (
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

"""GELU, its derivative from the input and its derivative from the output, for the kernels."""

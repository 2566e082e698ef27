"""What the kernels of several pointwise operations share: formulas of activations."""

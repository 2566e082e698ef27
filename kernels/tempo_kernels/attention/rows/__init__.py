"""The passes of attention on a GPU in which a program owns a block of queries: forward, and the gradient of q."""

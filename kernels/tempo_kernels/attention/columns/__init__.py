"""The pass of attention on a GPU in which a program owns a block of keys: the gradients of k and v."""

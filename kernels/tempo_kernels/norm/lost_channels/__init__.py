"""What the norms keep beside their output on a GPU: the channels that it cannot carry."""

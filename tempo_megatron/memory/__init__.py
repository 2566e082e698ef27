"""Says how much memory training takes: what is kept for backward, what a step needs at its peak, and what fits."""

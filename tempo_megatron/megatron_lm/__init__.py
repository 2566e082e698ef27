"""`--use-tempo` for the training scripts of an unmodified Megatron-LM checkout."""

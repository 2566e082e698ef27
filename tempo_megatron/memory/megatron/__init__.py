"""From the command that starts a training script of Megatron-LM, or the configuration of a built model, to a Run."""

"""The training job: data preparation, the GPT trainer and its checkpoints."""

"""The training job: the GPT trainer and its checkpoints."""

from tempo_megatron.extras import check_installed

check_installed("the trainer", "train", "megatron.core", "deepspeed", "tokenizers", "tqdm")

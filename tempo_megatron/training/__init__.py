"""Trains GPTs and BERTs of Megatron-core under DeepSpeed, and keeps their checkpoints."""

from tempo_megatron.extras import check_installed

check_installed("the trainer", "train", "megatron.core", "deepspeed", "tokenizers", "tqdm")

"""Attention with dropout that keeps q, k, v, the output and one logsumexp per row: no s*s tensor, no mask."""

from tempo_kernels.attention.eager import use_gpu_blocks
from tempo_kernels.attention.function import OPERATIONS, attention, describe, list_flash_workspaces, list_gpu_workspaces
from tempo_kernels.attention.function_parts import (
    add_sink,
    attend_block,
    differentiate_block,
    differentiate_sink,
    merge_blocks,
)

__all__ = [
    "OPERATIONS", "add_sink", "attend_block", "attention", "describe", "differentiate_block", "differentiate_sink",
    "list_flash_workspaces", "list_gpu_workspaces", "merge_blocks", "use_gpu_blocks",
]  # fmt: skip

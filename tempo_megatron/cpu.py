"""Megatron-core without a GPU: all its parallelism, recomputation and RNG tracker on CPU and gloo.

Megatron-core asks `torch.cuda` for its current device, keeps its random states in the CUDA generator, and in a pipeline
moves tied embeddings to the GPU and counts tokens there. `use_cpu()` points all of it at the CPU; nothing else of
Megatron changes. What the CPU still cannot do (fused CUDA softmax, Apex, Transformer Engine) has to be off in the
TransformerConfig.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from tempo_megatron.extras import check_installed

_CPU = torch.device("cpu")


def _current_device() -> torch.device:
    return _CPU


def _get_rng_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.random.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.random.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that one also reaches for torch.cuda.
    torch.default_generator.manual_seed(seed)


class _TorchOfSchedules(types.ModuleType):
    """torch, as Megatron's schedules of a pipeline see it: they make zeros on the literal device "cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **{**options, "device": _CPU})


def _stay(tensor: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
    return tensor


def _make_window_mask(sq: int, skv: int, window_size: tuple[int, int]) -> torch.Tensor:
    """Megatron's mask of a sliding window, [sq, skv], True = hidden; its own is made on the literal device "cuda"."""
    keys, queries = (torch.arange(first, skv, dtype=torch.int64) for first in (0, skv - sq))
    distance = keys - queries.unsqueeze(1)
    return (distance < -window_size[0]) | (distance > window_size[1])


def _slice_position_embeddings(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """The rows of this context-parallel rank, its two chunks; Megatron's own puts their numbers in pinned memory."""
    chunks = pos_emb.chunk(2 * cp_group.size(), seq_dim)
    return torch.cat((chunks[cp_group.rank()], chunks[2 * cp_group.size() - 1 - cp_group.rank()]), seq_dim)


class _DropCpuStateWarning(logging.Filter):
    """Drops a warning: here the CPU generator is the device's, and fork() is there to let that one move."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def use_cpu() -> None:
    """Let Megatron-core run on the CPU in this process. Call it once, before building any Megatron module.

    After it `torch.cuda.current_device()` answers `torch.device("cpu")`, `tensor.cuda()` the tensor itself, and
    `torch.cuda.manual_seed`, `torch.cuda.get_rng_state` and Megatron's tracker work on the CPU generator, with its
    separate states for tensor-parallel and replicated regions. Sliding windows make their masks, and context
    parallelism slices rotary embeddings, on the CPU too. TransformerConfig needs `use_cpu_initialization=True`, and
    with a pipeline `batch_p2p_sync=False`.
    A second call changes nothing. Do not use CUDA in a process that has called it.

    Raises MissingExtraError with the command that installs Megatron-core where it is missing.
    """
    if is_used():
        return
    check_installed("use_cpu()", "megatron", "megatron.core")
    from megatron.core.fusions import fused_softmax
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random as megatron_random

    torch.cuda.current_device = _current_device  # type: ignore[assignment]
    torch.cuda.get_rng_state = _get_rng_state
    torch.cuda.manual_seed = _manual_seed
    torch.Tensor.cuda = _stay  # type: ignore[assignment, method-assign]
    megatron_random._get_cuda_rng_state = _get_rng_state
    megatron_random._set_cuda_rng_state = _set_rng_state
    if hasattr(fused_softmax, "get_sliding_window_causal_mask"):  # since 0.15
        fused_softmax.get_sliding_window_causal_mask = _make_window_mask
    schedules.torch = _TorchOfSchedules("torch")
    for module in (rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding):
        module.get_pos_emb_on_this_cp_rank = _slice_position_embeddings
    logging.getLogger(megatron_random.__name__).addFilter(_DropCpuStateWarning())


def is_used() -> bool:
    """Whether `use_cpu()` has been called in this process."""
    current: Callable[[], object] = torch.cuda.current_device
    return current is _current_device

"""Reads the files that DeepSpeed writes for a checkpoint, without its engine and without running code.

Without ZeRO the model's file of each tensor-parallel rank holds its weights. With ZeRO 1 to 3 its data-parallel ranks
each hold a part of them, as float32 values; DeepSpeed's own functions put them together.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.utils import zero_to_fp32
from torch import Tensor

from tempo_megatron.training.checkpoint_files.files import read_tensors


def read_rank(checkpoint: Path, tp_rank: int, data_parallel_size: int, zero_stage: int) -> dict[str, Tensor]:
    """The weights of one tensor-parallel rank, by Megatron's names, on the CPU.

    Float32 from ZeRO 1 to 3, whatever precision was trained; without ZeRO the dtype of the model.

    Raises ValueError where a file is missing or damaged, or holds what is neither a tensor nor known.
    """
    if zero_stage == 0:
        module = _read(find_model_file(checkpoint, tp_rank, 0))["module"]
        return {name: value for name, value in module.items() if isinstance(value, Tensor)}
    partitions = range(data_parallel_size)
    # Only ZeRO 3 divides the model's own weights, and then their shapes stand in one file per data-parallel rank.
    model_ranks = partitions if zero_stage == 3 else range(1)
    models = [_read(find_model_file(checkpoint, tp_rank, zero_stage, rank)) for rank in model_ranks]
    optimizers = [_read(find_optimizer_file(checkpoint, tp_rank, rank))["optimizer_state_dict"] for rank in partitions]
    return _join(models, optimizers, zero_stage)


def _join(models: list[dict[str, Any]], optimizers: list[dict[str, Any]], zero_stage: int) -> dict[str, Tensor]:
    """What zero_to_fp32 does once it has read the files of one tensor-parallel rank."""
    states = [
        SimpleNamespace(
            buffers={},
            param_shapes=model["param_shapes"],
            shared_params=list(model["shared_params"].items()),
            frozen_param_shapes=model["frozen_param_shapes"],
            frozen_param_fragments=model["frozen_param_fragments"],
        )
        for model in models
    ]
    # DeepSpeed reports its progress on stdout and stderr, per rank.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if zero_stage == 3:
            groups = [optimizer["fp32_flat_groups"] for optimizer in optimizers]
            joined = zero_to_fp32._get_fp32_state_dict_from_zero3_checkpoint(len(groups), groups, states, False)
        else:
            groups = [optimizer["single_partition_of_fp32_groups"] for optimizer in optimizers]
            # Versions that do not write paddings between parameters do not know the argument either.
            paddings = {name: optimizers[0][name] for name in ("param_alignment_paddings",) if name in optimizers[0]}
            joined = zero_to_fp32._get_fp32_state_dict_from_zero2_checkpoint(
                len(groups), groups, states, False, **paddings
            )
    return {name: value.contiguous().detach() for name, value in joined.items()}


def find_model_file(checkpoint: Path, tp_rank: int, zero_stage: int, dp_rank: int = 0) -> Path:
    """DeepSpeed's file of the model; only ZeRO 3 has one per data-parallel rank."""
    prefix = f"zero_pp_rank_{dp_rank}_" if zero_stage == 3 else ""
    return checkpoint / f"{prefix}mp_rank_{tp_rank:02d}_model_states.pt"


def find_optimizer_file(checkpoint: Path, tp_rank: int, dp_rank: int) -> Path:
    """DeepSpeed's file of one rank's optimizer under ZeRO; its bf16 optimizer puts a prefix before the name."""
    name = f"zero_pp_rank_{dp_rank}_mp_rank_{tp_rank:02d}_optim_states.pt"
    prefixed = checkpoint / f"bf16_{name}"
    return prefixed if prefixed.exists() else checkpoint / name


def _read(path: Path) -> dict[str, Any]:
    # Mapped, so that the optimizer's moments, two thirds of a file, are never read.
    content: dict[str, Any] = read_tensors(path, is_mapped=True)
    return content

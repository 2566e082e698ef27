"""Loads a checkpoint of another layout: another tensor, pipeline or data parallel size, another ZeRO stage.

Every rank reads the elements of the weights and moments that it holds now, parameter by parameter. Nothing has to be
converted first, and a kill leaves the checkpoint as it was.
"""

from __future__ import annotations

import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tempo_megatron.training.checkpoint_files.saved_state import SavedState
from tempo_megatron.training.checkpoint_files.sharding import MOMENTS, Fragment, Partition, get_partition
from tempo_megatron.training.engine import Engine, take_scale
from tempo_megatron.training.ranks import gather, raise_on_all_ranks
from tempo_megatron.training.run.deepspeed_config import read_offload_device
from tempo_megatron.training.run.run_config import RunConfig

_SECONDS_BETWEEN_LINES = 10


def describe_rank(engine: Engine) -> dict[str, Any]:
    """Describes this rank's part of the checkpoint for a later run of another layout, in plain types."""
    return {
        "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "cuts": {name: cut.pack() for name, cut in engine.cuts.items()},
        "fragments": get_partition(engine.deepspeed).pack(),
    }


def load_resharded(engine: Engine, source: SavedState, run: RunConfig) -> None:
    """Loads weights, moments, steps and loss scale of `source` into `engine`; every rank calls it.

    Raises ValueError as load_weights does.
    """
    load_weights(engine, source, run, with_moments=True)
    scale = source.read_loss_scaler()
    if scale is not None and getattr(engine.deepspeed.optimizer, "loss_scaler", None) is not None:
        take_scale(engine.deepspeed.optimizer.loss_scaler, scale)
    counts = source.read_model_file()
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine.deepspeed, name, counts[name])


@torch.no_grad()
def load_weights(engine: Engine, source: SavedState, run: RunConfig, *, with_moments: bool = False) -> None:
    """Loads the weights of `source` into `engine`, perhaps with the optimizer's moments; every rank calls it.

    Raises ValueError on every rank, before anything is changed, if the checkpoint is of another model or the
    optimizer's states are on NVMe, where they cannot be reached.
    """
    if read_offload_device(run.deepspeed) == "nvme":
        raise ValueError(
            f"{source.where} has another layout or is of another run, and states that are offloaded to nvme cannot be "
            'filled from it; use "cpu" for zero_optimization.offload_optimizer.device, or the layout of the checkpoint'
        )
    names = {name for name, _ in engine.deepspeed.module.named_parameters()}
    tp = parallel_state.get_tensor_model_parallel_world_size()
    elsewhere = set().union(*gather(names)) - names
    raise_on_all_ranks(source.find_mismatch(engine.cuts, names, tp, elsewhere))
    optimizer = engine.deepspeed.optimizer
    if engine.zero_stage == 3:
        optimizer.checkpoint_event_prologue()
    moments, fault = MOMENTS if with_moments and source.has_moments() else (), None
    try:
        _fill(get_partition(engine.deepspeed), source, engine, moments)
    except ValueError as error:  # of a file that perhaps only this rank reads
        fault = str(error)
    raise_on_all_ranks(fault)
    _publish(engine)


def _fill(partition: Partition, source: SavedState, engine: Engine, moments: tuple[str, ...]) -> None:
    """Fills every fragment of this rank; rank 0 prints its progress now and then."""
    keys = ("weight", *moments)
    tp, tp_rank = engine.tensor_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    total, done, said = sum(fragment.size for fragment in partition.fragments), 0, time.monotonic()
    for fragment in partition.fragments:
        states = _prepare_states(partition, fragment, source) if moments else {}
        cut = engine.cuts.get(fragment.name)
        for key in keys:
            flat = partition.groups[fragment.group].data if key == "weight" else states[key]
            values = source.read(fragment.name, key, fragment.first, fragment.last, cut=cut, tp=tp, tp_rank=tp_rank)
            flat.view(-1)[fragment.start : fragment.start + fragment.size].copy_(values)
        done += fragment.size
        if dist.get_rank() == 0 and time.monotonic() - said > _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            what = "weights and moments" if moments else "weights"
            print(f"{done / total:.0%} of the {what} of rank 0 are read", flush=True)


def _prepare_states(partition: Partition, fragment: Fragment, source: SavedState) -> dict[str, Any]:
    """Returns the optimizer's states of a flat tensor, and makes those that do not exist yet."""
    group, step = partition.groups[fragment.group], source.read_step(fragment.name)
    states: dict[str, Any] = partition.optimizer.state[group]
    for key in MOMENTS:
        if key not in states:
            states[key] = torch.zeros_like(group, requires_grad=False)
    is_on_the_cpu = isinstance(partition.optimizer, deepspeed.ops.adam.DeepSpeedCPUAdam)
    states["step"] = int(step) if is_on_the_cpu else torch.tensor(step, dtype=torch.float32, device=group.device)
    return states


def _publish(engine: Engine) -> None:
    """Copies the master weights into the model, in its precision and on every data-parallel rank."""
    optimizer = engine.deepspeed.optimizer
    if engine.zero_stage == 3:
        # Loading only the flat groups makes DeepSpeed copy them to the parameters, offloaded ones too.
        state = {
            "loss_scaler": optimizer.loss_scaler,
            "dynamic_loss_scale": optimizer.dynamic_loss_scale,
            "overflow": optimizer.overflow,
            "fp32_flat_groups": optimizer.fp32_partitioned_groups_flat,
        }
        size = parallel_state.get_data_parallel_world_size()
        optimizer.load_state_dict([state] * size, load_optimizer_states=False)
        optimizer.checkpoint_event_epilogue()
    elif engine.zero_stage:
        optimizer.update_lp_params()

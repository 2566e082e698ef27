"""Plans the memory of a starting run, in a separate process.

The estimate needs model parallelism of its own and lets Megatron's modules run on a CPU, so that it cannot run where a
run's process groups are. One rank asks, and the others are told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tempo_megatron.beside import Beside
from tempo_megatron.memory.plan.gpu import Gpu, list_gpus, read_gpu
from tempo_megatron.memory.plan.planner import PlanRequest
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.words.argument_types import format_bytes

_UNKNOWN_DEVICE = "h100"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run does with its budget."""

    block: dict[str, Any]
    """The "tempo" block, without "auto"."""
    recompute: tuple[str, ...]
    """Megatron's: nothing, ("full",), or any of "core_attn" and "mlp"."""
    num_full: int
    """The first layers of every stage that are recomputed as a whole."""
    peak_bytes: int
    """Estimated, of the fullest rank."""
    budget: int
    gpu_title: str
    """Whose rates say what is fastest."""

    @property
    def tempo(self) -> TempoConfig:
        return TempoConfig.from_dict(self.block)

    def describe(self) -> str:
        """Lines for a banner."""
        words = "none"
        if self.num_full:
            words = f"the first {self.num_full} layers of every stage as a whole"
        elif self.recompute:
            words = f"{' and '.join(self.recompute)} of every layer"
        return (
            f"budget {format_bytes(self.budget)}, estimated peak {format_bytes(self.peak_bytes)}, "
            f"shortest by the rates of {self.gpu_title}\n{self.tempo.describe()}\nrecomputed by Megatron: {words}"
        )


def find_gpu(device_name: str | None) -> Gpu:
    """The rates of a device that torch names so; those of an H100 where no file is for it, or there is none."""
    for name in list_gpus():
        if device_name is not None and name in device_name.lower().replace(" ", ""):
            return read_gpu(name)
    return read_gpu(_UNKNOWN_DEVICE)


def plan_for_all_ranks(make_request: Callable[[], PlanRequest], budget: int) -> RunPlan:
    """`plan_beside` on rank 0, whose plan, or error, every rank gets. All ranks call it.

    Raises ValueError where nothing fits, or the planner does not know the run.
    """
    found: list[RunPlan | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            found = [plan_beside(make_request(), budget)]
        except ValueError as error:
            found = [f"memory budget: {error}"]
    dist.broadcast_object_list(found, src=0)
    (plan,) = found
    if isinstance(plan, str):
        raise ValueError(plan)
    assert plan is not None
    return plan


def plan_beside(request: PlanRequest, budget: int) -> RunPlan:
    """The plan, made by a process of its own.

    Args:
        request: what is to be planned.
        budget: bytes of one rank.

    Raises ValueError where nothing fits, or the planner does not know the model.
    """
    found = Beside("tempo_megatron.memory.live.aside:make_run_plan", request, budget).wait()
    assert isinstance(found, RunPlan)
    return found


def make_run_plan(request: PlanRequest, budget: int) -> RunPlan:
    """As `plan_beside`, in the process that calls it."""
    from tempo_megatron.memory.plan.verify import answer

    plan, _ = answer(request, budget)
    return RunPlan(
        block=plan.block,
        recompute=tuple(sorted(plan.recompute)),
        num_full=plan.num_full,
        peak_bytes=plan.peak_bytes,
        budget=budget,
        gpu_title=f"{request.gpu.title}{'' if request.gpu.calibrated else ' (data sheet)'}",
    )

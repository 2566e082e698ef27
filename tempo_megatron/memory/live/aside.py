"""Plans the memory of a starting run, in a separate process.

The estimate needs model parallelism of its own and lets Megatron's modules run on a CPU, so it cannot run in a process
that has the run's process groups. Rank 0 asks for the plan and sends it to the other ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tempo_kernels.offload import count_ranks_of_host, get_free_host_bytes
from tempo_megatron.beside import Beside
from tempo_megatron.memory.plan.planner import MemoryPlan, Planner, PlanRequest
from tempo_megatron.words.argument_types import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan(MemoryPlan):
    """The plan of a run with a memory budget."""

    budget: int
    """Bytes of one rank."""
    gpu_title: str
    """The GPU whose rates decide which plan is fastest."""

    def as_record(self) -> dict[str, Any]:
        """For the metrics file."""
        names = ("block", "recompute", "num_full", "peak_bytes", "host_bytes", "budget", "gpu_title")
        return {name: getattr(self, name) for name in names}

    def describe(self) -> str:
        """Lines for a banner."""
        recomputed = f"{' and '.join(self.recompute)} of every layer" if self.recompute else "none"
        if self.num_full:
            recomputed = f"the first {self.num_full} layers of every stage as a whole"
        on_host = f", {format_bytes(self.host_bytes)} of each rank on the host" if self.host_bytes else ""
        return (
            f"budget {format_bytes(self.budget)}, estimated peak {format_bytes(self.peak_bytes)}{on_host}, "
            f"shortest by the rates of {self.gpu_title}\n{self.tempo.describe()}\nrecomputed by Megatron: {recomputed}"
        )


def share_host(num_bytes: int) -> int:
    """What one rank has of the memory that a budget gives to all ranks of this host.

    Raises ValueError where the host has less free.
    """
    free = get_free_host_bytes()
    if free is not None and num_bytes > free:
        raise ValueError(
            f"tempo.host_memory is {format_bytes(num_bytes)}, and {format_bytes(free)} of this host are free; give at "
            "most these"
        )
    return num_bytes // count_ranks_of_host()


def plan_for_all_ranks(make_request: Callable[[], PlanRequest], budget: int) -> RunPlan:
    """The plan that a process beside rank 0 makes, where `make_request` is called, for so many bytes of one rank.

    All ranks call this, and all get the plan, or the same ValueError: nothing fits, or the planner does not know the
    run.
    """
    found: list[RunPlan | ValueError | None] = [None]
    if dist.get_rank() == 0:
        try:
            found = [Beside("tempo_megatron.memory.live.aside:make_run_plan", make_request(), budget).wait()]
        except ValueError as error:
            found = [ValueError(f"memory budget: {error}")]
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], RunPlan):
        return found[0]
    assert found[0] is not None
    raise found[0]


def make_run_plan(request: PlanRequest, budget: int) -> RunPlan:
    """The verified plan of a request, made in this process."""
    gpu_title = f"{request.gpu.title}{'' if request.gpu.calibrated else ' (data sheet)'}"
    return RunPlan(**vars(Planner(request).plan(budget)), budget=budget, gpu_title=gpu_title)

"""Trains a model whose layers lie on several pipeline stages: Megatron-core's schedules, DeepSpeed's optimizer.

Megatron's schedule drives forward and backward of all micro batches of a step on the bare modules. DeepSpeed's engine
does what comes after the last of them: it reduces the gradients over the data-parallel ranks, and makes the step. So
1F1B, interleaving, the transfers between stages and the names of the weights are Megatron's, as without a pipeline.
DeepSpeed's own pipeline engine has no interleaving, builds a model of its own kind of layers, which would change every
name in a checkpoint, and corrupts the activations of sequence parallelism unless two of its defaults are changed.

The engine does not see the micro batches. To it a step is one large micro batch, whose gradients the hooks of its
optimizer have added up in the precision of "grad_accum_dtype". The schedule itself divides each loss by their number,
and scales it for fp16. Until the last backward has run the engine is told that no step ends
(`set_gradient_accumulation_boundary`), so that nothing is reduced early. ZeRO 2 and 3 reduce in every backward pass, of
which the schedule has several under way, so they are refused, as DeepSpeed's pipeline engine refuses them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from tempo_megatron.models.stage import PipelineStage
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.task import LOSS, Batch, Task
from tempo_megatron.words.deepspeed_json import BATCH_KEYS

REPLICATED = "ds_pipe_replicated"
"""DeepSpeed's mark of a parameter that another stage counts in the norm of the gradients."""


def prepare(stage: PipelineStage, config: dict[str, Any], run: RunConfig) -> None:
    """Makes a stage and the DeepSpeed JSON, both changed in place, ready for an engine that sees no micro batches."""
    if (copy := stage.find_embedding_copy()) is not None:
        setattr(copy, REPLICATED, True)
    _, micro_key, steps_key = BATCH_KEYS
    config |= {micro_key: run.micro_batch_size * run.num_micro_batches, steps_key: 1}
    if run.precision == "bf16":
        # Otherwise DeepSpeed's BF16_Optimizer would add up the micro batches in bf16.
        config["bf16"]["immediate_grad_update"] = True
    if run.precision == "fp32" and not config["zero_optimization"]["stage"]:
        config["gradient_clipping"] = 0.0  # Engine.step_after_schedule clips


def sum_tied_gradients(stage: PipelineStage) -> None:
    """Sums the gradients of word embeddings that first and last stage share, wherever DeepSpeed adds them up."""
    weight: Any = stage.find_tied_weight()
    if weight is None:
        return
    places = (getattr(weight, name, None) for name in ("_hp_grad", "grad_accum", "grad"))
    grad = next(found for found in places if found is not None)
    total = grad.float()  # the gradient itself where it is float32
    dist.all_reduce(total, group=parallel_state.get_embedding_group())
    if total is not grad:
        grad.copy_(total)


class Schedule:
    """Runs micro batches through the stages by Megatron's schedule; every rank of the pipeline calls it at once.

    `scale` scales a loss before its backward, for fp16.
    """

    def __init__(
        self, stage: PipelineStage, task: Task, run: RunConfig, scale: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.chunks: list[Any] = list(stage.chunks)
        self.task, self.run = task, run
        for chunk in self.chunks:
            chunk.config.grad_scale_func = scale
        self._run_schedule = get_forward_backward_func()

    def run_step(
        self, batches: Iterable[Batch], number: int, announce: Callable[[int], None] | None
    ) -> list[dict[str, Tensor]]:
        """Runs forward and backward of `number` micro batches; the gradients add up in the parameters.

        Every stage reads the same ones. `announce` is called with the number of a micro batch before each forward of
        it; with None this runs forward alone.

        Returns the losses of each micro batch on the last stage, and an empty list on the others.
        """

        def step(iterator: Iterator[tuple[int, Batch]], chunk: Any) -> tuple[Any, Callable[..., Any]]:
            micro_batch, batch = next(iterator)
            if announce is not None:
                announce(micro_batch)
            return self.task.run_model(self.run, chunk, batch), functools.partial(self._compute_loss, batch)

        # Each chunk takes the micro batches in order; a batch is read once, for the first chunk that needs it.
        iterators = list(itertools.tee(enumerate(batches), len(self.chunks)))
        found: list[dict[str, Tensor]] = self._run_schedule(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=number,
            seq_length=self.run.model.seq_length,
            micro_batch_size=self.run.micro_batch_size,
            forward_only=announce is None,
        )
        return found

    def _compute_loss(self, batch: Batch, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        losses = self.task.compute_losses(output, batch)
        # The schedule divides the first one in place.
        return losses[LOSS], {name: loss.detach().clone() for name, loss in losses.items()}


def share_from_last_stage(value: Any, device: torch.device) -> Any:
    """Returns what the last stage was given, on every stage; the others may give anything."""
    held = [value]
    group = parallel_state.get_pipeline_model_parallel_group()
    last: int = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(held, src=last, group=group, device=device)
    return held[0]


def is_last_stage() -> bool:
    """Whether this rank's stage computes the losses; true without a pipeline."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))

"""Runs a Megatron model in DeepSpeed's engine: process groups, optimizer, schedule.

It also sums the gradients of sequence-parallel parameters, which DeepSpeed does not do.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor
from torch.utils.cpp_extension import get_default_build_root

from tempo_megatron.models.stage import PipelineStage
from tempo_megatron.training import pipeline
from tempo_megatron.training.checkpoint_files.files import CheckpointFiles
from tempo_megatron.training.checkpoint_files.sharding import Cut, get_cuts
from tempo_megatron.training.metrics import MonitorBuffer
from tempo_megatron.training.ranks import MPU
from tempo_megatron.training.run.deepspeed_config import copy_deepspeed_config, offloads_optimizer, read_zero_stage
from tempo_megatron.training.run.run_config import RunConfig

_STALE_SECONDS = 600.0  # no build of an extension takes that long
# What a user can do whose model has diverged; the last checkpoint is older than that.
REMEDY = (
    "lower --lr, lengthen --lr-warmup-iters or give a lower --clip-grad above 0, and start anew or go on from the last "
    "checkpoint with --load (another schedule then needs --override-opt-param-scheduler)"
)


def sum_partial_gradients(model: torch.nn.Module) -> None:
    """Makes autograd sum the gradients that are partial on each tensor-parallel rank over the group.

    These are the gradients of parameters marked `sequence_parallel`, whose ranks see different tokens, and of the norms
    of queries and keys, whose ranks see different heads, with sequence parallelism or without. Latent attention has
    norms of these names before it makes heads, and their gradients are complete. DeepSpeed does not know
    this. A hook sums each gradient as soon as it exists, so that every ZeRO stage reduces complete gradients.
    """
    group = parallel_state.get_tensor_model_parallel_group()

    def sum_over_ranks(grad: Tensor) -> Tensor:
        total = grad.to(torch.float32, copy=True)
        dist.all_reduce(total, group=group)
        return total.to(grad.dtype)

    attentions = [module for module in model.modules() if isinstance(module, SelfAttention)]
    norms = [norm for each in attentions for norm in (each.q_layernorm, each.k_layernorm) if norm is not None]
    of_heads = {id(parameter) for norm in norms for parameter in norm.parameters()}
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False) or id(parameter) in of_heads:
            parameter.register_hook(sum_over_ranks)


def mark_divided_parameters(model: torch.nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Marks each parameter of which a tensor-parallel rank has a part, for the norm of all gradients.

    Megatron leaves the sinks of attention unmarked (transformer/dot_product_attention.py:121 of megatron-core 0.16.1),
    and an unmarked parameter counts on the first rank alone.
    """
    for name, parameter in model.named_parameters():
        if name in cuts and cuts[name].local_shape != cuts[name].shape:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def group_by_decay(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Makes two parameter groups by Megatron's rule: biases and parameters of one dimension (norms) do not decay."""
    decayed: dict[str, Any] = {"params": [], "weight_decay": weight_decay, "wd_mult": 1.0}
    kept: dict[str, Any] = {"params": [], "weight_decay": 0.0, "wd_mult": 0.0}
    for name, parameter in model.named_parameters():
        dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
        (kept if dimensions == 1 or name.endswith(".bias") else decayed)["params"].append(parameter)
    return [decayed, kept]


def build_optimizer(model: torch.nn.Module, run: RunConfig) -> torch.optim.Optimizer:
    """Builds AdamW over group_by_decay: torch's fused one, or DeepSpeed's CPU one if the JSON offloads its states."""
    groups = group_by_decay(model, run.weight_decay)
    options: dict[str, Any] = {"lr": run.lr, "betas": (run.adam_beta1, run.adam_beta2), "eps": run.adam_eps}
    if offloads_optimizer(run.deepspeed):
        return deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **options)  # type: ignore[no-any-return]
    return torch.optim.AdamW(groups, fused=True, **options)


def build_scheduler(optimizer: torch.optim.Optimizer, run: RunConfig) -> OptimizerParamScheduler:
    """Builds Megatron's learning rate schedule, which counts samples: those of the steps that the run gives."""
    count_samples = run.batch_sizes.count_samples
    warmup, decay = count_samples(run.lr_warmup_iters), count_samples(run.lr_decay_iters)
    wsd_decay = None
    if run.lr_wsd_decay_iters is not None:  # the last of the steps of decay
        wsd_decay = decay - count_samples(run.lr_decay_iters - run.lr_wsd_decay_iters)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=run.lr,
        min_lr=run.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=run.lr_decay_style,
        wsd_decay_steps=wsd_decay,
        lr_wsd_decay_style=run.lr_wsd_decay_style,
        start_wd=run.weight_decay,
        end_wd=run.weight_decay,
        wd_incr_steps=0,  # the weight decay is constant
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        # `run` already has the checkpoint's settings; only the position is loaded from the checkpoint.
        override_opt_param_scheduler=True,
    )


class Engine:
    """DeepSpeed's engine and the schedule of one run, for a model of model.build_model."""

    def __init__(self, model: torch.nn.Module, run: RunConfig) -> None:
        self.run, self.zero_stage = run, read_zero_stage(run.deepspeed)
        self.cuts = get_cuts(model)
        mark_divided_parameters(model, self.cuts)
        self._samples_per_step = run.global_batch_size
        self._computes_norm = self.zero_stage == 0 and run.precision == "fp32"
        self._grad_norm: Tensor | None = None
        self._num_micro_batches = run.num_micro_batches
        if run.tensor_model_parallel_size > 1:
            sum_partial_gradients(model)
        given = copy_deepspeed_config(run.deepspeed)
        if isinstance(model, PipelineStage):
            pipeline.prepare(model, given, run)
        refuse_stale_locks()
        # DeepSpeed's bf16 optimizer prints a page about memory at any log level.
        with contextlib.redirect_stdout(sys.stdout if given.get("memory_breakdown") else io.StringIO()):
            self.deepspeed, optimizer, _, _ = deepspeed.initialize(
                model=model, optimizer=build_optimizer(model, run), config=given, mpu=MPU()
            )
        self.files = self.deepspeed.checkpoint_engine = CheckpointFiles(run.async_save)
        # DeepSpeed copies scripts to the checkpoint. On a full disk that would raise while the other ranks wait.
        copy_scripts = self.deepspeed._copy_recovery_script
        self.deepspeed._copy_recovery_script = functools.partial(self.files.attempt, copy_scripts)
        if isinstance(model, PipelineStage):
            self.deepspeed.set_gradient_accumulation_boundary(False)
        monitor = self.deepspeed.monitor
        self.monitors = self.deepspeed.monitor = MonitorBuffer(monitor if monitor.enabled else None)
        self.optimizer_name = type(optimizer).__name__
        self.scheduler = build_scheduler(optimizer, run)

    def begin_step(self, samples: int, num_micro_batches: int) -> None:
        """Takes the global batch size of the step that follows, and the micro batches of one rank in it."""
        self._samples_per_step, self._num_micro_batches = samples, num_micro_batches
        if isinstance(self.deepspeed.module, PipelineStage):  # its whole step is one micro batch of DeepSpeed's
            self.deepspeed.set_train_micro_batch_size(samples // self.deepspeed.dp_world_size)
        else:
            self.deepspeed.set_train_batch_size(samples)
            # DeepSpeed takes the number of all micro batches so far modulo those of a step.
            self.deepspeed.micro_steps = 0

    def backward_and_step(self, loss: Tensor) -> None:
        """Runs backward of one micro batch and, after the last one of a step, updates weights and schedule."""
        if self.run.model.num_experts is not None:
            # Routers' losses join in backward; as in Megatron's schedules, each micro batch has its share of a step.
            weight = (self.loss_scale or 1.0) / self._num_micro_batches
            MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(weight, dtype=torch.float32, device=loss.device))
        self.deepspeed.backward(loss)
        self._step(self.deepspeed.is_gradient_accumulation_boundary())

    def step_after_schedule(self) -> None:
        """Updates weights and schedule by the gradients that Megatron's schedule of a pipeline has accumulated.

        DeepSpeed clips by a norm over the tensor-parallel group of one stage where there is no ZeRO, so that the
        gradients are clipped here.
        """
        pipeline.sum_tied_gradients(self.deepspeed.module)
        self.deepspeed.set_gradient_accumulation_boundary(True)
        self.deepspeed.allreduce_gradients()
        self._step(is_last=True, clips=self.run.clip_grad > 0)
        self.deepspeed.set_gradient_accumulation_boundary(False)

    def _step(self, is_last: bool, *, clips: bool = False) -> None:
        if is_last and self._computes_norm:
            self._grad_norm = compute_gradient_norm(self.deepspeed.module)
            if clips:
                parameters = self.deepspeed.module.parameters()
                torch.nn.utils.clip_grads_with_norm_(parameters, self.run.clip_grad, self._grad_norm)
        try:
            self.deepspeed.step()
        except Exception as error:
            if not str(error).startswith("Current loss scale already at minimum"):
                raise
            raise ValueError(
                f"the loss scale of fp16 is at its minimum and gradients still overflow; {REMEDY}"
            ) from error
        # As in Megatron, a step that fp16 skips does not advance the schedule.
        if is_last and self.deepspeed.was_step_applied():
            self.scheduler.step(self._samples_per_step)

    def load(self, checkpoint: Path) -> None:
        """Restores model and optimizer from a folder that save_checkpoint wrote; the settings stay those of the run."""
        run, optimizer = self.run, self.deepspeed.optimizer
        loss_scaler = getattr(optimizer, "loss_scaler", None)
        self.deepspeed.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name, load_lr_scheduler_states=False)
        for group in self.scheduler.optimizer.param_groups:
            group["betas"], group["eps"] = (run.adam_beta1, run.adam_beta2), run.adam_eps
        if hasattr(optimizer, "clip_grad"):
            optimizer.clip_grad = run.clip_grad
        if loss_scaler is not None:
            take_scale(loss_scaler, optimizer.loss_scaler)
            optimizer.loss_scaler, optimizer.dynamic_loss_scale = loss_scaler, loss_scaler.dynamic

    def read_settings(self) -> dict[str, Any]:
        """Reads the settings that the optimizer works with."""
        groups = self.scheduler.optimizer.param_groups
        return {
            "adam_betas": list(groups[0]["betas"]),
            "adam_eps": groups[0]["eps"],
            "weight_decay": max(group["weight_decay"] for group in groups),
            "clip_grad": getattr(self.deepspeed.optimizer, "clip_grad", self.run.clip_grad),
        }

    def scale(self, loss: Tensor) -> Tensor:
        """Scales a loss for fp16, as `deepspeed.backward` does."""
        return loss * self.loss_scale if self.loss_scale else loss

    @property
    def grad_norm(self) -> Tensor | float | None:
        """The norm of the last step's gradients over all ranks, before clipping; it may still be on the device."""
        return self._grad_norm if self._computes_norm else self.deepspeed.get_global_grad_norm()

    @property
    def learning_rate(self) -> float:
        return float(self.scheduler.optimizer.param_groups[0]["lr"])

    @property
    def scales_dynamically(self) -> bool:
        """Whether fp16 searches for its loss scale and skips the steps that overflow."""
        return self.deepspeed.fp16_enabled() and bool(self.deepspeed.optimizer.dynamic_loss_scale)

    @property
    def loss_scale(self) -> float | None:
        return float(self.deepspeed.optimizer.loss_scale) if self.deepspeed.fp16_enabled() else None


def take_scale(own: Any, saved: Any) -> None:
    """Continues DeepSpeed's dynamic loss scaler `own` from `saved`; a static scale stays as in the JSON."""
    if own.dynamic and saved.dynamic:
        for name in ("cur_scale", "cur_iter", "last_overflow_iter"):
            setattr(own, name, getattr(saved, name))
        own.cur_hysteresis = min(own.delayed_shift, saved.cur_hysteresis)


@torch.no_grad()
def compute_gradient_norm(model: torch.nn.Module) -> Tensor:
    """Computes the 2-norm of unpartitioned gradients over all tensor-parallel ranks and stages, each parameter once.

    It does not wait for the device.
    """
    grads = [each.grad for each in list_counted_parameters(model) if each.grad is not None]
    return _compute_norm(grads, next(model.parameters()).device, parallel_state.get_model_parallel_group())


@torch.no_grad()
def compute_parameter_norm(model: torch.nn.Module) -> Tensor:
    """Computes the 2-norm of the model's parameters over all ranks, each parameter once, in float32.

    Of a parameter that ZeRO 3 has partitioned each data-parallel rank counts its part. It does not wait for the device.
    """
    rank = parallel_state.get_data_parallel_rank()

    def get_part(parameter: Any) -> Tensor:
        part: Tensor = getattr(parameter, "ds_tensor", parameter)
        if part is not parameter:  # the last ranks' parts may be padded
            part = part.flatten()[: max(0, parameter.ds_numel - rank * part.numel())]
        return part.float()

    is_partitioned = any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())
    group = None if is_partitioned else parallel_state.get_model_parallel_group()
    return _compute_norm(list(map(get_part, list_counted_parameters(model))), next(model.parameters()).device, group)


def list_counted_parameters(model: torch.nn.Module) -> list[Any]:
    """Lists the parameters that this rank counts in a norm: those of several ranks count on the first one alone."""
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    return [
        parameter
        for parameter in model.parameters()
        if not getattr(parameter, pipeline.REPLICATED, False)
        and (is_first or getattr(parameter, "tensor_model_parallel", False))
    ]


def _compute_norm(tensors: list[Tensor], device: torch.device, group: Any) -> Tensor:
    # The zero keeps the sum defined on a rank that has only replicated parameters.
    norms = [torch.zeros((), dtype=torch.float32, device=device), *torch._foreach_norm(tensors)]
    squared = torch.stack(norms).square().sum()
    dist.all_reduce(squared, group=group)
    return squared.sqrt()


def refuse_stale_locks() -> None:
    """Raises ValueError for the lock that a killed build of one of DeepSpeed's operations has left.

    torch would wait for it for ever.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        try:
            age = time.time() - lock.stat().st_mtime
        except OSError:
            continue  # the build has just ended
        if age > _STALE_SECONDS:
            raise ValueError(
                f"{lock} has been there for {age / 60:.0f} minutes: a build that was killed has left it; remove it and "
                "start again"
            )

"""Runs the training loop: micro batches, validation, logging, saving, stopping."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from tempo_kernels.philox import foresee
from tempo_megatron.memory.live.run_ledger import RunObserver
from tempo_megatron.slots.dropout_rng import draws_masks, set_micro_batch
from tempo_megatron.training.checkpoint import Checkpoints, Progress
from tempo_megatron.training.engine import REMEDY, Engine
from tempo_megatron.training.metrics import RunLog, StepTimer, average_over, measure_peak
from tempo_megatron.training.planning import read_run
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.datasets import BatchStream, Datasets
from tempo_megatron.training.tasks.task import LOSS, Batch, Collate, ForwardStep
from tempo_megatron.training.watch.agreement import raise_on_all_ranks
from tempo_megatron.training.watch.stop_signal import StopSignal


class Trainer:
    """Trains one run from `progress` to its end.

    Args:
        run: its settings.
        engine: holds the model and the optimizer.
        forward_step, collate: of the task.
        datasets: of build_datasets.
        progress: 0, or the checkpoint's.
        checkpoints: used with --save.
        log: shown to the user.
        device: of this rank.
    """

    def __init__(
        self,
        run: RunConfig,
        engine: Engine,
        forward_step: ForwardStep,
        datasets: Datasets,
        collate: Collate,
        progress: Progress,
        checkpoints: Checkpoints,
        log: RunLog,
        device: torch.device,
    ) -> None:
        self.run, self.engine, self.forward_step = run, engine, forward_step
        self.progress, self.checkpoints, self.log, self.device = progress, checkpoints, log, device
        self.valid_dataset, self.collate = datasets.valid, collate
        self.stream = self._open_stream(datasets.train, progress.consumed_samples, run.train_iters)
        self.group = parallel_state.get_data_parallel_group()
        self._draws_masks = draws_masks(run.model, run.tempo)
        self._pending: list[dict[str, Any]] = []
        self._losses: list[dict[str, Tensor]] = []
        self._last_batch: Batch | None = None
        self._last_is_finite = True
        self._observe: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if run.tempo_ledger:
            self._observe = RunObserver(
                [engine.deepspeed],
                run.tempo_ledger,
                micro_batch_size=run.micro_batch_size,
                seq_length=run.model.seq_length,
                read_run=lambda _: read_run(run, None),
            ).step

    def train(self) -> str:
        """Trains to --train-iters, or until there is a reason to stop; returns why it ended."""
        run, progress = self.run, self.progress
        self.engine.deepspeed.train()
        self.timer = StepTimer()
        stop = StopSignal(self.device, run.exit_signal_handler)
        reason, first = "finished", progress.iteration + 1
        try:
            while progress.iteration < run.train_iters and reason == "finished":
                with self._observe():
                    self._step()
                if progress.iteration == first:
                    foresee(run.train_iters - first)
                self.log.advance()
                iteration = progress.iteration
                if iteration % run.log_interval == 0:
                    self._flush()
                if self.valid_dataset is not None and iteration % run.eval_interval == 0:
                    self._validate()
                if run.save_interval and iteration % run.save_interval == 0:
                    self._save()
                if stop.agree():
                    reason = f"stopped by {stop.name or 'a signal to another rank'}"
                elif run.exit_interval and iteration % run.exit_interval == 0:
                    reason = "stopped at --exit-interval"
            self._flush()
            if reason == "finished" and self.valid_dataset is not None and progress.iteration % run.eval_interval:
                self._validate()
            self._save(is_last=True)
        finally:
            stop.close()
        return reason

    def _open_stream(self, dataset: Any, consumed_samples: int, iterations: int) -> BatchStream:
        return BatchStream(
            dataset,
            self.run,
            self.collate,
            self.device,
            consumed_samples=consumed_samples,
            num_samples=iterations * self.run.global_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
        )

    def _step(self) -> None:
        run, engine, progress = self.run, self.engine, self.progress
        learning_rate, skipped_before = engine.learning_rate, engine.skipped_steps
        totals: dict[str, Tensor] = {}
        for micro_batch in range(run.num_micro_batches):
            batch = self.stream.take_next()
            if self._draws_masks:
                set_micro_batch(run.seed, self.stream.find_first_sample(progress.consumed_samples, micro_batch))
            self._last_batch = batch
            losses = self.forward_step(engine.deepspeed, batch)
            engine.backward_and_step(losses[LOSS])
            _add(totals, losses)
        progress.iteration += 1
        progress.consumed_samples += run.global_batch_size
        self._losses.append({name: total / run.num_micro_batches for name, total in totals.items()})
        self._pending.append(
            {
                "iteration": progress.iteration,
                "consumed_samples": progress.consumed_samples,
                "learning_rate": learning_rate,
                "grad_norm": engine.grad_norm,
                "skipped": engine.skipped_steps - skipped_before,
            }
        )

    def _flush(self) -> None:
        """Logs the steps since the last call. Only here, once per interval, the host waits for the device."""
        if not self._pending:
            return
        losses = average_over(self._losses, self.group, self.device)
        seconds = self.timer.end_interval() / len(losses)
        for step, loss in zip(self._pending, losses, strict=True):
            step |= loss
            step["grad_norm"] = None if step["grad_norm"] is None else float(step["grad_norm"])
        self.log.log_steps(
            self._pending,
            {
                "tokens_per_s": self.run.global_batch_size * self.run.model.seq_length / seconds,
                "step_ms": seconds * 1e3,
                **measure_peak(self.device),
                "loss_scale": self.engine.loss_scale,
            },
        )
        diverged = [step["iteration"] for step in self._pending if self._has_diverged(step)]
        self._last_is_finite = math.isfinite(losses[-1][LOSS])
        self._pending, self._losses = [], []
        raise_on_all_ranks(
            f"the loss of step {diverged[0]} or its gradient is not a finite number; {REMEDY}" if diverged else None
        )

    def _has_diverged(self, step: dict[str, Any]) -> bool:
        """Whether a step's loss or gradient is not finite.

        DeepSpeed skips such a step in any precision; that is normal only while fp16 searches for its loss scale.
        """
        if step["skipped"]:
            return not self.engine.scales_dynamically
        return not all(value is None or math.isfinite(value) for value in (step["loss"], step["grad_norm"]))

    def _validate(self) -> None:
        """Logs the mean loss, without dropout, over --eval-iters global batches, which are the same each time."""
        self._flush()
        start = time.perf_counter()
        stream = self._open_stream(self.valid_dataset, 0, self.run.eval_iters)
        batches = self.run.eval_iters * self.run.num_micro_batches
        mean = self._compute_losses_without_dropout(stream.take_next() for _ in range(batches))
        self.log.log_validation(self.progress.iteration, self.progress.consumed_samples, mean)
        if not self.engine.scales_dynamically:
            self._raise_unless_finite(mean[LOSS])
        self.timer.exclude_since(start)

    @torch.no_grad()
    def _compute_losses_without_dropout(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Averages each loss over the micro batches of all data-parallel ranks."""
        self.engine.deepspeed.eval()
        totals: dict[str, Tensor] = {}
        count = 0
        for batch in batches:
            _add(totals, self.forward_step(self.engine.deepspeed, batch))
            count += 1
        self.engine.deepspeed.train()
        means = {name: total / count for name, total in totals.items()}
        return average_over([means], self.group, self.device)[0]

    def _raise_unless_finite(self, loss: float) -> None:
        sentence = f"after step {self.progress.iteration} the loss is not a finite number; {REMEDY}"
        raise_on_all_ranks(None if math.isfinite(loss) else sentence)

    def _save(self, is_last: bool = False) -> None:
        """Saves the model if its loss is still finite: the last update may have been too large."""
        step = self.progress.iteration
        if not self.run.save or self.checkpoints.last_saved == step:
            return
        self._flush()
        start = time.perf_counter()
        if not self._last_is_finite and not is_last:
            self.log.say(f"the loss of step {step} is not a finite number and fp16 skipped it; it is not saved")
            return
        if self._last_batch is not None:
            self._raise_unless_finite(self._compute_losses_without_dropout([self._last_batch])[LOSS])
        self.checkpoints.save(self.progress)
        seconds = time.perf_counter() - start
        self.log.say(f"saved the checkpoint of step {step} to {self.run.save} in {seconds:.1f} s")
        self.timer.exclude_since(start)


def _add(totals: dict[str, Tensor], losses: Mapping[str, Tensor]) -> None:
    for name, loss in losses.items():
        value = loss.detach()
        totals[name] = totals[name] + value if name in totals else value

"""Runs the training loop: micro batches, validation, logging, saving, stopping."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tempo_megatron.memory.live.run_ledger import RunObserver
from tempo_megatron.models.stage import PipelineStage, list_chunks
from tempo_megatron.slots.dropout_rng import draws_masks, set_micro_batch
from tempo_megatron.training.comparison import plot_losses
from tempo_megatron.training.engine import REMEDY, compute_parameter_norm
from tempo_megatron.training.job import Job
from tempo_megatron.training.metrics import (
    STEP_CPU,
    StepProfile,
    StepTimer,
    Throughput,
    average_over,
    measure_peak,
    read_clocks,
    read_metrics,
)
from tempo_megatron.training.model import read_run
from tempo_megatron.training.pipeline import Schedule, is_last_stage, share_from_last_stage
from tempo_megatron.training.ranks import SAVE_NOW, Request, StopSignal, raise_on_all_ranks
from tempo_megatron.training.tasks.datasets import BatchStream
from tempo_megatron.training.tasks.task import LOSS, Batch


def run_job(job: Job) -> None:
    """Trains or, with --eval-only, evaluates; then draws the losses and leaves the process group."""
    run, trainer = job.run, Trainer(job)
    reason = trainer.evaluate() if run.eval_only else trainer.train()
    job.log.say(f"{reason} after step {job.progress.iteration}")
    job.log.close()
    if run.loss_plot and dist.get_rank() == 0:
        assert run.metrics_file is not None
        if any(record["kind"] == "train" for record in read_metrics(run.metrics_file)):
            plot_losses({"stock" if run.tempo.is_off else "tempo": run.metrics_file}, run.loss_plot)
            print(f"loss curve in {run.loss_plot}", flush=True)
        else:
            print(f"no loss curve: {run.metrics_file} has no step, none was left to train", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if job.start.save_folder is not None:
        job.start.save_folder.unlock()


class Trainer:
    """Trains a job from where its checkpoint ends."""

    def __init__(self, job: Job) -> None:
        run, start = job.run, job.start
        self.run, self.engine, self.log, self.device = run, job.engine, job.log, start.device
        self.progress, self.checkpoints, self.datasets = job.progress, job.checkpoints, job.datasets
        self.offloading = job.offloading
        self.task, self.collate = start.task, start.task.make_collate(start.vocabulary)
        self.throughput = Throughput(run, start.vocabulary.padded_size, self.device)
        samples = run.batch_sizes.count_samples(run.train_iters)
        self.stream = self._open_stream(self.datasets.train, self.progress.consumed_samples, samples)
        self._draws_masks = draws_masks(run.model, run.tempo)
        self._pending: list[dict[str, Any]] = []
        self._last_batch: Batch | None = None
        self._schedule: Schedule | None = None
        stage = self.engine.deepspeed.module
        if isinstance(stage, PipelineStage):
            scale = self.engine.scale if run.precision == "fp16" else None
            self._schedule = Schedule(stage, self.task, run, scale)
        self._last_is_finite = True
        self._profile = StepProfile(run, dist.get_rank(), self.log.say)
        self._observe: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if run.tempo_ledger:
            self._observe = RunObserver(
                list_chunks(stage),
                run.tempo_ledger,
                micro_batch_size=run.micro_batch_size,
                seq_length=run.model.seq_length,
                read_run=lambda _: read_run(run, None),
                decoder_seq_length=run.model.decoder_seq_length,
                engine=self.offloading.engine if self.offloading.num_layers else None,
            ).step
        self.timer = StepTimer()

    def train(self) -> str:
        """Trains to --train-iters, or until there is a reason to stop; returns why it ended."""
        run, progress = self.run, self.progress
        self.engine.deepspeed.train()
        stop = StopSignal(self.device, run.exit_signal_handler)
        reason, first = "finished", progress.iteration + 1
        try:
            while progress.iteration < run.train_iters and reason == "finished":
                with self._observe(), self._profile.step(progress.iteration + 1):
                    self._step()
                if progress.iteration == first and self.offloading.num_layers:
                    self.log.say(f"offload: {self.offloading.describe()}")
                self.log.advance()
                iteration = progress.iteration
                if iteration % run.log_interval == 0:
                    self._flush()
                if iteration % run.eval_interval == 0:
                    self._evaluate("validation")
                if run.save_interval and iteration % run.save_interval == 0:
                    self._save()
                request = stop.agree()
                if request is Request.STOP:
                    reason = f"stopped by {stop.name or 'a signal to another rank'}"
                elif run.exit_interval and iteration % run.exit_interval == 0:
                    reason = "stopped at --exit-interval"
                elif request is Request.SAVE:
                    self._save()
                    if not run.save:
                        self.log.say(
                            f"{SAVE_NOW.name} came after step {iteration}, but without --save there is no place"
                        )
            self._flush()
            if reason == "finished" and progress.iteration % run.eval_interval:
                self._evaluate("validation")
            self._save(is_last=True)
            self._finish_save(waits=True)
            self._profile.close()
            if reason == "finished":
                self._evaluate("test")
        finally:
            stop.close()
        return reason

    def evaluate(self) -> str:
        """Logs the losses on the validation part and the test part, trains nothing; returns why it ended."""
        self._evaluate("validation")
        self._evaluate("test")
        return "evaluated"

    def _open_stream(self, dataset: Any, consumed_samples: int, num_samples: int) -> BatchStream:
        return BatchStream(
            dataset,
            self.run,
            self.collate,
            self.device,
            consumed_samples=consumed_samples,
            num_samples=num_samples,
            rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
        )

    def _step(self) -> None:
        run, engine, progress = self.run, self.engine, self.progress
        learning_rate, skipped_before = engine.learning_rate, engine.deepspeed.skipped_steps
        samples = run.batch_sizes.find(progress.consumed_samples)
        number = samples // (run.micro_batch_size * run.data_parallel_size)
        engine.begin_step(samples, number)
        if self._schedule is None:
            totals = _add_up(self._train_micro_batches(number))
        else:
            totals = _add_up(self._schedule.run_step(self._read_batches(number), number, self._announce))
            engine.step_after_schedule()
        progress.iteration += 1
        progress.consumed_samples += samples
        self._pending.append(
            {
                "iteration": progress.iteration,
                "consumed_samples": progress.consumed_samples,
                "batch_size": samples,
                "learning_rate": learning_rate,
                "grad_norm": engine.grad_norm,
                "skipped": engine.deepspeed.skipped_steps - skipped_before,
                "losses": {name: total / number for name, total in totals.items()},
            }
        )

    def _train_micro_batches(self, number: int) -> Iterator[dict[str, Tensor]]:
        for micro_batch, batch in enumerate(self._read_batches(number)):
            self._announce(micro_batch)
            losses = self.task.forward(self.run, self.engine.deepspeed, batch)
            self.engine.backward_and_step(losses[LOSS])
            yield losses

    def _read_batches(self, number: int) -> Iterator[Batch]:
        """Yields the micro batches of a step."""
        for _ in range(number):
            self._last_batch = self.stream.take_next()
            yield self._last_batch

    def _announce(self, micro_batch: int) -> None:
        """Tells the model, before a forward, whose dropout masks it draws."""
        if self._draws_masks:
            first = self.stream.find_first_sample(self.progress.consumed_samples, micro_batch)
            set_micro_batch(self.run.seed, first)

    def _average(self, losses: list[dict[str, Tensor]]) -> list[dict[str, float]]:
        """Averages losses, which the last stage alone has, over the data-parallel ranks; returns them on every rank."""
        group = parallel_state.get_data_parallel_group()
        means = average_over(losses, group, self.device) if is_last_stage() else []
        return means if self._schedule is None else share_from_last_stage(means, self.device)

    def _flush(self) -> None:
        """Logs the steps since the last call. Only here, once per interval, the host waits for the device."""
        if not self._pending:
            return
        losses = self._average([step.pop("losses") for step in self._pending])
        seconds, processor_seconds = (passed / len(losses) for passed in self.timer.end_interval())
        samples = sum(step["batch_size"] for step in self._pending) / len(losses)
        for step, loss in zip(self._pending, losses, strict=True):
            step |= loss
            step["grad_norm"] = None if step["grad_norm"] is None else float(step["grad_norm"])
        params_norm = {}
        if self.run.log_params_norm:
            params_norm["params_norm"] = float(compute_parameter_norm(self.engine.deepspeed.module))
        self.log.log_steps(
            self._pending,
            {
                **self.throughput.compute(seconds, samples),
                **({STEP_CPU: processor_seconds * 1e3} if self.device.type == "cpu" else {}),
                **measure_peak(self.device),
                **params_norm,
                "loss_scale": self.engine.loss_scale,
            },
        )
        self._finish_save(waits=False)
        diverged = [step["iteration"] for step in self._pending if self._has_diverged(step)]
        self._last_is_finite = math.isfinite(losses[-1][LOSS])
        self._pending = []
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

    def _evaluate(self, part: str) -> None:
        """Logs the mean loss on a part of the data, without dropout, over global batches that are the same each time.

        `part` is validation or test; there may be none.
        """
        run, datasets = self.run, self.datasets
        dataset, iterations = (datasets.test, run.test_iters) if part == "test" else (datasets.valid, run.eval_iters)
        if dataset is None:
            return
        self._flush()
        start = read_clocks()
        stream = self._open_stream(dataset, 0, iterations * run.global_batch_size)
        number = iterations * run.num_micro_batches
        mean = self._compute_losses_without_dropout((stream.take_next() for _ in range(number)), number)
        self.log.log_evaluation(part, self.progress.iteration, self.progress.consumed_samples, mean)
        if not self.engine.scales_dynamically:
            self._raise_unless_finite(mean[LOSS])
        self.timer.exclude_since(start)

    @torch.no_grad()
    def _compute_losses_without_dropout(self, batches: Iterable[Batch], number: int) -> dict[str, float]:
        """Averages each loss over `number` micro batches of each data-parallel rank."""
        self.engine.deepspeed.eval()
        if self._schedule is None:
            totals = _add_up(self.task.forward(self.run, self.engine.deepspeed, batch) for batch in batches)
        else:
            totals = _add_up(self._schedule.run_step(batches, number, None))
        self.engine.deepspeed.train()
        return self._average([{name: total / number for name, total in totals.items()}])[0]

    def _raise_unless_finite(self, loss: float) -> None:
        sentence = f"after step {self.progress.iteration} the loss is not a finite number; {REMEDY}"
        raise_on_all_ranks(None if math.isfinite(loss) else sentence)

    def _save(self, is_last: bool = False) -> None:
        """Saves the model if its loss is still finite: the last update may have been too large."""
        step = self.progress.iteration
        if not self.run.save or self.checkpoints.last_saved == step:
            return
        self._flush()
        start = read_clocks()
        if not self._last_is_finite and not is_last:
            self.log.say(f"the loss of step {step} is not a finite number and fp16 skipped it; it is not saved")
            return
        if self._last_batch is not None:
            # An interleaved schedule takes no fewer micro batches than there are stages.
            number = self.run.pipeline_model_parallel_size if self.run.num_chunks > 1 else 1
            losses = self._compute_losses_without_dropout([self._last_batch] * number, number)
            self._raise_unless_finite(losses[LOSS])
        self._finish_save(waits=True)
        self.checkpoints.save(self.progress)
        seconds = read_clocks().since(start).wall
        if self.run.async_save:
            self.log.say(f"copied the checkpoint of step {step} in {seconds:.1f} s, which is written from now on")
        else:
            self.log.say(f"saved the checkpoint of step {step} to {self.run.save} in {seconds:.1f} s")
        self.timer.exclude_since(start)

    def _finish_save(self, *, waits: bool) -> None:
        """Makes the checkpoint that --async-save writes the latest, if it is written or this waits for it."""
        start = read_clocks()
        step = self.checkpoints.finish(waits=waits)
        if step is not None:
            self.log.say(f"saved the checkpoint of step {step} to {self.run.save}")
            self.timer.exclude_since(start)


def _add_up(micro_batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for losses in micro_batches:
        for name, loss in losses.items():
            value = loss.detach()
            totals[name] = totals[name] + value if name in totals else value
    return totals

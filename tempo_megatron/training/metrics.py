"""Logs a run from rank 0: a progress bar, lines, a JSON-lines file and TensorBoard; and records some of its steps.

Losses stay on the device until a log interval ends, so that no step waits for the host.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from tempo_megatron.memory.plan.flops import count_forward_flops, count_model_flops, find_utilisation
from tempo_megatron.memory.plan.gpu import recognise_gpu
from tempo_megatron.training.run.checks import check_metrics_file
from tempo_megatron.training.run.run_config import RunConfig

_TAGS = {"train": "Train", "validation": "Validation", "test": "Test"}
MFU, TFLOPS = "mfu", "tflops_per_s_per_rank"
"""Keys in the metrics: the share of the GPUs' peak, and 10**12 operations per second of each rank."""
STEP_CPU = "step_cpu_ms"
"""Key in the metrics of a run on a CPU: the processor's time of one rank for a step, in all of its threads."""
PEAKS = {"peak_memory_bytes": "peak", "peak_rss_bytes": "peak RSS of the process"}
"""Key in the metrics -> name in the log: the most that a GPU's allocator gave out, or that a process had in memory."""


def measure_peak(device: torch.device) -> dict[str, int]:
    """Returns the most bytes that tensors had on the GPU or, on a CPU, that this process had in memory, under its key.

    On a CPU nothing counts tensors, and the figure includes Python and its libraries.
    """
    if device.type == "cuda":
        return {"peak_memory_bytes": torch.cuda.max_memory_allocated(device)}
    return {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def average_over(values: list[dict[str, Tensor]], group: Any, device: torch.device) -> list[dict[str, float]]:
    """Averages named scalars over a process group, summed in rank order so that the result never depends on timing."""
    names = list(values[0])
    local = torch.stack([scalars[name] for scalars in values for name in names]).to(device, torch.float32)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    means = torch.stack(gathered).double().mean(0).view(len(values), len(names)).tolist()
    return [dict(zip(names, row, strict=True)) for row in means]


class MetricsFile:
    """A file of JSON lines, each complete as soon as it is written.

    A last line that a killed run cut off is removed, and so are records beyond iteration `resume_after`, which the
    resumed run writes again. None starts a new file, and renames an old one to `set_aside`.

    Raises ValueError if the file cannot be written, or exists and does not hold metrics.
    """

    def __init__(self, path: str, resume_after: int | None) -> None:
        check_metrics_file(path)
        self.set_aside: str | None = None
        kept = [] if resume_after is None else [r for r in read_metrics(path) if r.get("iteration", 0) <= resume_after]
        unfinished = Path(f"{path}.tmp")
        try:
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            if resume_after is None and Path(path).exists() and Path(path).stat().st_size:
                self.set_aside = next(name for n in count(1) if not os.path.lexists(name := f"{path}.{n}"))
                os.rename(path, self.set_aside)
            unfinished.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
            os.replace(unfinished, path)
            self._stream: TextIO = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"--metrics-file {path} cannot be written ({error}); give another name") from error

    def write(self, record: dict[str, Any]) -> None:
        # JSON has no nan or inf; "loss_hex" still says which it was.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._stream.write(json.dumps(finite, allow_nan=False) + "\n")

    def close(self) -> None:
        self._stream.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics file, in order, without a line that was cut off; none if there is no file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


class MonitorBuffer:
    """Stands before the monitors of the DeepSpeed JSON (TensorBoard, W&B, CSV, Comet) and orders what they are given.

    DeepSpeed writes the learning rate of a step at once, the trainer its loss when the log interval ends, and W&B drops
    what is older than the newest step it knows. `monitor` is DeepSpeed's MonitorMaster; None where the JSON enables
    none.
    """

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor
        self._events: list[tuple[str, float, int]] = []

    @property
    def enabled(self) -> bool:
        """What DeepSpeed asks before it writes."""
        return self._monitor is not None

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Keeps (tag, value, samples) until `flush`."""
        self._events += events

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Keeps the figures of a record of the metrics file, under tags such as DeepSpeed's own."""
        if self._monitor is None or kind not in _TAGS:
            return
        names = {"loss": "train_loss"} if kind == "train" else {}  # DeepSpeed's word
        # DeepSpeed itself writes the learning rate and the loss scale.
        left_out = ("iteration", "consumed_samples", "learning_rate", "loss_scale")
        for name, value in values.items():
            if name not in left_out and isinstance(value, (int, float)):
                tag = f"{_TAGS[kind]}/Samples/{names.get(name, name)}"
                self.write_events([(tag, float(value), values["consumed_samples"])])

    def flush(self) -> None:
        if self._events:
            self._monitor.write_events(sorted(self._events, key=lambda event: event[2]))
            self._events = []

    def close(self) -> None:
        """Ends what only writes its last records when it is ended; DeepSpeed never does."""
        self.flush()
        if getattr(self._monitor, "wandb_monitor", None) is not None:
            import wandb

            wandb.finish()
        if getattr(self._monitor, "comet_monitor", None) is not None:
            self._monitor.comet_monitor.experiment.end()


class RunLog:
    """Everything the user sees of a run, which goes on after `first_iteration`.

    On ranks other than 0 its methods do nothing.
    """

    def __init__(
        self, run: RunConfig, monitors: MonitorBuffer, *, is_first_rank: bool, first_iteration: int, resumes: bool
    ) -> None:
        self.is_on = is_first_rank
        self.run, self.monitors = run, monitors
        self._num_samples = run.batch_sizes.count_samples(run.train_iters)
        self._file: MetricsFile | None = None
        self._board: Any = None
        self._bar: Any = None
        if not self.is_on:
            return
        if run.metrics_file:
            # An evaluation adds to the metrics of the run whose checkpoint it loads.
            kept = sys.maxsize if run.eval_only else first_iteration
            self._file = MetricsFile(run.metrics_file, kept if resumes else None)
            if self._file.set_aside:
                print(f"the metrics of an earlier run are now in {self._file.set_aside}", flush=True)
        if run.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            try:
                self._board = SummaryWriter(run.tensorboard_dir, purge_step=first_iteration + 1 if resumes else None)
            except OSError as error:
                raise ValueError(
                    f"--tensorboard-dir {run.tensorboard_dir} cannot be written ({error}); give another folder"
                ) from error
        # disable=None shows no bar if the output is not a terminal.
        shown: Any = {"unit": "step", "disable": None, "file": sys.stdout, "dynamic_ncols": True}
        self._bar = tqdm(total=run.train_iters, initial=first_iteration, **shown)

    def say(self, line: str) -> None:
        if self.is_on:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def record(self, kind: str, **values: Any) -> None:
        if not self.is_on:
            return
        if self._file is not None:
            self._file.write({"kind": kind, **values})
        self.monitors.write(kind, values)
        if self._board is not None and "iteration" in values:
            for name, value in values.items():
                if name not in ("iteration", "consumed_samples") and isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, values["iteration"])

    def log_steps(self, steps: list[dict[str, Any]], interval: dict[str, Any]) -> None:
        """Records the steps of a log interval, each with the figures of the whole interval, and prints one line."""
        for step in steps:
            self.record("train", **step, loss_hex=float(step["loss"]).hex(), **interval)
        self.monitors.flush()
        last = steps[-1]
        norm = "" if last["grad_norm"] is None else f" | grad norm {last['grad_norm']:.3f}"
        size = f" | batch {last['batch_size']}" if last["batch_size"] < self.run.batch_sizes.full else ""
        of_params = f" | params norm {interval['params_norm']:.3f}" if "params_norm" in interval else ""
        # The rest takes as long as if each sample took as long as those of this interval.
        samples = self._num_samples - last["consumed_samples"]
        per_step = sum(step["batch_size"] for step in steps) / len(steps)
        left = datetime.timedelta(seconds=round(samples / per_step * interval["step_ms"] / 1e3))
        scale = f" | loss scale {interval['loss_scale']:g}" if interval.get("loss_scale") else ""
        self.say(
            f"step {last['iteration']:>{len(str(self.run.train_iters))}}/{self.run.train_iters}"
            f" | {_format_losses(steps)} | lr {last['learning_rate']:.3e}{size}{norm}{of_params}{scale}"
            f" | {interval['tokens_per_s']:,.0f} tokens/s | {interval['step_ms']:.1f} ms/step"
            + (f" | MFU {interval[MFU]:.1%}" if MFU in interval else "")
            + "".join(f" | {name} {interval[key] / 2**20:,.0f} MiB" for key, name in PEAKS.items() if key in interval)
            + (f" | {left} left" if samples > 0 else "")
        )
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{last['loss']:.4f}", refresh=False)

    def log_evaluation(self, part: str, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """Logs the losses of a Task on a part of the data, and the perplexity of the tokens.

        The perplexity is that of lm_loss if there is one. `part` is validation or test.
        """
        perplexity = math.exp(min(losses.get("lm_loss", losses["loss"]), 700.0))
        position = {"iteration": iteration, "consumed_samples": consumed_samples}
        self.record(part, **position, **losses, loss_hex=losses["loss"].hex(), perplexity=perplexity)
        self.monitors.flush()
        self.say(f"{part} after step {iteration} | {_format_losses([losses])} | perplexity {perplexity:.3f}")

    def close(self) -> None:
        self.monitors.close()
        for open_thing in (self._bar, self._file, self._board):
            if open_thing is not None:
                open_thing.close()


def _format_losses(steps: Sequence[Mapping[str, Any]]) -> str:
    """Formats the mean of every loss over the steps: `loss 9.1 | lm loss 8.4 | sop loss 0.7`."""
    means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0] if name.endswith("loss")}
    return " | ".join(f"{name.replace('_', ' ')} {mean:.6f}" for name, mean in means.items())


class Seconds(NamedTuple):
    """A moment, or a time between two."""

    wall: float
    processor: float
    """That this process's threads computed: other work on the machine does not count."""

    def since(self, start: Seconds) -> Seconds:
        return Seconds(self.wall - start.wall, self.processor - start.processor)


def read_clocks() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


class StepTimer:
    """Measures the time of training steps without validation, saving and the start of workers."""

    def __init__(self) -> None:
        self._since = read_clocks()

    def end_interval(self) -> Seconds:
        """Returns the time since the last call, without what was excluded, and starts the next interval."""
        now = read_clocks()
        passed, self._since = now.since(self._since), now
        return passed

    def exclude_since(self, start: Seconds) -> None:
        passed = read_clocks().since(start)
        self._since = Seconds(self._since.wall + passed.wall, self._since.processor + passed.processor)


class Throughput:
    """The figures of a run's steps.

    The operations are the model's, by equation 7 of arXiv 2205.05198: what is recomputed does not count. The peak is
    the data sheet's of configs/gpu, for the run's precision; a GPU that has no file there has no MFU, nor has a CPU.
    """

    def __init__(self, run: RunConfig, padded_vocab_size: int, device: torch.device) -> None:
        self._samples = run.global_batch_size
        self._tokens = run.global_batch_size * (run.model.seq_length + (run.model.decoder_seq_length or 0))
        self._flops = count_model_flops(count_forward_flops(run.model, run.global_batch_size, padded_vocab_size))
        self._world_size, self._peak = run.world_size, None
        if device.type == "cuda" and (gpu := recognise_gpu(torch.cuda.get_device_name(device))):
            self._peak = gpu.matmul_flops_per_second[run.precision]

    def compute(self, step_seconds: float, samples: float) -> dict[str, float]:
        """Returns the figures by their key in the metrics, from the seconds and the samples of one step."""
        full_step_seconds = step_seconds * self._samples / samples
        figures = {
            "tokens_per_s": self._tokens / full_step_seconds,
            "step_ms": step_seconds * 1e3,
            TFLOPS: find_utilisation(self._flops, full_step_seconds, self._world_size, 1e12),
        }
        if self._peak is not None:
            figures[MFU] = find_utilisation(self._flops, full_step_seconds, self._world_size, self._peak)
        return figures


_MOST_EVENTS = 1_000_000  # of the allocator; older ones are forgotten


class StepProfile:
    """Records the steps from the first to the last, on the ranks that are asked for.

    `trace_rankN.json` opens in Perfetto and in chrome://tracing; on a CPU it also shows the bytes that are allocated.
    `memory_rankN.pickle`, for torch's memory viewer, exists on a GPU alone: torch keeps no history for a CPU.
    `say` is told what was written.
    """

    def __init__(self, run: RunConfig, rank: int, say: Callable[[str], None]) -> None:
        first, last = run.profile if run.profile is not None and rank in run.profile_ranks else (0, -1)
        self._steps, self._on_gpu, self._say = range(first, last + 1), run.on_gpu, say
        folder = Path(run.profile_dir or "")
        self._trace, self._snapshot = folder / f"trace_rank{rank}.json", folder / f"memory_rank{rank}.pickle"
        self._profiler: Any = None
        self._latest = 0

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Runs a step inside; records it if it is one of those that are asked for."""
        if number not in self._steps:
            yield
            return
        if self._profiler is None:
            self._start()
        with torch.profiler.record_function(f"step {number}"):
            yield
        self._latest = number
        if number == self._steps[-1]:
            self.close()

    def _start(self) -> None:
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profiler.start()

    def close(self) -> None:
        """Writes what was recorded, if that has not been done: the run may end before the last step."""
        if self._profiler is None:
            return
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profiler.stop()
        unfinished = self._trace.with_suffix(".tmp.json")  # a reader never finds half a file
        self._profiler.export_chrome_trace(str(unfinished))
        os.replace(unfinished, self._trace)
        written = f"{self._trace} for ui.perfetto.dev"
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(str(self._snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
            written += f", {self._snapshot} for pytorch.org/memory_viz"
        self._profiler = None
        self._say(f"recorded the steps up to {self._latest}: {written}")

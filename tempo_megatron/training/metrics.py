"""Reports what a run does, from rank 0: a progress bar, log lines, a JSON-lines file and TensorBoard.

Losses stay on the device until a log interval ends, so that no step waits for the host.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from tempo_megatron.training.run.checks import check_metrics_file
from tempo_megatron.training.run.run_config import RunConfig

PEAKS = {"peak_memory_bytes": "peak", "peak_rss_bytes": "peak RSS of the process"}
"""Key of the metrics -> what the log calls it: what a GPU's allocator gave out, or what a process has in memory."""


def measure_peak(device: torch.device) -> dict[str, int]:
    """Most bytes that tensors had on the GPU. On a CPU, which counts no tensors, most that this process had in memory,
    with Python and its libraries; the key says which."""
    if device.type == "cuda":
        return {"peak_memory_bytes": torch.cuda.max_memory_allocated(device)}
    return {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def average_over(values: list[dict[str, Tensor]], group: Any, device: torch.device) -> list[dict[str, float]]:
    """Mean of named scalars over a process group, summed in rank order so that it never depends on timing."""
    names = list(values[0])
    local = torch.stack([scalars[name] for scalars in values for name in names]).to(device, torch.float32)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    means = torch.stack(gathered).double().mean(0).view(len(values), len(names)).tolist()
    return [dict(zip(names, row, strict=True)) for row in means]


class MetricsFile:
    """JSON lines, each complete on disk as soon as it is written.

    Args:
        path: appended to. A last line that a killed run cut off is removed.
        resume_after: keep only records up to this iteration; the resumed run writes the later ones again. None: the
            run starts anew and so does the file; one that is there is renamed to `set_aside`.

    Raises ValueError where the file cannot be written, or exists and does not hold metrics.
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
        # JSON knows no nan or inf; "loss_hex" still says which it was.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._stream.write(json.dumps(finite, allow_nan=False) + "\n")

    def close(self) -> None:
        self._stream.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order, without a line that was cut off; none where there is no file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


class Report:
    """Everything the user sees of a run. On ranks other than 0 every method does nothing."""

    def __init__(self, run: RunConfig, *, is_first_rank: bool, first_iteration: int, resumes: bool) -> None:
        self.is_on = is_first_rank
        self.run = run
        self._file: MetricsFile | None = None
        self._board: Any = None
        self._bar: Any = None
        if not self.is_on:
            return
        if run.metrics_file:
            self._file = MetricsFile(run.metrics_file, first_iteration if resumes else None)
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
        # disable=None: no bar where the output is not a terminal, only lines.
        self._bar = tqdm(
            total=run.train_iters,
            initial=first_iteration,
            unit="step",
            disable=None,
            file=sys.stdout,
            dynamic_ncols=True,
        )

    def say(self, line: str) -> None:
        if self.is_on:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def record(self, kind: str, **values: Any) -> None:
        if self._file is not None:
            self._file.write({"kind": kind, **values})
        if self._board is not None and "iteration" in values:
            for name, value in values.items():
                if name not in ("iteration", "consumed_samples") and isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, values["iteration"])

    def report_steps(self, steps: list[dict[str, Any]], interval: dict[str, Any]) -> None:
        """The steps of a log interval, each with what is only known for the interval as a whole; one log line."""
        for step in steps:
            self.record("train", **step, loss_hex=float(step["loss"]).hex(), **interval)
        last = steps[-1]
        norm = "" if last["grad_norm"] is None else f" | grad norm {last['grad_norm']:.3f}"
        scale = f" | loss scale {interval['loss_scale']:g}" if interval.get("loss_scale") else ""
        self.say(
            f"step {last['iteration']:>{len(str(self.run.train_iters))}}/{self.run.train_iters}"
            f" | {_format_losses(steps)} | lr {last['learning_rate']:.3e}{norm}{scale}"
            f" | {interval['tokens_per_s']:,.0f} tokens/s | {interval['step_ms']:.1f} ms/step"
            + "".join(f" | {name} {interval[key] / 2**20:,.0f} MiB" for key, name in PEAKS.items() if key in interval)
        )
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{last['loss']:.4f}", refresh=False)

    def report_validation(self, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """`losses` as of a forward step; perplexity is that of the tokens, so of lm_loss where that is one of them."""
        perplexity = math.exp(min(losses.get("lm_loss", losses["loss"]), 700.0))
        position = {"iteration": iteration, "consumed_samples": consumed_samples}
        self.record("validation", **position, **losses, loss_hex=losses["loss"].hex(), perplexity=perplexity)
        self.say(f"validation after step {iteration} | {_format_losses([losses])} | perplexity {perplexity:.3f}")

    def close(self) -> None:
        for open_thing in (self._bar, self._file, self._board):
            if open_thing is not None:
                open_thing.close()


def _format_losses(steps: Sequence[Mapping[str, Any]]) -> str:
    """The mean of every loss over the steps: `loss 9.1 | lm loss 8.4 | sop loss 0.7`."""
    means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0] if name.endswith("loss")}
    return " | ".join(f"{name.replace('_', ' ')} {mean:.6f}" for name, mean in means.items())


class StepTimer:
    """Time of training steps, without validation, saving and the start of workers."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._excluded = 0.0

    def end_interval(self) -> float:
        """Seconds since the last call, without what was excluded; starts the next interval."""
        now = time.perf_counter()
        seconds = now - self._since - self._excluded
        self._since, self._excluded = now, 0.0
        return seconds

    def exclude_since(self, start: float) -> None:
        self._excluded += time.perf_counter() - start

"""Runs of Megatron-LM's own scripts on gloo and the CPU, and where the checkout for them is found."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

HERE = Path(__file__).parent

# What stock needs on a CPU without Apex and Transformer Engine, and a small GPT.
_CPU_ARGUMENTS = """--transformer-impl local --distributed-backend gloo --no-persist-layer-norm --use-cpu-initialization
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion --no-rope-fusion
--num-workers 0"""
# The mock data of 0.14 and 0.15 has ids up to 4094, whatever the vocabulary; 4096 rows split evenly over 2 and 4 ranks.
_DATA_ARGUMENTS = "--mock-data --tokenizer-type NullTokenizer --vocab-size 4095"
_SIZES: dict[str, Any] = {
    "num-layers": 4,
    "hidden-size": 48,
    "num-attention-heads": 4,
    "seq-length": 32,
    "max-position-embeddings": 64,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "make-vocab-size-divisible-by": 32,
    "train-iters": 2,
    "lr": 0.1,
    "lr-decay-style": "constant",
    "optimizer": "sgd",
    "sgd-momentum": 0.0,
    "weight-decay": 0.0,
    "clip-grad": 0.0,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "log-interval": 1,
    "eval-iters": 0,
    "eval-interval": 1000,
}
# Latent attention whose heads of q, k and v have one size, the only one that stock's own core attention takes; such a
# run needs take_latent_sizes of megatron_changes.
LATENT_ATTENTION = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 12 --kv-channels 12 --rope-type rope --position-embedding-type rope --normalization RMSNorm "
    "--qk-layernorm --disable-bias-linear"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear --moe-ffn-hidden-size 24 "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 24"
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a script: what stands on its command line, and what is changed of this process for it."""

    name: str
    arguments: str = ""
    """Beside the sizes above; a size that is given here counts."""

    script: str = "pretrain_gpt.py"
    data: str = _DATA_ARGUMENTS
    changes: tuple[str, ...] = ()
    """Functions of megatron_changes."""

    leaves_out: tuple[str, ...] = ()
    """Sizes that the script does not take."""

    measures_kept_bytes: bool = False
    """Whether the banner says what is kept; its process takes more than a short run."""

    def command(self) -> list[str]:
        words = self.arguments.split()
        sizes = [
            word
            for name, value in _SIZES.items()
            if f"--{name}" not in words and name not in self.leaves_out
            for word in (f"--{name}", value)
        ]
        return [*_CPU_ARGUMENTS.split(), *self.data.split(), *map(str, sizes), *words]


def with_sample(names: Iterable[str], sample: Collection[str]) -> list[Any]:
    """All names as parameters, of which those outside of the sample are for --exhaustive."""
    return [name if name in sample else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


def list_names(request: pytest.FixtureRequest, root: Path, test: str = "") -> list[str]:
    """The cases ("name") of the file's tests that are to be run with this Megatron; of one test, where it is given."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params for item in items if item.name.startswith(test)]
    names = [params["name"] for params in chosen if str(root).endswith(params["megatron_root"])]
    return list(dict.fromkeys(names))


def run_all(root: Path, world_size: int, runs: list[Run], folder: Path, timeout_s: float = 900) -> list[dict[str, Any]]:
    """Each run in turn on `world_size` processes; by rank, the results by the run's name (see megatron_rank.py).

    A run that fails has its traceback as "error"; the runs after it start in new processes where there are several.
    """
    found: list[dict[str, Any]] = [{} for _ in range(world_size)]
    pending = list(runs)
    while pending:
        part = folder / f"from-{len(runs) - len(pending)}"
        error = _start_ranks(root, world_size).run(pending, part, timeout_s)
        files = [part / f"{rank}.pt" for rank in range(world_size)]
        ranks = [torch.load(file, weights_only=False) if file.exists() else {} for file in files]
        if error is not None:
            _start_ranks.cache_clear()
            failed = next(run.name for run in pending if any(run.name not in _sound(rank) for rank in ranks))
            ranks = [{**rank, failed: {"error": error, "losses": {}}} for rank in ranks]
        finished = [run.name for run in pending if all(run.name in rank for rank in ranks)]
        for results, rank in zip(found, ranks, strict=True):
            results.update({name: rank[name] for name in finished})
        pending = [run for run in pending if run.name not in finished]
    return found


def run_all_sizes(root: Path, runs: Iterable[tuple[int, Run]], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By run and rank, the results of (world size, run). The runs of one world size share their processes."""
    sizes: dict[int, list[Run]] = {}
    for world_size, run in runs:
        sizes.setdefault(world_size, []).append(run)
    found: dict[str, list[dict[str, Any]]] = {}
    for world_size in sorted(sizes):
        ranks = run_all(root, world_size, sizes[world_size], folder / f"world-{world_size}")
        found |= {run.name: [rank[run.name] for rank in ranks] for run in sizes[world_size]}
    return found


def assert_equal_to_stock(tempo: list[dict[str, Any]], stock: list[dict[str, Any]], limit: float) -> None:
    """Losses as printed by the last rank, and every rank's gradients of two steps.

    limit: of a gradient's difference, as a part of the largest gradient of its step.
    """
    assert not stock[0]["error"] and not tempo[0]["error"]
    assert sorted(stock[-1]["losses"]) == [1, 2]
    assert tempo[-1]["losses"] == pytest.approx(stock[-1]["losses"], rel=2.5e-7 if limit < 1e-3 else limit)
    for ours, theirs in zip(tempo, stock, strict=True):
        assert len(theirs["gradients"]) == 2
        for found, expected in zip(ours["gradients"], theirs["gradients"], strict=True):
            assert found.keys() == expected.keys()
            largest = max(gradient.abs().max().item() for gradient in expected.values())
            assert largest > 0
            errors = {name: (found[name] - expected[name]).abs().max().item() / largest for name in expected}
            worst = max(errors, key=errors.__getitem__)
            assert errors[worst] <= limit, f"{worst}: {errors[worst]}"


def _sound(rank: dict[str, Any]) -> dict[str, Any]:
    return {name: result for name, result in rank.items() if not result["error"]}


class Server:
    """A process that has imported Megatron, which takes seconds, and forks ranks."""

    def __init__(self, root: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="megatron-ranks-"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        # The checkout too, for processes that Megatron itself starts, as to write a checkpoint.
        source = HERE.parents[1]
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (root, HERE, source, source / "kernels", *sys.path)))
        self.log = self.folder / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(HERE / "megatron_rank.py"), str(root)],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        atexit.register(self.end)

    def fork(self, world_size: int) -> tuple[Path, list[psutil.Process]]:
        """The folder of new ranks, and their processes."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        for rank in range(world_size):
            os.mkfifo(folder / f"{rank}.jobs")
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{world_size} {folder}\n")
            self.process.stdin.flush()
        numbers = self.process.stdout.readline().split()
        if not numbers:
            raise RuntimeError(f"Megatron is not imported:\n{self.log.read_text('utf-8')[-4000:]}")
        return folder, [psutil.Process(int(number)) for number in numbers]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_start_server = functools.cache(Server)


class Ranks:
    """Processes that run what they are told until this one ends."""

    def __init__(self, root: Path, world_size: int) -> None:
        self.folder, self.processes = _start_server(root).fork(world_size)
        # A rank ends with what is written to it.
        self.jobs = [(self.folder / f"{rank}.jobs").open("w") for rank in range(world_size)]

    def run(self, runs: list[Run], folder: Path, timeout_s: float) -> str | None:
        """The error that ended the processes early, or None."""
        folder.mkdir(parents=True, exist_ok=True)
        jobs = [
            {
                "name": run.name,
                "script": run.script,
                "arguments": run.command(),
                "changes": (*run.changes, *([] if run.measures_kept_bytes else ["measure_no_kept_bytes"])),
            }
            for run in runs
        ]
        (folder / "jobs.json").write_text(json.dumps({"cwd": os.getcwd(), "runs": jobs}), encoding="utf-8")
        for file in self.jobs:
            file.write(f"{folder}\n")
            file.flush()
        error = self._wait(folder, timeout_s)
        if error is not None:
            for process in self.processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        return error

    def _wait(self, folder: Path, timeout_s: float) -> str | None:
        deadline = time.monotonic() + timeout_s
        while not all((folder / f"{rank}.done").exists() for rank in range(len(self.processes))):
            ended = [rank for rank, process in enumerate(self.processes) if _has_ended(process)]
            if ended:
                return self._describe(ended[0], folder)
            if time.monotonic() > deadline:
                return f"still running after {timeout_s} s"
            time.sleep(0.1)
        return None

    def _describe(self, ended: int, folder: Path) -> str:
        time.sleep(1)
        texts = [file.read_text("utf-8") for file in folder.glob("*.error")]
        # A rank that only lost another one says so; the cause comes first.
        texts.sort(key=lambda text: "onnection" in text)
        return texts[0] if texts else f"rank {ended}: {(self.folder / f'{ended}.log').read_text('utf-8')[-4000:]}"


def _has_ended(process: psutil.Process) -> bool:
    """Its parent waits for no rank, so that what a test file takes can be measured still."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


_start_ranks = functools.cache(Ranks)

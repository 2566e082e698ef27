"""The training job for tests: a small data set of real text, and runs of it in forked or launched processes."""

from __future__ import annotations

import argparse as _stdlib
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pkgutil
import random
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rank_processes import make_process

from tempo_megatron.training.checkpoint_files.folder import read_description, write_description

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "pretrain_gpt.py"
VOCAB_SIZE = 512
_TEXTS = "argparse ast bisect calendar cmd code csv dataclasses difflib dis enum glob".split()


@dataclasses.dataclass
class Run:
    """A finished run: exit codes by rank, what rank 0 printed, the records of its metrics file."""

    exit_codes: list[int]
    output: str
    records: list[dict[str, Any]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.of_kind("train")]

    @property
    def losses_hex(self) -> list[str]:
        return [record["loss_hex"] for record in self.of_kind("train")]


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set and its tokenizer."""

    prefix: str
    vocab_file: str
    merge_file: str
    family: str = "gpt"

    def arguments(self) -> list[str]:
        return ["--data-path", self.prefix, "--vocab-file", self.vocab_file, "--merge-file", self.merge_file]


@dataclasses.dataclass(frozen=True)
class MaskedData:
    """A data set of sentences, which says itself what tokenizer it has."""

    prefix: str
    family: str = "bert"

    def arguments(self) -> list[str]:
        return ["--data-path", self.prefix]


def make_masked_data(folder: Path, tokenizer_type: str) -> MaskedData:
    """Some modules of the standard library, a document each, their lines as sentences."""
    from tempo_megatron.data.prepare_data import main

    texts = [str(Path(_stdlib.__file__).parent / f"{name}.py") for name in _TEXTS]
    how = ["--tokenizer-type", tokenizer_type, "--split-sentences", "lines", "--vocab-size", str(VOCAB_SIZE)]
    assert main(["--input", *texts, *how, "--output-prefix", str(folder / "text"), "--workers", "1"]) == 0
    return MaskedData(str(folder / "text"))


def make_data(folder: Path) -> Data:
    """Some modules of the standard library, a document each, through megatron-core's own builder."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from tempo_megatron.data.tokenizer import GPT2Tokenizer

    library = Path(_stdlib.__file__).parent
    texts = [(library / f"{name}.py").read_text(encoding="utf-8") for name in _TEXTS]
    tokenizer = GPT2Tokenizer.train(texts, VOCAB_SIZE, str(folder))
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint16)
    for text in texts:
        builder.add_item(torch.tensor([*tokenizer.tokenize(text), tokenizer.eod]))
        builder.end_document()
    builder.finalize(str(folder / "text.idx"))
    return Data(str(folder / "text"), str(folder / "vocab.json"), str(folder / "merges.txt"))


BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
"""What a DeepSpeed JSON has besides for bf16 with float32 gradients."""


def zero(stage: int, **options: Any) -> dict[str, Any]:
    """A DeepSpeed JSON with this stage."""
    return {"zero_optimization": {"stage": stage, **options}}


def arguments(
    data: Data | MaskedData, folder: Path, *extra: str, config: dict[str, Any] | str | None = None
) -> list[str]:
    """A command line of a tiny model; later arguments win, so `extra` may change any of them."""
    if not isinstance(config, str):
        path = folder / "deepspeed.json"
        path.write_text(json.dumps(config or {}), encoding="utf-8")
        config = str(path)
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2"
    # 12 documents: the last two are for validation. One vocabulary for every tensor-parallel size.
    rest = "--train-iters 10 --lr 1e-3 --split 10,2 --eval-iters 0 --log-interval 1 --make-vocab-size-divisible-by 64"
    metrics = ["--metrics-file", str(folder / "metrics.jsonl"), "--data-cache-path", str(folder / "cache")]
    return ["--deepspeed_config", config, *sizes.split(), *rest.split(), *data.arguments(), *metrics, *extra]


def run(
    data: Data | MaskedData,
    folder: Path,
    *extra: str,
    world_size: int = 1,
    config: Any = None,
    timeout_s: float = 300,
    before: Callable[[], None] | None = None,
    of_rank_1: Sequence[str] = (),
) -> Run:
    """The job in `world_size` forked processes that meet over gloo; waits for its end.

    `before`, which can be pickled, is called in each of them first: it breaks what a test wants broken. `of_rank_1` are
    arguments that this rank has besides.
    """
    folder.mkdir(parents=True, exist_ok=True)
    argv = arguments(data, folder, *extra, config=config)
    port = free_port()
    ranks = []
    for rank in range(world_size):
        words, log = [*argv, *(of_rank_1 if rank == 1 else ())], str(folder / f"rank{rank}.log")
        ranks.append(make_process(_rank_main, data.family, words, rank, world_size, port, log, before))
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout_s)
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    return finished(folder, [int(process.exitcode or 0) for process in ranks])


def finished(folder: Path, exit_codes: list[int]) -> Run:
    from tempo_megatron.training.metrics import read_metrics

    output = (folder / "rank0.log").read_text(encoding="utf-8") if (folder / "rank0.log").exists() else ""
    return Run(exit_codes, output, read_metrics(folder / "metrics.jsonl"))


def successful(result: Run) -> Run:
    assert set(result.exit_codes) == {0}, result.output
    return result


class Call:
    """Makes a call when it is unpickled."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call = call, arguments

    def __reduce__(self) -> Any:
        return self.call


@dataclasses.dataclass(frozen=True)
class FullDisk:
    """On one rank no file may have more than so many bytes, as on a disk that is full."""

    rank: int
    size: int

    def __call__(self) -> None:
        if int(os.environ["RANK"]) == self.rank:
            _set_file_limit(self.size)


@contextlib.contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """No file that this process writes inside the context may have more than so many bytes: Python gets an OSError."""
    before, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    _set_file_limit(size)
    try:
        yield
    finally:
        _set_file_limit(before)


def _set_file_limit(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _rank_main(
    family: str, argv: list[str], rank: int, world_size: int, port: int, log: str, before: Callable[[], None] | None
) -> None:
    import torch

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment(rank=rank, world_size=world_size, port=port))
    torch.set_num_threads(1)
    from tempo_megatron.training.main import train

    if before is not None:
        before()
    code = train(argv, family)
    sys.stdout.flush()
    os._exit(code)


def fork_beside() -> None:
    """Let a rank call what it calls beside itself in a fork of what it is now, not in a new process: that one imports
    everything for seconds, and test_beside.py and a case of each caller have it."""
    from tempo_megatron.memory.live import aside, out_of_memory, run_ledger

    ours, theirs = multiprocessing.Pipe()
    if os.fork() == 0:
        ours.close()
        with contextlib.suppress(EOFError):  # the rank has ended
            while True:
                target, args = theirs.recv()
                try:
                    theirs.send(pkgutil.resolve_name(target)(*args))
                except ValueError as error:
                    theirs.send(error)
        os._exit(0)
    theirs.close()

    class Forked:
        def __init__(self, target: str, *args: Any) -> None:
            ours.send((target, args))

        def wait(self, seconds: float | None = None) -> Any:
            found = ours.recv()
            if isinstance(found, ValueError):
                raise found
            return found

    for module in (aside, out_of_memory, run_ledger):
        module.Beside = Forked  # type: ignore[assignment, misc]


def environment(rank: int | None = None, world_size: int = 1, port: int = 0) -> dict[str, str]:
    """What a rank needs to know; without `rank` what a launcher needs."""
    values = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    if rank is not None:
        values |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        values |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return values


def launch(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own, its output in rank0.log."""
    folder.mkdir(parents=True, exist_ok=True)
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, **environment(), "PATH": os.pathsep.join(places), "PYTHONPATH": os.pathsep.join(paths)}
    with open(folder / "rank0.log", "wb") as log:
        return subprocess.Popen(
            command, cwd=folder, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait_for(process: subprocess.Popen[bytes], folder: Path, timeout_s: float = 300) -> Run:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:  # launchers put their ranks in sessions of their own
        everything = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        for pid in everything:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    return finished(folder, [process.returncode])


def free_port() -> int:
    """A port that nothing uses, below those that the system hands out to whoever opens a socket meanwhile."""
    draw = random.SystemRandom()  # not that of the tests, which has one seed for all processes
    while True:
        port = draw.randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def describe_anew(checkpoint: Path, **changes: Any) -> None:
    """Write the description of a checkpoint again with other values; a change to None leaves the field out."""
    gone = {name for name, each in changes.items() if each is None}
    content = {name: each for name, each in {**read_description(checkpoint), **changes}.items() if name not in gone}
    write_description(checkpoint, content, content["files"])
    if "format" in changes:
        path = checkpoint / "run.json"
        path.write_text(json.dumps({"format": changes["format"], "files": {}}))

"""Compares stock and Tempo in an unmodified Megatron-LM checkout: loss, memory and step time of GPT-2 345M on GPUs.

    bash benchmarks/megatron_lm.sh MEGATRON_LM_ROOT

It runs pretrain_gpt.py four times over mock data, stock and `--use-tempo` in turns: at dropout 0, where the losses must
agree, and at 0.1, where memory and time are those of GPT-2's own pretraining. Stock runs without our launcher. Each run
becomes a line of the results file when it ends; 50 steps of all runs take about five minutes on a GPU that does a step
in half a second. Stock is the strongest that is installed, with Transformer Engine's layers and Apex's fused kernels if
available; the record says which.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measurements import RESULTS, ROOT, add_output_argument, append_records, describe_software, find_commit

_STEP = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+).*? lm loss: ([\dE.+-]+)")
_MEMORY = re.compile(r"max allocated: ([\d.]+)")
_WARM_UP_STEPS = 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, metavar="MEGATRON_LM_ROOT", help="the checkout, which holds pretrain_gpt.py")
    parser.add_argument("--steps", type=int, default=50, help="of each run (default %(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="default %(default)s")
    parser.add_argument("--seq-length", type=int, default=1024, help="default %(default)s")
    parser.add_argument("--num-layers", type=int, default=24, help="default %(default)s, of hidden size 1024")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, help="default %(default)s")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="default: all (%(default)s)")
    parser.add_argument("--time-limit", type=int, default=240, metavar="S", help="of each run (default %(default)s s)")
    parser.add_argument("--dry-run", action="store_true", help="print the four commands and stop")
    add_output_argument(parser, RESULTS / "gpu" / "megatron_lm.jsonl")
    options = parser.parse_args(argv)
    if not (options.root / "pretrain_gpt.py").is_file():
        parser.error(f"{options.root} holds no pretrain_gpt.py; expected a Megatron-LM checkout")
    if options.steps <= _WARM_UP_STEPS:
        parser.error(f"--steps is {options.steps}; expected more than the {_WARM_UP_STEPS} that are not timed")
    if options.dry_run:
        for dropout in (0.0, 0.1):
            for with_tempo in (False, True):
                print(" ".join(make_command(options, dropout, with_tempo)))
        return 0
    if options.gpus < 1:
        parser.error("torch sees no GPU, and pretrain_gpt.py needs one")
    records = []
    append_records(options.output, _remember(run_all(options), records))
    print_comparison(records)
    return 0 if all(record["steps"] for record in records) else 1


def make_command(options: argparse.Namespace, dropout: float, with_tempo: bool) -> list[str]:
    """Makes the command line of a run as a user would type it."""
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    has_apex = importlib.util.find_spec("apex") is not None
    model = {
        "num-layers": options.num_layers,
        "hidden-size": 1024,
        "num-attention-heads": 16,
        "seq-length": options.seq_length,
        "max-position-embeddings": options.seq_length,
        "attention-dropout": dropout,
        "hidden-dropout": dropout,
        "micro-batch-size": options.micro_batch_size,
        "global-batch-size": options.micro_batch_size * options.gpus // options.tensor_model_parallel_size,
        "tensor-model-parallel-size": options.tensor_model_parallel_size,
        "train-iters": options.steps,
        "lr": 1.5e-4,
        "min-lr": 1.5e-5,
        "lr-decay-style": "cosine",
        "weight-decay": 0.01,
        "clip-grad": 1.0,
        "seed": 1234,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": 50256,
        "eval-iters": 0,
        "log-interval": 1,
        "transformer-impl": "transformer_engine" if has_engine else "local",
    }
    words = [word for name, value in model.items() for word in (f"--{name}", str(value))]
    words += ["--bf16", "--mock-data"]
    if not has_apex:
        words += ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"]
    if not (has_apex or has_engine):
        words.append("--no-persist-layer-norm")
    script = [str(ROOT / "launch" / "run_megatron.py")] if with_tempo else []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
    command = [*launcher, *script, str(options.root / "pretrain_gpt.py"), *words]
    return [*command, "--use-tempo"] if with_tempo else command


def run_all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a record per run as soon as it ends."""
    for dropout in (0.0, 0.1):
        for with_tempo in (False, True):
            name = f"dropout {dropout:g}, {'Tempo' if with_tempo else 'stock'}"
            print(f"{name} ...", flush=True)
            started = time.monotonic()
            with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
                failure = _run(make_command(options, dropout, with_tempo), options.time_limit, log)
                log.seek(0)
                text = log.read()
            found = parse_log(text)
            if failure:
                print(f"{name} {failure}; its last lines:\n{text[-2000:]}", file=sys.stderr)
            print(f"{name}: {len(found['losses'])} steps in {time.monotonic() - started:.0f} s", flush=True)
            yield {
                "benchmark": "megatron_lm",
                "side": "tempo" if with_tempo else "stock",
                "p": dropout,
                "failure": failure,
                **found,
                "shape": {name: getattr(options, name) for name in ("num_layers", "seq_length", "micro_batch_size")},
                "dtype": "bf16",
                "gpus": options.gpus,
                "tensor_model_parallel_size": options.tensor_model_parallel_size,
                "device": torch.cuda.get_device_name(0),
                "megatron_lm": find_commit(options.root),
                "commit": find_commit(ROOT),
                "versions": describe_software(),
            }


def _run(command: Sequence[str], time_limit_s: int, log: Any) -> str | None:
    """Runs a command to its end; returns what went wrong, or None."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    try:
        code = subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=time_limit_s
        ).returncode
    except subprocess.TimeoutExpired:
        return f"took more than {time_limit_s} s"
    return f"ended with status {code}" if code else None


def parse_log(text: str) -> dict[str, Any]:
    """Reads from Megatron's output the losses, the median step time without the first ones, and the largest memory."""
    steps = [(float(ms), float(loss)) for _, ms, loss in _STEP.findall(text)]
    timed = [ms for ms, _ in steps[_WARM_UP_STEPS:]]
    memory = [float(found) for found in _MEMORY.findall(text)]
    return {
        "steps": len(steps),
        "losses": [loss for _, loss in steps],
        "step_ms": statistics.median(timed) if timed else None,
        "max_allocated_mib": max(memory) if memory else None,
    }


def _remember(records: Iterator[dict[str, Any]], kept: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for record in records:
        kept.append(record)
        yield record


def print_comparison(records: Sequence[dict[str, Any]]) -> None:
    """Prints the ratios of Tempo to stock, run by run."""
    found = {(record["p"], record["side"]): record for record in records}
    for p in sorted({record["p"] for record in records}):
        stock, tempo = found[p, "stock"], found[p, "tempo"]
        parts = [f"dropout {p:g}"]
        for name, unit in (("step_ms", "ms"), ("max_allocated_mib", "MiB")):
            if stock[name] and tempo[name]:
                parts.append(f"{tempo[name]:.1f} / {stock[name]:.1f} {unit} = {tempo[name] / stock[name]:.3f}")
        if p == 0 and stock["losses"] and tempo["losses"]:
            pairs = zip(stock["losses"], tempo["losses"], strict=False)
            parts.append(f"largest relative difference of the loss {max(abs(b - a) / a for a, b in pairs):.1e}")
        print("; ".join(parts))


if __name__ == "__main__":
    sys.exit(main())

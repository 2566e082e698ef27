"""The `tempo-megatron bench` command: measures this machine's GPU, for the plan and for the estimate."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tempo_megatron.extras import check_installed
from tempo_megatron.memory.plan.gpu import Gpu, list_configs
from tempo_megatron.words.argument_types import parse_positive

_HIDDEN_SIZES = {"cuda": 4096, "cpu": 256}
_ROUND_MS = 100


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tempo-megatron bench`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--calibrate", action="store_true", help="measure the rates that `tempo-megatron plan` needs")
    what.add_argument(
        "--kept-bytes",
        action="store_true",
        help="measure what one layer of each model of configs/model keeps with the installed Transformer Engine, for "
        "`tempo-megatron estimate --kept-bytes JSON`",
    )
    parser.add_argument(
        "--output", required=True, metavar="JSON", help="the file to write, for `tempo-megatron plan --gpu JSON`"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default cuda where there is one, else cpu")
    parser.add_argument(
        "--hidden-size",
        type=parse_positive,
        metavar="H",
        help=f"of the layer whose products are timed (default {_HIDDEN_SIZES['cuda']}, on a CPU "
        f"{_HIDDEN_SIZES['cpu']})",
    )
    parser.add_argument(
        "--round-ms", type=parse_positive, metavar="MS", help=f"how long a round takes at least (default {_ROUND_MS})"
    )


def run_bench(args: argparse.Namespace) -> int:
    """Measure and write the file. Raises ValueError for arguments that are wrong, and where the device is not there."""
    output = Path(args.output)
    if not output.parent.is_dir():
        raise ValueError(f"--output {output} lies in a folder that does not exist; make it")
    if args.kept_bytes:
        _check_kept_bytes(args)
    import torch  # takes seconds

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was given, and torch sees no CUDA device; run it where there is one")
    if args.kept_bytes:
        from tempo_megatron.memory.show.stand_ins import measure_engine

        measured: Any = measure_engine(list_configs("model"), device)
        lines = [f"measured {', '.join(measured.kept_bytes)}"]
    else:
        from tempo_megatron.memory.plan.rates import measure_gpu

        measured = measure_gpu(device, args.hidden_size or _HIDDEN_SIZES[device], args.round_ms or _ROUND_MS)
        lines = list(_list_rates(measured))
    output.write_text(json.dumps(dataclasses.asdict(measured), indent=2) + "\n", encoding="utf-8")
    command = "estimate --kept-bytes" if args.kept_bytes else "plan --gpu"
    print(*lines, f"wrote {output}: tempo-megatron {command} {output}", sep="\n")
    return 0


def _check_kept_bytes(args: argparse.Namespace) -> None:
    for option, value in (("--hidden-size", args.hidden_size), ("--round-ms", args.round_ms)):
        if value is not None:
            raise ValueError(f"{option} {value} is of --calibrate, and --kept-bytes times nothing; leave it out")
    check_installed("bench --kept-bytes", "megatron", "megatron.core")
    if "transformer_engine" not in sys.modules and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError("--kept-bytes measures Transformer Engine's modules, and it is not installed; install it")


def _list_rates(gpu: Gpu) -> Iterator[str]:
    for name, rate in gpu.matmul_flops_per_second.items():
        yield f"{name} products   {rate / 1e12:10.3f} TFLOP/s"
    yield f"memory          {gpu.bytes_per_second / 1e9:10.3f} GB/s"
    if gpu.host_link is not None:
        yield f"to the host     {gpu.host_link.to_host_bytes_per_second / 1e9:10.3f} GB/s"
        yield f"to the GPU      {gpu.host_link.to_gpu_bytes_per_second / 1e9:10.3f} GB/s"

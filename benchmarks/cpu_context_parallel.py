"""Measures the CPU seconds of attention with dropout over two context-parallel ranks beside those of one.

python benchmarks/cpu_context_parallel.py     # s 1024, b 1: appends to benchmarks/results/cpu/context_parallel.jsonl

Both run forward and backward of the same sequence, in turns, in two processes on one thread each. What counts is the
processor's time, summed over the processes, so that a busy machine changes little: 1.0 means that the ranks together do
what one does. Causal attention costs both ranks the same. Bytes are those that a rank keeps for backward.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from measurements import DTYPES, RESULTS, describe_cpu_run, record_measurement
from megatron.core import parallel_state
from torch import Tensor

from tempo_kernels.attention import attention
from tempo_megatron import cpu
from tempo_megatron.slots.context_parallel import COMM_TYPES, attend, choose_exchange
from tempo_megatron.slots.dropout_rng import compute_document_segments

RANKS = 2
HEADS, HEAD_DIM = 12, 64
# "a2a+p2p" needs four ranks.
WAYS = [name for name in COMM_TYPES if "+" not in name]


def measure_rank(rank: int, store: str, args: argparse.Namespace, found: Any) -> None:
    """Puts (CPU seconds by way, one number per round; bytes kept by way) of one rank into the queue."""
    torch.set_num_threads(1)
    cpu.use_cpu()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(context_parallel_size=RANKS)
    generator = torch.Generator().manual_seed(1)
    shape = (args.seq_length, args.micro_batch_size, HEADS, HEAD_DIM)
    whole = [torch.randn(shape, generator=generator).to(DTYPES[args.dtype]) for _ in range(4)]
    segments = compute_document_segments((0, args.seq_length), rank, RANKS)
    rows = torch.cat([torch.arange(start, start + count) for _, start, count in segments])
    settings = {"causal": True, "softmax_scale": HEAD_DIM**-0.5, "dropout_p": args.dropout, "dropout_key": 7}

    def make_step(way: str) -> Callable[[], Tensor]:
        tensors = whole if way == "one rank" else [t[rows] for t in whole]
        leaves, grad = [t.clone().requires_grad_() for t in tensors[:3]], tensors[3]
        config = SimpleNamespace(context_parallel_size=RANKS, cp_comm_type=way)
        more = {} if way == "one rank" else {"exchange": choose_exchange(config, 1, None)}

        def step() -> Tensor:
            out = (attend if more else attention)(*leaves, **settings, **more)
            torch.autograd.grad(out, leaves, grad)
            return out

        return step

    steps = {way: make_step(way) for way in ("one rank", *WAYS)}
    seconds, kept = defaultdict(list), {}
    for way, step in steps.items():
        if way != "one rank" or rank == 0:
            kept[way] = count_kept(step)
    for round_number in range(args.rounds + 1):
        for way, step in steps.items():
            dist.barrier()
            if way == "one rank" and rank > 0:
                continue
            start = time.process_time()
            step()
            if round_number:
                seconds[way].append(time.process_time() - start)
    dist.barrier()
    found.put((dict(seconds), kept))
    dist.destroy_process_group()


def count_kept(step: Callable[[], Tensor]) -> int:
    """Counts the bytes of the storages that autograd holds after the forward of a step."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(kept.values())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns medians of the rounds, after one that does not count."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=measure_rank, args=(rank, f"{folder}/store", args, found)) for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        results = [found.get(timeout=3600) for _ in ranks]
        for process in ranks:
            process.join()
    alone = next(seconds["one rank"] for seconds, _ in results if "one rank" in seconds)
    one_ms = 1e3 * statistics.median(alone)
    record: dict[str, Any] = {
        "shape": {"s": args.seq_length, "b": args.micro_batch_size, "a": HEADS, "d": HEAD_DIM},
        "dtype": args.dtype,
        "p": args.dropout,
        "ranks": RANKS,
        "one_rank_cpu_ms": round(one_ms, 1),
        "one_rank_kept_bytes": next(kept["one rank"] for _, kept in results if "one rank" in kept),
    }
    for way in WAYS:
        together = [sum(parts) for parts in zip(*(seconds[way] for seconds, _ in results), strict=True)]
        record[way] = {
            "cpu_ms": round(1e3 * statistics.median(together), 1),
            "over_one_rank": round(1e3 * statistics.median(together) / one_ms, 4),
            "kept_bytes": max(kept[way] for _, kept in results),
        }
    return {**record, "rounds": args.rounds, **describe_cpu_run()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seq-length", type=int, default=1024, help="default %(default)s")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="default %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default %(default)s")
    parser.add_argument("--dropout", type=float, default=0.1, help="default %(default)s")
    record_measurement(parser, measure, RESULTS / "cpu" / "context_parallel.jsonl", rounds=5)


if __name__ == "__main__":
    main()

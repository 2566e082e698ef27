"""Lets the ranks of a job meet, compares their hosts, and times an all-reduce, for `tempo-megatron doctor --hostfile`.

Any launcher can start it: deepspeed --hostfile H --module tempo_megatron.cluster.meeting
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tempo_megatron.cluster.host import describe_host
from tempo_megatron.cluster.ranks import set_rank_environment

# Marks the line of JSON for doctor: launchers print on standard output too.
RESULT = "tempo-meeting "
_GIB = 2**30
_REPEATS, _TIMEOUT_SECONDS = 5, 60
_MOST_CLOCK_SECONDS = 5.0
# Containers get 64 MiB of /dev/shm by default, but NCCL and workers of data loaders need more.
_LEAST = (
    ("shm_bytes", _GIB // 2, "/dev/shm, which NCCL uses; start its container with --shm-size 8g"),
    ("disk_bytes", 2 * _GIB, "the folder the job starts in; remove something, or save elsewhere"),
)


def main() -> int:
    """Rank 0 prints the result as one line of JSON. The exit status is 1 if ranks do not meet or a sum is wrong."""
    parser = argparse.ArgumentParser(prog="meeting", description="Compare the hosts of a job and time an all-reduce.")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher gives it
    parser.add_argument("--mib", type=int, default=64, metavar="N", help="of the all-reduce (default 64)")
    args = parser.parse_args()
    try:
        launcher = set_rank_environment()
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        timeout = datetime.timedelta(seconds=_TIMEOUT_SECONDS)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
        result = {"launcher": launcher, **meet(device, args.mib)}
    except (ValueError, RuntimeError) as error:
        text = str(error).strip().splitlines()[0]
        print(f"error on rank {os.environ.get('RANK', '0')} ({socket.gethostname()}): {text}", file=sys.stderr)
        return 1
    if dist.get_rank() == 0:
        print(RESULT + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def meet(device: torch.device, mib: int) -> dict[str, Any]:
    """Gathers describe_host() of every host and the median seconds of an all-reduce; every rank calls it.

    The bandwidth is that of NCCL's tests: bytes * 2 (n - 1) / n / seconds. Raises RuntimeError if the sum is wrong.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    described: list[Any] = [None] * world_size
    dist.barrier()  # so that their clocks are read at one time
    dist.all_gather_object(described, describe_host())
    hosts: dict[str, dict[str, Any]] = {}
    for facts in described:
        hosts.setdefault(facts["host"], {"ranks": 0, **facts})["ranks"] += 1
    tensor = torch.full((mib * 2**18,), float(rank + 1), dtype=torch.float32, device=device)
    dist.all_reduce(tensor)
    if not torch.all(tensor == world_size * (world_size + 1) / 2):
        raise RuntimeError(f"an all-reduce of {mib} MiB gave a wrong sum; the network or a GPU is broken")
    seconds = statistics.median(_time_all_reduce(tensor) for _ in range(_REPEATS))
    carried = mib * 2**20 * 2 * (world_size - 1) / world_size
    reduced = {"bytes": mib * 2**20, "seconds": seconds, "bytes_per_second": carried / seconds}
    return {"backend": dist.get_backend(), "ranks": world_size, "hosts": list(hosts.values()), "all_reduce": reduced}


def _time_all_reduce(tensor: torch.Tensor) -> float:
    start = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start


def find_faults(hosts: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yields (level, host, sentence) for each thing in which a host differs from most, or of which it has little."""
    values = [
        {
            **{(name, "install the same version"): value for name, value in facts["versions"].items()},
            **{(f"the code of {name}", "copy the same checkout"): value for name, value in facts["sources"].items()},
            ("the device", "leave the host out, or mend its driver"): "GPU" if facts["gpus"] else "CPU",
        }
        for facts in hosts
    ]
    for name, remedy in values[0]:
        # Of two values that are equally frequent, that of the lower rank.
        usual = Counter(own[name, remedy] for own in values).most_common(1)[0][0]
        for facts, own in zip(hosts, values, strict=True):
            if (value := own[name, remedy]) != usual:
                text = f"{name} is {value or 'missing'}, elsewhere it is {usual or 'missing'}; {remedy} there"
                yield "error", facts["host"], text
    clock = statistics.median(facts["time"] for facts in hosts)
    for facts in hosts:
        if abs(facts["time"] - clock) > _MOST_CLOCK_SECONDS:
            yield "warning", facts["host"], f"its clock differs by {facts['time'] - clock:+.1f} s; start chrony there"
        for name, least, text in _LEAST:
            if facts[name] < least:
                yield "warning", facts["host"], f"{facts[name] / _GIB:.2f} GiB are free in {text}"


def describe(result: dict[str, Any]) -> str:
    """Formats a result as a table with a line for each host, and the time of the all-reduce."""
    rows = [("host", "ranks", "devices", "interface", "code", "python", "torch", "/dev/shm", "disk")]
    for facts in result["hosts"]:
        devices = f"{facts['gpus']} GPUs" if facts["gpus"] else f"{facts['cores']} cores"
        versions = facts["versions"]["python"], facts["versions"]["torch"] or "missing"
        free = (f"{facts[name] / _GIB:.1f} GiB" for name in ("shm_bytes", "disk_bytes"))
        code = str(facts["sources"]["tempo_megatron"])
        rows.append((facts["host"], str(facts["ranks"]), devices, facts["interface"] or "-", code, *versions, *free))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    reduced = result["all_reduce"]
    rate = f"{reduced['seconds'] * 1e3:.3f} ms, {reduced['bytes_per_second'] / _GIB:.3f} GiB/s per link"
    by = f"{result['backend']}, {result['ranks']} ranks by {result['launcher']}"
    return "\n".join([*lines, f"{by}: all-reduce of {reduced['bytes'] // 2**20} MiB {rate}, the sum is right"])


if __name__ == "__main__":
    sys.exit(main())

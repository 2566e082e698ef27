"""Times all-reduces, and messages from host to host, for `tempo-megatron doctor --collectives`.

Any launcher can start it: deepspeed --hostfile H --module tempo_megatron.cluster.collectives
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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tempo_megatron.cluster.ranks import set_rank_environment

# Marks the line of results for doctor.
RESULT = "tempo-collectives "
_MIB = 2**20
_REPEATS, _TIMEOUT_SECONDS = 5, 60


def main() -> int:
    """Measures; rank 0 prints one line of JSON. The exit status is 1 if a sum is wrong or ranks do not meet."""
    parser = argparse.ArgumentParser(prog="collectives", description="Time all-reduces and messages between hosts.")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher gives it
    parser.add_argument("--mib", type=int, default=64, metavar="N", help="of the largest all-reduce (default 64)")
    args = parser.parse_args()
    try:
        launcher = set_rank_environment()
        device = _join()
        result = measure(device, args.mib)
    except (ValueError, RuntimeError) as error:
        text = str(error).strip().splitlines()[0]
        print(f"error on rank {os.environ.get('RANK', '0')} of {socket.gethostname()}: {text}", file=sys.stderr)
        return 1
    if dist.get_rank() == 0:
        print(RESULT + json.dumps({"launcher": launcher, **result}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _join() -> torch.device:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=_TIMEOUT_SECONDS)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    return device


def measure(device: torch.device, mib: int) -> dict[str, Any]:
    """Measures median seconds of all-reduces and of messages between neighbouring hosts; every rank calls it.

    The bandwidth of an all-reduce is defined as in NCCL's tests: bytes * 2 (n - 1) / n / seconds, the traffic of each
    rank's link.

    Raises RuntimeError if a sum is wrong.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    hosts: list[Any] = [None] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    reduces = []
    for num_bytes in sorted({4096, min(4, mib) * _MIB, mib * _MIB}):
        tensor = torch.full((num_bytes // 4,), float(rank + 1), dtype=torch.float32, device=device)
        dist.all_reduce(tensor)
        expected = world_size * (world_size + 1) / 2
        if not torch.all(tensor == expected):
            raise RuntimeError(f"an all-reduce of {num_bytes} bytes gave a wrong sum; the network or a GPU is broken")
        seconds = _time(lambda tensor=tensor: dist.all_reduce(tensor), device)  # type: ignore[misc]
        carried = num_bytes * 2 * (world_size - 1) / world_size
        reduces.append({"bytes": num_bytes, "seconds": seconds, "bytes_per_second": carried / seconds})
    return {
        "backend": dist.get_backend(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "ranks": world_size,
        "hosts": hosts,
        "all_reduce": reduces,
        "links": _measure_links(hosts, device, min(16, mib) * _MIB),
    }


def _measure_links(hosts: list[str], device: torch.device, num_bytes: int) -> list[dict[str, Any]]:
    """Measures one link after the other, from the first rank of each host to the next host's, or between ranks of the
    same host if there is only one."""
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(leaders) == 1:
        leaders = list(range(len(hosts)))
    if len(leaders) == 1:
        return []
    rank, links = dist.get_rank(), []
    tensor = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    pairs = list(zip(leaders, leaders[1:] + leaders[:1], strict=True))
    for source, target in pairs if len(leaders) > 2 else pairs[:1]:

        def send_and_return(source: int = source, target: int = target) -> None:
            if rank == source:
                dist.send(tensor, target)
                dist.recv(tensor, target)
            elif rank == target:
                dist.recv(tensor, source)
                dist.send(tensor, source)

        seconds = _time(send_and_return, device) if rank in (source, target) else 0.0
        told = [seconds]
        dist.broadcast_object_list(told, src=source)
        names = {"from": f"rank {source} on {hosts[source]}", "to": f"rank {target} on {hosts[target]}"}
        links.append({**names, "seconds": told[0] / 2, "bytes_per_second": 2 * num_bytes / told[0]})
    return links


def _time(act: Callable[[], Any], device: torch.device) -> float:
    """Returns the median seconds of a few calls, without the first, which may open connections."""
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def describe(result: dict[str, Any]) -> str:
    """Formats a measurement as lines of text."""
    gib = 2**30
    lines = [f"{result['backend']}, {result['ranks']} ranks by {result['launcher']}, sums are right"]
    for entry in result["all_reduce"]:
        size = f"{entry['bytes'] // 1024} KiB" if entry["bytes"] < _MIB else f"{entry['bytes'] // _MIB} MiB"
        rate = entry["bytes_per_second"] / gib
        lines.append(f"all-reduce {size:>9}  {entry['seconds'] * 1e3:9.3f} ms  {rate:8.3f} GiB/s per link")
    for link in sorted(result["links"], key=lambda link: link["bytes_per_second"])[:8]:
        lines.append(f"{link['from']} to {link['to']}: {link['bytes_per_second'] / gib:.3f} GiB/s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

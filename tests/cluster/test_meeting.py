"""What doctor says of hosts that do not fit together, and that it meets those that do."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tempo_megatron.cli import main
from tempo_megatron.cluster.host import describe_host
from tempo_megatron.cluster.meeting import describe, find_faults

CHANGES: dict[str, tuple[dict[str, Any], str, str]] = {
    "versions": ({"versions": {"torch": "2.0"}}, "error", "torch is 2.0, elsewhere it is .*; install the same version"),
    "missing": ({"versions": {"deepspeed": None}}, "error", "deepspeed is missing, elsewhere"),
    "code": ({"sources": {"tempo_kernels": "0123"}}, "error", "the code of tempo_kernels is 0123"),
    "device": ({"gpus": 8}, "error", "the device is GPU, elsewhere it is CPU"),
    "clock": ({"time": 0.0}, "warning", "its clock differs by .* s; start chrony there"),
    "shm": ({"shm_bytes": 1 << 26}, "warning", "0.06 GiB are free in /dev/shm"),
    "disk": ({"disk_bytes": 0}, "warning", "0.00 GiB are free in the folder"),
}


@pytest.mark.parametrize(("change", "level", "sentence"), CHANGES.values(), ids=CHANGES)
def test_a_host_that_differs_is_named_with_what_to_do(change: dict[str, Any], level: str, sentence: str) -> None:
    plenty = {"ranks": 1, "gpus": 0, "shm_bytes": 1 << 40, "disk_bytes": 1 << 40}
    hosts = [{**copy.deepcopy(describe_host()), **plenty, "host": f"node{number}"} for number in range(3)]
    assert list(find_faults(hosts)) == []
    for name, value in change.items():
        hosts[1][name] = {**hosts[1][name], **value} if isinstance(value, dict) else value
    ((found_level, host, text),) = find_faults(hosts)
    assert (found_level, host) == (level, "node1")
    assert re.search(sentence, text)
    reduced = {"bytes": 1 << 22, "seconds": 0.001, "bytes_per_second": 2.0**32}
    table = describe({"hosts": hosts, "backend": "gloo", "ranks": 3, "launcher": "srun", "all_reduce": reduced})
    assert table.splitlines()[2].startswith("node1  1 ") and "all-reduce of 4 MiB 1.000 ms, 4.000 GiB/s" in table


def test_what_deepspeed_would_ignore_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (["--hostfile", str(tmp_path / "typo")], "typo is not a file; expected one of lines such as"),
        (["--include", "node1"], "--include is given without --hostfile"),
    ):
        assert main(["doctor", *words]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_hosts_that_are_not_reached_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("no.such.host.invalid slots=1\n")
    assert main(["doctor", "--json", "--hostfile", str(tmp_path / "hosts")]) == 1
    record = json.loads(capsys.readouterr().out)
    assert not record["ok"] and record["hosts"] is None
    assert any("do not meet (" in finding["text"] for finding in record["findings"])

"""The hosts of a job, asked by an ssh that is a script here: each thing that can be wrong is one sentence, soon."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tempo_megatron.cli import main
from tempo_megatron.cluster import host as this_host
from tempo_megatron.cluster.findings import Finding, judge
from tempo_megatron.cluster.hostfile import Host
from tempo_megatron.cluster.remote_host import Ssh
from tempo_megatron.cluster.survey import Survey, SurveyedHost, survey_hosts
from tempo_megatron.cluster.versions import PACKAGES

# The host is the last word but one. `live...` is this machine.
FAKE_SSH = r"""#!/bin/sh
for word; do host=$command; command=$word; done
case $host in
down) echo "ssh: connect to host down port 22: Connection timed out" >&2; exit 255 ;;
unknown) echo "ssh: Could not resolve hostname unknown: Name or service not known" >&2; exit 255 ;;
locked) echo "root@locked: Permission denied (publickey,password)." >&2; exit 255 ;;
new) echo "Host key verification failed." >&2; exit 255 ;;
closed) echo "ssh: connect to host closed port 22: Connection refused" >&2; exit 255 ;;
odd) echo "kex_exchange_identification: read: Connection reset by peer" >&2; exit 255 ;;
silent) exec sleep 60 ;;
esac
echo "Welcome to $host, last login yesterday"
exec sh -c "$command"
"""


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE_SSH)
    (folder / "ssh").chmod(0o755)
    (folder / "pdsh").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def survey(*names: str, ssh: Ssh | None = None, seconds: float = 30, **options: Any) -> Survey:
    hosts = [Host(name=name, slots=(0,), place=f"hosts, line {line}") for line, name in enumerate(names, start=1)]
    return survey_hosts(hosts, ssh or Ssh(), seconds=seconds, **{"port": free_port(), **options})


def free_port() -> int:
    with this_host.listen(0) as listener:
        return int(listener.getsockname()[1])


def sentences(found: Survey) -> list[str]:
    return [str(finding) for finding in judge(found)]


@pytest.mark.usefixtures("fake_ssh")
def test_a_live_host_says_what_it_has() -> None:
    found = survey("live", files=(__file__, "no such file"))
    (surveyed,) = found.hosts
    assert surveyed.error is None
    assert set(surveyed.facts["versions"]) == {"python", *PACKAGES} and surveyed.facts["versions"]["torch"]
    assert surveyed.facts["sources"]["tempo_megatron"] and surveyed.facts["files"]["no such file"] is None
    assert surveyed.facts["files"][__file__] == this_host.hash_file(__file__)
    assert surveyed.clock_ahead == 0.0 and found.port_error is None
    assert sentences(found) == []


@pytest.mark.usefixtures("fake_ssh")
def test_hosts_that_cannot_be_asked_are_named_with_what_to_do() -> None:
    found = sentences(survey("live", "down", "unknown", "locked", "new", "closed", "odd"))
    for host, why in (
        ("down", "or a firewall is between; start it, or remove its line from the hostfile (hosts, line 2)"),
        ("unknown", "its name is not known here; correct it in the hostfile"),
        ("locked", "let `ssh-copy-id locked` give it this user's key"),
        ("new", "its ssh key is not known here or has changed; `ssh new` once by hand"),
        ("closed", "no ssh server listens there; start sshd"),
        ("odd", "Connection reset by peer); make `ssh odd true` work without a password"),
    ):
        (sentence,) = [text for text in found if text.startswith(f"error: {host}: ")]
        assert why in sentence
    assert len(found) == 6


@pytest.mark.usefixtures("fake_ssh")
def test_a_host_that_never_answers_does_not_keep_anybody_waiting() -> None:
    start = time.monotonic()
    found = survey("silent", "silent", seconds=1)
    assert time.monotonic() - start < 5
    assert [text.partition("; ")[0] for text in sentences(found)] == ["error: silent: it did not answer in time"] * 2


@pytest.mark.usefixtures("fake_ssh")
def test_folders_and_pythons_that_are_missing_there_are_named(tmp_path: Path) -> None:
    venv_script = str(tmp_path / "no_venv")
    for ssh, why in (
        (Ssh(folder="/no/such/folder"), "the folder /no/such/folder is not there; share it"),
        (Ssh(python="/no/such/python"), "/no/such/python is not there; install the same environment"),
        (Ssh(python="/bin/false"), "/bin/false does not start there (exit code 1)"),
        (Ssh(venv_script=venv_script), f"--venv_script {venv_script} cannot be read there; correct it"),
    ):
        assert why in sentences(survey("live", ssh=ssh))[0]


@pytest.mark.usefixtures("fake_ssh")
def test_a_port_that_is_taken_is_said() -> None:
    with this_host.listen(0) as listener:
        port = listener.getsockname()[1]
        (sentence,) = sentences(survey("live", port=port))
    assert sentence == (
        f"error: live: port {port} cannot be taken for rank 0 (Address already in use); give another --master_port"
    )


@pytest.mark.usefixtures("fake_ssh")
def test_one_machine_with_two_names_and_an_address_that_no_other_host_reaches_are_said() -> None:
    found = sentences(survey("live1", "live2", master_addr="127.0.0.1"))
    assert any("live1 and live2 are one machine (hosts, line 1; hosts, line 2); expected one line" in s for s in found)
    assert any("rank 0 would listen on loopback only" in text and "--master_addr" in text for text in found)


VERSIONS = {"python": "3.11.7", "torch": "2.9.0", "deepspeed": "0.19.0", "apex": None}


def make_host(name: str, **facts: Any) -> SurveyedHost:
    standard = {
        "hostname": name,
        "hostname_addresses": [],
        "addresses": [["lo", "127.0.0.1", "255.0.0.0"], ["eth0", f"10.0.0.{len(name)}", "255.255.255.0"]],
        "boot": name,
        "versions": VERSIONS,
        "sources": {"tempo_megatron": "abc"},
        "files": {},
        "gpus": 8,
        "cores": 64,
        "shm_bytes": 2**36,
        "disk_bytes": 2**40,
    }
    host = Host(name=name, slots=tuple(range(8)), place=f"hosts, line {len(name)}")
    return SurveyedHost(host, facts={**standard, **facts}, reached={"accepted": ["10.0.0.1"]}, interface="eth0")


def judge_all(*hosts: SurveyedHost, **changes: Any) -> list[Finding]:
    found = Survey(list(hosts), 29500, address="10.0.0.1", candidates=["10.0.0.1", "127.0.0.1"])
    return judge(dataclasses.replace(found, **changes))


def test_hosts_that_are_alike_have_no_findings() -> None:
    assert judge_all(make_host("n"), make_host("nn"), make_host("nnn")) == []


@pytest.mark.parametrize(
    ("facts", "level", "sentence"),
    [
        ({"gpus": 4}, "error", "hosts, line 2: slots up to 7 are used, but it has 4 GPUs; write slots=4 or fewer"),
        ({"gpus": 0}, "error", "the device it trains on is CPU, on n it is GPU; leave one kind of hosts out"),
        ({"gpus": 0, "cores": 4}, "error", "but it has no GPU and 4 cores; write slots=4 or fewer"),
        ({"sources": {"tempo_megatron": "def"}}, "error", "the code of tempo_megatron is def, on n it is abc; copy"),
        ({"sources": {"tempo_megatron": None}}, "error", "the code of tempo_megatron is not there, on n it is abc"),
        ({"files": {"run.py": "1"}}, "error", "run.py is of content 1, on n it is not there; copy the same file"),
        ({"versions": {**VERSIONS, "torch": "2.8.0"}}, "error", "torch is 2.8.0, on n it is 2.9.0; install the same"),
        ({"versions": {**VERSIONS, "torch": "2.9.0+cpu"}}, "error", "has 8 GPUs, but torch 2.9.0+cpu is for the CPU"),
        ({"versions": {**VERSIONS, "deepspeed": None}}, "error", "deepspeed is not installed for its Python"),
        ({"shm_bytes": 2**26}, "warning", "0.06 GiB are free in /dev/shm, which NCCL and data loaders use; start"),
        ({"disk_bytes": 2**29}, "warning", "0.50 GiB are free in the folder the job starts in; remove something"),
    ],
)
def test_what_one_host_has_otherwise_is_said_of_that_host(facts: dict, level: str, sentence: str) -> None:
    findings = judge_all(make_host("n"), make_host("nn", **facts), make_host("nnn"))
    assert findings and {finding.host for finding in findings} == {"nn"}
    assert any(finding.level == level and sentence in finding.text for finding in findings), findings


def test_a_clock_that_is_off_is_a_warning() -> None:
    surveyed = make_host("nn")
    surveyed.clock_ahead = -61.5
    (finding,) = judge_all(make_host("n"), surveyed)
    assert str(finding) == "warning: nn: its clock is 61.5 s behind this host's; start chrony or ntpd there"


def test_a_host_behind_a_firewall_is_said_with_every_address_it_tried() -> None:
    surveyed = make_host("nn")
    surveyed.reached = {
        "accepted": [],
        "failed": {"10.0.0.1": "no answer within 2 s", "127.0.0.1": "Connection refused"},
    }
    (finding,) = judge_all(make_host("n"), surveyed, address=None)
    assert str(finding) == (
        "error: nn: it does not reach rank 0's port 29500 on n (10.0.0.1: no answer within 2 s); open it and those "
        "above 1023 between the hosts, or give --master_addr the address of a network that they share"
    )


def test_addresses_are_tried_at_once_and_each_failure_has_a_reason() -> None:
    with this_host.listen(0) as listener:
        port = listener.getsockname()[1]
        found = this_host.reach(["127.0.0.1", "127.0.0.2"], port, 2.0)
        assert found["accepted"] == ["127.0.0.1", "127.0.0.2"] and found["interfaces"]["127.0.0.1"] == "lo"
    assert this_host.reach(["127.0.0.1"], port, 2.0)["failed"] == {"127.0.0.1": "Connection refused"}


@pytest.mark.usefixtures("fake_ssh")
def test_doctor_names_a_host_that_is_down_within_ten_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempo_megatron.cluster.installation.find_obstacle", lambda: "not asked here")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("down slots=1\n")
    assert main(["doctor", "--hostfile", str(hostfile), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert not record["ok"] and record["hosts"][0]["error"].startswith("ssh does not get there")
    assert [finding["host"] for finding in record["findings"]] == ["down"]
    hostfile.write_text("down slots=0\n")
    assert main(["doctor", "--hostfile", str(hostfile)]) == 1
    assert capsys.readouterr().out.startswith(f"error: {hostfile}, line 1: slots=0 is given, expected the number of")
    with pytest.raises(SystemExit):
        main(["doctor", "--hostfile"])
    assert main(["doctor", "--include", "a"]) == 2
    assert "--include is given without --hostfile" in capsys.readouterr().err


@pytest.mark.usefixtures("fake_ssh")
def test_launch_starts_nothing_where_a_host_is_down(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("down slots=1\nunknown slots=1\n")
    start = time.monotonic()
    assert main(["launch", "deepspeed", "--hostfile", str(hostfile), __file__]) == 1
    assert time.monotonic() - start < 10
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: down: ssh does not get there") and err.endswith("nothing was started\n")


def test_without_ssh_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("ssh") is None
    assert sentences(survey("live"))[0] == "error: live: there is no ssh here; install openssh-client (hosts, line 1)"

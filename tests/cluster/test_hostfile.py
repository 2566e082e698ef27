"""The hostfile: DeepSpeed's format and filters, and one sentence for what DeepSpeed takes for something else."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tempo_megatron.cluster.deepspeed_command import make_parser, read_command
from tempo_megatron.cluster.hostfile import choose_hosts, read_hostfile


def write(folder: Path, text: str) -> str:
    path = folder / "hosts"
    path.write_text(text)
    return str(path)


def test_hosts_stand_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "# two of a kind\n\nnode-b slots=8\n  root@10.0.0.2\t slots=4  # half\n")
    hosts = read_hostfile(path)
    assert [(host.name, len(host.slots)) for host in hosts] == [("node-b", 8), ("root@10.0.0.2", 4)]
    assert hosts[1].place == f"{path}, line 4"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("node1 slots=0", "line 1: slots=0 is given, expected the number of node1's devices to use, 1 or more"),
        ("a slots=2\nnode1 slot=8", "line 2: 'node1 slot=8' is given, expected HOST slots=N, such as"),
        ("node1 slots=8x", "line 1: 'node1 slots=8x' is given, expected HOST slots=N"),
        ("node1 slots = 8", "line 1: 'node1 slots = 8' is given"),
        ("node1", "line 1: 'node1' is given"),
        ("node1,node2 slots=8", "line 1: 'node1,node2 slots=8' is given"),
        ("node1 slots=8 max_slots=16", "line 1: 'node1 slots=8 max_slots=16' is given"),
        ("-oProxyCommand=x slots=1", "line 1: '-oProxyCommand=x slots=1' is given"),
        ("node1 slots=99999999999999999999", "line 1: slots=99999999999999999999 is given"),
        ("a slots=1\nb slots=1\na slots=2", "line 3: a is given again, after line 1; expected one line for each host"),
        ("", "names no host; expected at least one line such as"),
    ],
)
def test_what_a_line_cannot_mean_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_hostfile(path)
    assert str(error.value).startswith(path) and sentence in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"node1 slots=1\n\xff\xfe")
    for path, sentence in (
        (tmp_path / "typo", "is not a file (DeepSpeed would train on this host only"),
        (tmp_path, "is not a file"),
        (tmp_path / "binary", "is not text in UTF-8 (byte 14)"),
    ):
        with pytest.raises(ValueError) as error:
            read_hostfile(path)
        assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"include": "c"}, "--include names c, which is not in the hostfile; expected one of a, b"),
        ({"include": "a:4"}, "--include names slot 4 of a, expected 0 to 3"),
        ({"include": "a:x"}, "--include 'a:x' is given, expected HOST"),
        ({"exclude": "a@b"}, "--exclude a@b leaves no slot"),
        ({"include": "a", "exclude": "b"}, "--include and --exclude are given"),
        ({"include": "a", "num_gpus": 2}, "is given beside --include or --exclude"),
        ({"num_nodes": 3}, "--num_nodes 3 is given, expected 1 to 2"),
        ({"num_gpus": 0}, "--num_gpus 0 is given"),
    ],
)
def test_a_filter_that_fits_no_host_is_one_sentence(options: dict, sentence: str, tmp_path: Path) -> None:
    hosts = read_hostfile(write(tmp_path, "a slots=4\nb slots=2\n"))
    with pytest.raises(ValueError) as error:
        choose_hosts(hosts, **options)
    assert sentence in str(error.value)


@pytest.mark.slow
def test_filters_leave_what_deepspeeds_own_leave(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import apply_num_nodes_and_gpus, fetch_hostfile, parse_inclusion_exclusion

    path = write(tmp_path, "a slots=4\nb slots=2\nc slots=3\n")
    for include, exclude, num_nodes, num_gpus in (
        ("", "", -1, -1),
        ("a@c:0,2", "", -1, -1),
        ("b:1@a", "", -1, -1),
        ("", "a:0,1,2,3@b:0", -1, -1),
        ("", "c", -1, -1),
        ("", "", 2, -1),
        ("", "", 2, 1),
        ("", "", -1, 2),
    ):
        theirs = apply_num_nodes_and_gpus(
            parse_inclusion_exclusion(fetch_hostfile(path), include, exclude), num_nodes, num_gpus
        )
        ours = choose_hosts(
            read_hostfile(path), include=include, exclude=exclude, num_nodes=num_nodes, num_gpus=num_gpus
        )
        assert {host.name: sorted(host.slots) for host in ours} == {name: sorted(s) for name, s in theirs.items()}


@pytest.mark.slow
def test_the_launchers_options_are_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.launcher import runner

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, args=None: self)
    ours, theirs = make_parser(), runner.parse_args()

    def describe(parser: argparse.ArgumentParser) -> dict[str, bool]:
        options = (action for action in parser._actions if "--help" not in action.option_strings)
        return {name: action.nargs == 0 for action in options for name in action.option_strings}

    # Gone since 0.19; 0.16 has them.
    gone = {"--elastic_training": True, "--max_elastic_nodes": False, "--min_elastic_nodes": False}
    assert describe(ours) == {**gone, **describe(theirs)}


def test_a_command_line_says_hosts_port_and_script(tmp_path: Path) -> None:
    path = write(tmp_path, "a slots=4\nb slots=2\n")
    argv = ["-H", path, "--include", "a@b:1", "--master_port=1234", "--ssh_port", "22", __file__, "--hostfile", "other"]
    command = read_command(argv)
    assert [(host.name, host.slots) for host in command.hosts] == [("a", (0, 1, 2, 3)), ("b", (1,))]
    assert (command.master_port, command.ssh_port, command.script, command.is_file) == (1234, 22, __file__, True)
    assert command.with_address("10.0.0.1") == ["deepspeed", "--master_addr", "10.0.0.1", *argv]
    assert read_command(["--num_gpus", "2", "--module", "a.b"]).hosts == ()
    # DeepSpeed starts a single host's job here.
    assert read_command(["-H", path, "--include", "a", __file__]).hosts == ()


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["-H", "hosts", "--no_such", "x.py"], "deepspeed's command line: unrecognized arguments"),
        (["--num_gpus", "two", __file__], "--num_gpus is 'two', expected a whole number"),
        (["--master_port", "70000", __file__], "--master_port is 70000, expected a port from 1 to 65535"),
        (["no_such_script.py"], "no_such_script.py is not a file; expected the script to start"),
        ([], "deepspeed's command line: the following arguments are required: user_script"),
    ],
)
def test_a_command_line_that_is_none_is_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        read_command(argv)
    assert sentence in str(error.value)

"""Two hosts on one machine: network, process and mount namespaces with an ssh server each, joined by one cable.

As on a fresh Debian each host's own name means 127.0.1.1, there is no default route and no DNS.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ADDRESSES = {"node0": "10.77.0.1", "node1": "10.77.0.2"}
_PROGRAMS = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "pdsh": "pdsh",
}
_SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def find_obstacle() -> str | None:
    """Why there can be no two hosts here; None where there can."""
    for program, package in _PROGRAMS.items():
        if shutil.which(program, path=_SEARCHED) is None:
            return f"needs {program} (apt-get install {package})"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    done = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
    return None if done.returncode == 0 else f"namespaces cannot be made here: {done.stderr.decode().strip()}"


@dataclasses.dataclass
class TwoNodes:
    """The running hosts."""

    folder: Path
    init: dict[str, int]
    """Of each host the process that is its process 1."""

    def inside(self, node: str, command: list[str]) -> list[str]:
        """The command that runs `command` on a host as somebody who is logged in there does."""
        enter = ["nsenter", "--target", str(self.init[node]), "--net", "--uts", "--pid", "--mount", "--"]
        return [*enter, "env", "-C", os.getcwd(), *command]

    def environment(self, **more: str) -> dict[str, str]:
        """For commands on a host: an ssh that gets to the other one; what this process says of Gloo is left out."""
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{_SEARCHED}"
        environ = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        return {**environ, "PATH": path, "HOME": str(self.folder), **more}

    def find_processes(self, node: str, text: str) -> list[str]:
        """Of the host's processes those with a text in their command line, by their numbers there; without an ssh."""
        command = ["pgrep", "-a", "-f", text]
        done = subprocess.run(self.inside(node, command), env=self.environment(), capture_output=True, text=True)
        return [line.split()[0] for line in done.stdout.splitlines() if "nsenter" not in line]


@contextlib.contextmanager
def start_two_nodes() -> Iterator[TwoNodes]:
    """Start them; everything is gone at the end, also what still ran on them."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="two-nodes-")))
        _write_keys(folder)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd does not start without
        names = {node: f"tempo-{os.getpid()}-{node}" for node in ADDRESSES}
        for name in names.values():
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        first, second = names.values()
        _ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        init = {}
        for node, name in names.items():
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "add", f"{ADDRESSES[node]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            process = _start_host(folder, node, name)
            stack.callback(process.wait)
            stack.callback(process.kill)
            init[node] = _find_child(process)
        nodes = TwoNodes(folder, init)
        _wait_until_reachable(nodes)
        yield nodes


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, env={**os.environ, "PATH": _SEARCHED})


def _write_keys(folder: Path) -> None:
    for name in ("user_key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/user_key\nIdentitiesOnly yes\nStrictHostKeyChecking no\n"
        "UserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh", path=_SEARCHED)} -F {folder}/ssh_config "$@"\n')
    ssh.chmod(0o755)


def _start_host(folder: Path, node: str, namespace: str) -> subprocess.Popen[bytes]:
    hosts = folder / f"{node}.hosts"
    others = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items() if name != node)
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {node}\n{others}")
    (folder / f"{node}.sshd").write_text(
        f"ListenAddress 0.0.0.0\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "PidFile none\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nStrictModes no\n"
        "MaxStartups 100\n"
    )
    sshd = shutil.which("sshd", path=_SEARCHED)
    inner = (
        f"hostname {node} && mount --bind {hosts} /etc/hosts && mount -t tmpfs none /dev/shm && "
        f"exec {sshd} -D -f {folder}/{node}.sshd -E {folder}/{node}.log"
    )
    namespaces = ["unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
    command = ["ip", "netns", "exec", namespace, *namespaces, "sh", "-c", inner]
    return subprocess.Popen(command, env={**os.environ, "PATH": _SEARCHED}, stdin=subprocess.DEVNULL)


def _find_child(process: subprocess.Popen[bytes]) -> int:
    # `ip netns exec` becomes unshare, whose child is process 1 of the host.
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 10
    while not (found := children.read_text().split()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return int(found[0])


def _wait_until_reachable(nodes: TwoNodes) -> None:
    environ: Mapping[str, str] = nodes.environment()
    deadline = time.monotonic() + 10
    for node in ADDRESSES:
        while subprocess.run(nodes.inside("node0", ["ssh", node, "true"]), env=environ, capture_output=True).returncode:
            logs = [path.read_text() for path in nodes.folder.glob("*.log")]
            assert time.monotonic() < deadline, f"{node} is not reachable: {logs}"
            time.sleep(0.05)

"""Describes this host, and answers questions that another host asks it.

remote_host.py sends the text of this file to the Python of other hosts by ssh. This package may be missing there, or be
of another version, so the file needs the standard library only and imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import select
import shutil
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

# Marks each answer, because a shell's start-up files may print other lines.
ANSWER = "tempo-host "
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B


def list_addresses() -> list[tuple[str, str, str]]:
    """Lists (interface, IPv4 address, netmask) of this host's interfaces that have an address, loopback included."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no address
                address, netmask = (
                    socket.inet_ntoa(fcntl.ioctl(device, number, request)[20:24])
                    for number in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                )
                found.append((name, address, netmask))
    return found


def is_loopback(address: str) -> bool:
    """Whether a numeric address reaches its own host only."""
    return address.startswith("127.") or address == "::1"


def find_source(address: str) -> str | None:
    """Returns this host's address on the route to `address` (numeric IPv4), or None without a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        try:
            unsent.connect((address, 9))
        except OSError:
            return None
        return str(unsent.getsockname()[0])


def find_interface(address: str) -> str | None:
    """Returns the interface by which this host reaches `address`, or None without a route.

    For an address of this host itself it returns the interface with that address. The route would be loopback, by which
    no other host comes in.
    """
    source = find_source(address)
    return next((name for name, own, _ in list_addresses() if own == source), None)


def resolve(name: str) -> list[str]:
    """Lists the numeric IPv4 addresses that this host knows for a host name."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        return []


def hash_sources(package: str) -> str | None:
    """Hashes the .py files of a package that Python would import, without importing it; None if there is none."""
    # find_spec imports the parents of a package; a top-level package has none.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def hash_file(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def count_gpus() -> int:
    """Counts the NVIDIA GPUs that processes of this host, or of this container, can open."""
    return sum(1 for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))


def describe_host(packages: list[str], sources: list[str], files: list[str]) -> dict[str, Any]:
    """Collects all that may differ between hosts of one job, in about a tenth of a second."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    shared, disk = shutil.disk_usage("/dev/shm"), shutil.disk_usage(".")
    name = socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "hostname": name,
        "hostname_addresses": resolve(name),
        "addresses": list_addresses(),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "versions": versions,
        "sources": {package: hash_sources(package) for package in sources},
        "files": {path: hash_file(path) for path in files},
        "gpus": count_gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "shm_bytes": shared.free,
        "disk_bytes": disk.free,
        "time": time.time(),
    }


def listen(port: int) -> socket.socket:
    """Opens the port as rank 0's store will: on all addresses, and even while connections of an earlier run linger."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def reach(addresses: list[str], port: int, seconds: float) -> dict[str, Any]:
    """Tries to connect to the port on all addresses at once, because one that drops packets takes all the time.

    Returns which addresses accepted, the interface by which each is reached, and why the others failed.
    """
    failed: dict[str, str] = {}
    pending: dict[socket.socket, str] = {}
    accepted: list[str] = []
    for address in addresses:
        trial = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        trial.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                trial.connect((address, port))
            except BlockingIOError:
                raise
            except OSError as error:
                failed[address] = error.strerror or str(error)
                trial.close()
                continue
        pending[trial] = address
    deadline = time.monotonic() + seconds
    while pending and (left := deadline - time.monotonic()) > 0:
        for trial in select.select([], list(pending), [], left)[1]:
            address = pending.pop(trial)
            number = trial.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                failed[address] = os.strerror(number)
            else:
                accepted.append(address)
            trial.close()
    for trial, address in pending.items():
        failed[address] = f"no answer within {seconds:.0f} s"
        trial.close()
    order = [address for address in addresses if address in accepted]
    return {"accepted": order, "interfaces": {address: find_interface(address) for address in order}, "failed": failed}


def answer_questions() -> None:
    """Answers each line of standard input, a JSON object, by one on standard output, until the input ends."""
    listener = None
    for line in sys.stdin:
        question = json.loads(line)
        kind = question.pop("kind")
        if kind == "describe":
            answer = describe_host(**question)
        elif kind == "listen":
            try:
                listener = listen(question["port"])
                answer = {"error": None}
            except OSError as error:
                answer = {"error": error.strerror}
        else:
            answer = reach(**question)
        print(ANSWER + json.dumps(answer), flush=True)
    if listener is not None:
        listener.close()

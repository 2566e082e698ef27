"""Finds this host's network interfaces, and describes it for a comparison with the other hosts of a job."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import socket
import struct
import time
from pathlib import Path
from typing import Any

from tempo_megatron.cluster.versions import PACKAGES, find_version

_SIOCGIFADDR = 0x8915


def list_addresses() -> list[tuple[str, str]]:
    """Lists (interface, IPv4 address) of this host's interfaces that have an address, loopback included."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no address
                found.append((name, socket.inet_ntoa(fcntl.ioctl(device, _SIOCGIFADDR, request)[20:24])))
    return found


def find_interface(address: str) -> str | None:
    """Returns the interface by which this host reaches `address` (numeric IPv4), or None without a route.

    For an address of this host itself it is the one with that address, not loopback. Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        try:
            unsent.connect((address, 9))
        except OSError:
            return None
        source = unsent.getsockname()[0]
    return next((name for name, own in list_addresses() if own == source), None)


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
    root, digest = Path(next(iter(spec.submodule_search_locations))), hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def count_gpus() -> int:
    """Counts the NVIDIA GPUs that processes of this host, or of this container, can open."""
    return sum(1 for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal())


def describe_host() -> dict[str, Any]:
    """Collects what may differ between the hosts of a job, in about a tenth of a second."""
    return {
        "host": socket.gethostname(),
        "versions": {"python": platform.python_version(), **{name: find_version(name) for name in PACKAGES}},
        "sources": {package: hash_sources(package) for package in ("tempo_megatron", "tempo_kernels")},
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "gpus": count_gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "shm_bytes": shutil.disk_usage("/dev/shm").free,
        "disk_bytes": shutil.disk_usage(".").free,
        "time": time.time(),
    }

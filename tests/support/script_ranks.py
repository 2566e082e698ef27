"""Runs a script on another megatron-core, or on the stand-in of Transformer Engine, in new processes, one per rank."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent


@functools.cache
def results(ranks: int, folder: str, root: str = "", script: str = "te_cases.py", *arguments: str) -> list[dict]:
    """What the script prints in each rank, with the megatron-core under `root`, by default the installed one."""
    source = SUPPORT.parents[1]
    own = [*map(str, (source, source / "kernels", SUPPORT)), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join([root, *own] if root else own)
    more = {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment = {**os.environ, **more, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(SUPPORT / script), str(Path(folder, f"store{ranks}"))]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        told = [child.communicate(timeout=600) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, told, strict=True):
        assert child.returncode == 0, errors[-6000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in told]

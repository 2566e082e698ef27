"""Describes what is installed here and what a run would use, for `doctor` and a run's banner."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator

import torch

from tempo_kernels.attention import describe as attention_backend
from tempo_kernels.compiled import find_compiler, get_obstacle
from tempo_megatron.cluster.versions import PACKAGES, find_version
from tempo_megatron.settings.operations import OPERATIONS


def describe_installation() -> Iterator[str]:
    """Yields a line for each version, device and operation's implementation, as soon as it is known."""
    yield f"python               {platform.python_version()} on {platform.system()} {platform.machine()}"
    for name in PACKAGES:
        yield f"{name:<21}{find_version(name) or 'not installed'}"
    cores = f"CPU                  {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield f"GPU {index:<17}{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        yield cores
        yield f"C++ compiler         {find_compiler() or 'none'} (not tried: nothing of Tempo needs it on a GPU)"
    else:
        yield "GPU                  none; training runs on the CPU with gloo"
        yield cores
        obstacle = try_compiler()
        fault = f"does not work: {obstacle}. Training runs without; what it would compile is slower"
        yield f"C++ compiler         {fault if obstacle else find_compiler()}"
    for name, text in list_implementations().items():
        yield f"tempo {name:<15}{text}"


def try_compiler() -> str | None:
    """Calls get_obstacle after telling the user to wait: torch's compiler alone takes seconds to import."""
    print(
        "trying the C++ compiler on a small function: 10 s, or a minute on a busy machine", file=sys.stderr, flush=True
    )
    import torch._inductor.config as inductor  # imports torch's compiler too

    # Inductor's compile processes each import torch; a single function needs none of them.
    with inductor.patch(compile_threads=1):
        return get_obstacle()


def list_implementations() -> dict[str, str]:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        operation.title or operation.name: describe_implementation(operation.name, device_type)
        for operation in OPERATIONS.values()
        if not operation.is_opt_in  # Megatron's own modules, once more
    }


def describe_implementation(operation: str, device_type: str, attention: str = "flash") -> str:
    """Names the implementation of an operation, by its name in OPERATIONS, on "cuda" or "cpu".

    `attention` is the TempoConfig's choice.
    """
    if device_type == "cuda":
        return attention_backend(device_type, attention) if operation == "attention" else "triton"
    if operation == "loss" or get_obstacle():
        return "plain torch"
    return "plain torch, compiled where that pays"

"""What is installed here, and what a run would use."""

from __future__ import annotations

import os
import platform

import torch

from tempo_kernels.attention import describe as attention_backend
from tempo_kernels.compiled import find_compiler, find_obstacle
from tempo_megatron.cluster.versions import PACKAGES, find_version
from tempo_megatron.operations import OPERATIONS


def describe_installation() -> str:
    """Versions, devices, and which implementation each operation takes here, one line each."""
    lines = [f"python               {platform.python_version()} on {platform.system()} {platform.machine()}"]
    for name in PACKAGES:
        lines.append(f"{name:<21}{find_version(name) or 'not installed'}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            lines.append(f"GPU {index:<17}{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        lines.append("GPU                  none; training runs on the CPU with gloo")
    lines.append(f"CPU                  {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    obstacle = find_obstacle()
    compiler = f"does not work: {obstacle}. Training runs without; on a CPU what it would compile is slower"
    lines.append(f"C++ compiler         {compiler if obstacle else find_compiler()}")
    lines += [f"tempo {name:<15}{text}" for name, text in list_implementations().items()]
    return "\n".join(lines)


def list_implementations() -> dict[str, str]:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        operation.title or operation.name: describe_implementation(operation.name, device_type)
        for operation in OPERATIONS.values()
        if not operation.is_for_the_asking  # Megatron's own modules, once more
    }


def describe_implementation(operation: str, device_type: str, attention: str = "flash") -> str:
    """What an operation of Tempo runs on, in the words of `doctor` and of a run's banner.

    Args:
        operation: its name in OPERATIONS.
        device_type: "cuda" or "cpu".
        attention: the TempoConfig's choice.
    """
    if device_type == "cuda":
        return attention_backend(device_type, attention) if operation == "attention" else "triton"
    if operation == "loss" or find_obstacle():
        return "plain torch"
    return "plain torch, compiled where that pays"

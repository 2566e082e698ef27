"""Says whether this process's megatron-core is one that Tempo has been compared with.

`tests/slots/test_megatron_versions.py` compares Tempo with stock in the versions from FIRST to LAST; another one is
tried, with a warning. docs/megatron_versions.md lists what differs between them.
"""

from __future__ import annotations

import warnings
from typing import Any

import megatron.core
from packaging.version import Version

FIRST, LAST = "0.14.0", "0.20"
"""The range that has been compared with stock; the patches of a version are taken to be alike."""


def find_version() -> Version:
    """This process's. Megatron-DeepSpeed carries the core of 0.2.0, which does not say so."""
    return Version(getattr(megatron.core, "__version__", "0.2.0"))


def is_since(version: str) -> bool:
    """Whether this process's Megatron is `version`, a pre-release of it, or newer."""
    return Version(f"{version}.dev0") <= find_version()


def has_cuda_graphs(config: Any) -> bool:
    """Whether a TransformerConfig has layers run as CUDA graphs, by any version's name for it."""
    names = ("enable_cuda_graph", "external_cuda_graph")
    return getattr(config, "cuda_graph_impl", "none") != "none" or any(getattr(config, name, False) for name in names)


def check_megatron() -> None:
    """Warn where this process's megatron-core is none that Tempo has been compared with."""
    # tempo_megatron.megatron_lm.megatron_deepspeed uses dropout_rng alone, which needs nothing newer.
    version = find_version()
    is_known = Version(FIRST).release[:2] <= version.release[:2] <= Version(LAST).release[:2]
    if hasattr(megatron.core, "__version__") and not is_known:
        warnings.warn(
            f"megatron-core is {version}; Tempo has been compared with {FIRST} to {LAST}; it is tried all the same, so "
            "compare a few steps of your run with and without Tempo at dropout 0",
            stacklevel=2,
        )

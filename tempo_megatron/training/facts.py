"""Collects what all ranks of a run must have in common: code, packages, data, and where they differ.

Data sets are compared by content, not by place. A resumed run compares them with the first run's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from tempo_megatron.cluster.host import hash_sources
from tempo_megatron.cluster.versions import find_version

if TYPE_CHECKING:
    from tempo_megatron.training.run.run_config import RunConfig
    from tempo_megatron.training.tasks.task import Vocabulary

# Names of files may differ between nodes; the content of those that are read is compared.
_FILES = ("deepspeed_config", "data_path", "blend", "vocab_file", "merge_file", "data_cache_path")
_SOURCES = ("tempo_kernels", "tempo_megatron")
_PACKAGES = ("torch", "megatron-core", "deepspeed", "triton", "numpy", "transformer_engine", "apex", "flash-attn")
# Prefixes of the variables that change what is computed or which collectives are called.
_VARIABLES = (
    *("TORCH_", "PYTORCH_", "NVTE_", "NCCL_", "CUBLAS_", "CUDNN_", "CUDA_", "NVIDIA_TF32_", "DS_", "TRITON_"),
    *("TEMPO_", "MKL_", "MEGATRON_", "ATEN_"),
)
# Suffixes of those that name a place, or that may differ between nodes or ranks.
_LOCAL = (
    *("_DIR", "_HOME", "_PATH", "_IFNAME", "_HCA", "_FILE", "_ROOT", "_DEBUG", "_LOGS", "_DEVICES", "_VERSION"),
    *("_HOSTNAME", "_ADDR", "_NUMA", "_EXTENSIONS", "_CPP_LOG_LEVEL", "_NCCL_ASYNC_ERROR_HANDLING"),
)


def collect_facts(run: RunConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """Collects everything that must be the same on every rank, by name.

    Only the first rank of each node reads the data; its other ranks see the same files.
    """
    settings = {name: value for name, value in dataclasses.asdict(run).items() if name not in _FILES}
    described = {name: value for name, value in vocabulary.describe().items() if name != "tokenizer_files"}
    facts: dict[str, Any] = {
        "setting": settings,
        "package": {
            **{package: hash_sources(package) for package in _SOURCES},
            "python": platform.python_version(),
            **{package: find_version(package) or "not installed" for package in _PACKAGES},
        },
        "variable": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not name.endswith(_LOCAL)
        },
        "tokenizer": {**described, **vocabulary.tokenizer.unique_identifiers},
        "data": {"number": len(run.blend[0]), "weights": run.blend[1]},
    }
    if int(os.environ["LOCAL_RANK"]) == 0:
        facts["data"] |= {
            f"content of set {number}": compute_checksum(prefix) for number, prefix in enumerate(run.blend[0], start=1)
        }
    return facts


_BLOCK = 1 << 16
_BLOCKS = 64


def identify_data(run: RunConfig, tokenizer: Any) -> dict[str, Any]:
    """Returns share and checksum of each data set, and the tokenizer's checksum; rank 0 reads, all ranks call it."""
    import torch.distributed as dist  # the command line is checked without torch

    identity: list[Any] = [None]
    if dist.get_rank() == 0:
        prefixes, weights = run.blend
        weights = weights or (1.0,)
        shares = [weight / sum(weights) for weight in weights]
        identity = [[[share, compute_checksum(prefix)] for share, prefix in zip(shares, prefixes, strict=True)]]
    dist.broadcast_object_list(identity, src=0)
    files = sorted(f"{name} {value}" for name, value in tokenizer.unique_identifiers.items())
    return {"data": identity[0], "tokenizer": hashlib.sha256("\n".join(files).encode()).hexdigest()}


@cache
def compute_checksum(prefix: str) -> str:
    """Returns the sha256 of PREFIX.idx and of 64 evenly spaced blocks of PREFIX.bin, which may be too large to read."""
    digest = hashlib.sha256()
    with open(prefix + ".idx", "rb") as index:
        while part := index.read(1 << 22):
            digest.update(part)
    size = os.path.getsize(prefix + ".bin")
    digest.update(str(size).encode())
    with open(prefix + ".bin", "rb") as tokens:
        last = max(0, size - _BLOCK)
        for start in sorted({last * number // (_BLOCKS - 1) for number in range(_BLOCKS)}):
            tokens.seek(start)
            digest.update(tokens.read(_BLOCK))
    return digest.hexdigest()


_ABSENT = object()


def find_difference(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Says in one sentence how the first rank that differs from rank 0 differs; returns None if none does.

    `facts` are collect_facts of each rank, and "host".
    """
    first = flatten(facts[0])
    for rank, other in enumerate(facts[1:], start=1):
        found = flatten(other)
        names = [name for name in {**first, **found} if _is_other(name, first, found)]
        if names:
            name = names[0]
            more = f" ({len(names) - 1} more: {', '.join(names[1:4])})" if names[1:] else ""
            return (
                f"the ranks are not of one run: {name} is {_write(found, name)} on rank {rank} ({other['host']}) and "
                f"{_write(first, name)} on rank 0 ({facts[0]['host']}){more}; start every rank with the same command "
                "line, files, packages and environment"
            )
    return None


def flatten(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens `{"setting": {"deepspeed": {"stage": 1}}}` to `{"setting deepspeed.stage": 1}`."""

    def walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, Mapping):
            yield name, value
            return
        for key, inner in value.items():
            yield from walk(f"{name}.{key}" if " " in name else f"{name} {key}", inner)

    return dict(pair for kind, block in facts.items() for pair in walk(kind, block))


def _is_other(name: str, first: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    if name == "host":
        return False
    if name.startswith("data content of set "):  # only the first rank of a node has it
        return name in first and name in found and bool(first[name] != found[name])
    return bool(first.get(name, _ABSENT) != found.get(name, _ABSENT))


def _write(facts: Mapping[str, Any], name: str) -> str:
    return repr(facts[name]) if name in facts else "not set"

"""What a data set is, wherever it lies: a checksum that a resumed run compares with that of the first run."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from tempo_megatron.training.run.run_config import RunConfig

_BLOCK = 1 << 16
_BLOCKS = 64


def identify_data(run: RunConfig, tokenizer: Any) -> dict[str, Any]:
    """`data`: share and checksum of each data set in order; `tokenizer`: checksum. Rank 0 reads, all ranks call it."""
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
    """sha256 of all of PREFIX.idx and of 64 evenly spaced blocks of PREFIX.bin, which may be too large to read."""
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

"""Imported by the server that rank_processes.py starts: what is slow the first time in a process, done once for all."""

from __future__ import annotations

import torch
import torch._inductor.config


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


# The first compilation of a process imports the compiler and hashes all files of torch and Triton: 5 s for each rank
# that tries whether compiling works. Each still tries. One thread, since threads do not outlive a fork.
torch.set_num_threads(1)
with torch._inductor.config.patch(compile_threads=1):
    for _ in range(2):  # once more where another process was writing to the same cache
        try:
            torch.compile(_add_one, dynamic=True)(torch.zeros(16))
            break
        except Exception:  # no compiler: every rank finds out for itself
            torch._dynamo.reset()

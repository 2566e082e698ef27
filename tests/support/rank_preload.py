"""Imported by the server that rank_processes.py starts: what is slow the first time in a process, done once for all."""

from __future__ import annotations

import gc

import deepspeed.runtime.zero.muon.muon_optimizer  # every engine imports it, and it calls torch.compile
import megatron.core.datasets.helpers  # noqa: F401 - as every run's data do
import torch
import torch._inductor.config

from tempo_kernels.compiled import get_obstacle

# A first compilation imports the compiler and hashes all files of torch and Triton. A rank inherits what it found, and
# asks no more. Ranks without this server, as of test_trainer_launchers.py, each try. Threads do not outlive a fork.
torch.set_num_threads(1)
with torch._inductor.config.patch(compile_threads=1):
    get_obstacle()

# Else DeepSpeed calls compilers for a second in each rank, to know which of its extensions it could compile.
vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False

# DeepSpeed collects garbage when it starts: in each rank through all that was imported here, and copies its pages.
gc.collect()
gc.freeze()

"""Counts cuBLAS's workspaces on a GPU, which torch's allocator counts as allocated for the life of a process.

torch gives each handle of cuBLAS a workspace on its first product, and each thread has a handle of its own: that of
forward, and autograd's of backward (aten/src/ATen/cuda/CublasHandlePool.cpp: getCurrentCUDABlasHandle,
parseChosenWorkspaceSize). Transformer Engine's products share one of their own (2.20,
pytorch/cpp_extensions/gemm.py:40-67). A router's product is one of these whosever the layers are, where Transformer
Engine is installed, as it is taken to be (core/transformer/moe/moe_utils.py:1192 of megatron-core 0.16.1). Where
published runs differ in nothing but the GPU or --deterministic-mode, these sizes are the difference (NVIDIA's
functional tests of Megatron-LM: 28 MiB from A100 to H100 under gpt3_7b_tp4_pp1_memory_speed, 47.75 MiB on GB200 from
one mode to the other, or with torch 2.12). The torch of a run is taken to be the one that is installed here.
"""

from __future__ import annotations

import torch

from tempo_megatron.memory.estimate.allocator import Library
from tempo_megatron.memory.run import Run

_KIB = 1 << 10
DETERMINISTIC_BYTES = 8 * 4096 * _KIB
"""CUBLAS_WORKSPACE_CONFIG=:4096:8, without which torch's deterministic algorithms refuse products."""


def find_torch_bytes(gpu: str, version: str = torch.__version__) -> int:
    """Of one handle where CUBLAS_WORKSPACE_CONFIG says nothing: cuBLAS's default of :4096:2:16:8, or more.

    Hopper has more, and so has Blackwell from torch 2.12 on (pytorch/pytorch#175344).
    """
    major, minor = (int(number) for number in version.split(".")[:2])
    if gpu == "h100" or (gpu == "gb200" and (major, minor) >= (2, 12)):
        return DETERMINISTIC_BYTES
    return (2 * 4096 + 8 * 16) * _KIB


TRANSFORMER_ENGINE_BYTES = {"a100": 4096 * _KIB, "h100": 32 * 1024 * _KIB + 1024, "gb200": 32 * 1024 * _KIB + 1024}


GROUPED_STREAMS = 4
"""Grouped products of experts run on so many streams, each with a workspace of Transformer Engine's size
(common/util/multi_stream.cpp: nvte_get_num_compute_streams)."""

OVERLAPPED_STREAMS = 3
"""Products that overlap tensor-parallel communication share a workspace of so many times that size
(pytorch/cpp_extensions/gemm.py:55-60). The buffers that they communicate through are cudaMalloc's, which torch's
allocator does not count (common/comm_gemm_overlap/userbuffers/userbuffers-host.cpp: register_user_buffer_collective).
"""


def list_workspaces(run: Run, *, has_head: bool) -> dict[Library, list[int]]:
    """Whose handle -> the bytes of each workspace of one rank; none where nothing says which GPU it is.

    Args:
        run: on a GPU.
        has_head: whether the rank has the loss head, whose product is torch's whoever's the layers are.
    """
    if run.gpu is None or run.stock == "cpu":
        return {}
    default = DETERMINISTIC_BYTES if run.deterministic else find_torch_bytes(run.gpu)
    of_torch = [default if run.cublas_workspace_bytes is None else run.cublas_workspace_bytes]
    of_both = {Library.TORCH: of_torch, Library.TORCH_BACKWARD: of_torch}
    of_one = TRANSFORMER_ENGINE_BYTES[run.gpu]
    if run.stock == "local":
        has_router = run.model.num_experts is not None and run.router_dtype != torch.float64
        return of_both | ({Library.ENGINE: [of_one]} if has_router else {})
    # Tempo leaves Transformer Engine's linears where they are.
    uses_torch = has_head or (run.stock_attention == "unfused" and run.tempo.attention != "flash")
    num_streams = 1 + (GROUPED_STREAMS if run.moe_grouped_gemm else 0)
    overlapped = [OVERLAPPED_STREAMS * of_one] if run.overlaps_tensor_parallel else []
    return {Library.ENGINE: [*[of_one] * num_streams, *overlapped]} | (of_both if uses_torch else {})

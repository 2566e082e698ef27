"""Counts what torch, cuBLAS, Transformer Engine and Megatron hold on a GPU beside the model: workspaces, placeholders
of gradients, weights in float8, rotary tables and experts' routing.

cuBLAS's workspaces count as allocated for the life of a process. torch gives each handle of cuBLAS one on its first
product, and each thread has a handle of its own: that of forward, and autograd's of backward
(aten/src/ATen/cuda/CublasHandlePool.cpp: getCurrentCUDABlasHandle, parseChosenWorkspaceSize). Transformer Engine's
products share one of their own (2.20, pytorch/cpp_extensions/gemm.py:40-67). A router's product is one of these
whosever the layers are, where Transformer Engine is installed, as it is taken to be
(core/transformer/moe/moe_utils.py:1192 of megatron-core 0.16.1). Where published runs differ in nothing but the GPU or
--deterministic-mode, these sizes are the difference (NVIDIA's functional tests of Megatron-LM: 28 MiB from A100 to H100
under gpt3_7b_tp4_pp1_memory_speed, 47.75 MiB on GB200 from one mode to the other, or with torch 2.12). The torch of a
run is taken to be the installed one.

Rotary embeddings are cached where they are made (core/models/common/embeddings/rotary_pos_embedding.py: lru_cache): by
the model, or with latent attention by every layer, with tables of cosines and sines beside them where it is Yarn's
(yarn_rotary_pos_embedding.py: _set_cos_sin_cache; of the run's dtype, as the model's other buffers). A dispatcher has
in attributes how the tokens of the latest micro batch went to experts (core/transformer/moe/token_dispatcher.py:
MoEAlltoAllTokenDispatcher.dispatch_preprocess, MoEAllGatherTokenDispatcher.dispatch_postprocess,
_HybridEPManager.setup_metadata). Both of Megatron-LM at d98e8a64dd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from tempo_megatron.memory.rank.play import Library
from tempo_megatron.memory.rank.standing import FLOAT32, Tensor
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk_memory import ChunkMemory
from tempo_megatron.memory.simulated.float8 import count_float8_bytes
from tempo_megatron.memory.tape.tape import ENGINE_PRODUCT, TORCH_PRODUCT

ENGINE, TORCH, TORCH_BACKWARD = (ENGINE_PRODUCT, False), (TORCH_PRODUCT, False), (TORCH_PRODUCT, True)
DETERMINISTIC_BYTES = 32 << 20
"""CUBLAS_WORKSPACE_CONFIG=:4096:8, without which torch's deterministic algorithms refuse products."""
_ENGINE_BYTES = {"a100": 4 << 20, "h100": (32 << 20) + 1024, "gb200": (32 << 20) + 1024}
_GROUPED_STREAMS = 4
"""Grouped products of experts run on so many streams, each with a workspace of Transformer Engine's size
(common/util/multi_stream.cpp: nvte_get_num_compute_streams)."""
_OVERLAPPED_STREAMS = 3
"""Products that overlap tensor-parallel communication share a workspace of so many times that size
(pytorch/cpp_extensions/gemm.py:55-60). The buffers that they communicate through are cudaMalloc's, which torch's
allocator does not count (common/comm_gemm_overlap/userbuffers/userbuffers-host.cpp: register_user_buffer_collective).
"""
_YARN_POSITIONS = 4096
"""Of Yarn's tables where no kernel rotates (--original-max-position-embeddings)."""


def get_torch_bytes(gpu: str, version: str = torch.__version__) -> int:
    """Of one handle where CUBLAS_WORKSPACE_CONFIG says nothing: cuBLAS's default of :4096:2:16:8, or more.

    Hopper has more, and so has Blackwell from torch 2.12 on (pytorch/pytorch#175344).
    """
    major, minor = (int(number) for number in version.split(".")[:2])
    if gpu == "h100" or (gpu == "gb200" and (major, minor) >= (2, 12)):
        return DETERMINISTIC_BYTES
    return (2 * 4096 + 8 * 16) << 10


def list_workspaces(run: Run, *, has_head: bool) -> dict[Library, list[int]]:
    """Whose handle -> the bytes of each workspace of one rank; none where nothing says which GPU it is.

    has_head: whether the rank has the loss head, whose product is torch's whoever's the layers are.
    """
    if run.gpu is None or run.stock == "cpu":
        return {}
    default = DETERMINISTIC_BYTES if run.deterministic else get_torch_bytes(run.gpu)
    of_torch = [default if run.cublas_workspace_bytes is None else run.cublas_workspace_bytes]
    of_both, of_one = {TORCH: of_torch, TORCH_BACKWARD: of_torch}, _ENGINE_BYTES[run.gpu]
    if run.stock == "local":
        has_router = run.model.num_experts is not None and run.router_dtype != torch.float64
        return of_both | ({ENGINE: [of_one]} if has_router else {})
    # Tempo leaves Transformer Engine's linears where they are.
    uses_torch = has_head or (run.stock_attention == "unfused" and run.tempo.attention != "flash")
    num_streams = 1 + (_GROUPED_STREAMS if run.moe_grouped_gemm else 0)
    overlapped = [_OVERLAPPED_STREAMS * of_one] if run.overlaps_tensor_parallel else []
    return {ENGINE: [*[of_one] * num_streams, *overlapped]} | (of_both if uses_torch else {})


def list_library_tensors(run: Run, stage: int, chunks: Sequence[ChunkMemory]) -> Iterator[Tensor]:
    """What the libraries hold from step to step on a rank of a stage, but for workspaces.

    Its chunks share a global memory buffer, which stays from the first micro batch on.
    """
    # Of weights that are in float8 alone Megatron-FSDP makes the transposed copy for a unit's backward
    # (megatron_fsdp.py: release_params_fp8_transpose_cache).
    is_passing = run.float8_weights and run.optimizer.fsdp is not None
    if run.gpu is not None and run.float8 is not None and not is_passing:
        weights = sum(chunk.float8_weights for chunk in chunks)
        copies = count_float8_bytes(weights, run.float8, run.gpu)
        yield Tensor("float8 weights", copies - (weights if run.float8_weights else 0))
    if run.gpu is not None:
        yield from (Tensor("lasting tensors", size) for size in list_lasting_tensors(run, stage))
    yield Tensor("global memory buffer", max(chunk.global_buffer_bytes for chunk in chunks))
    # Of each gradient that autograd is given where the product itself adds to the float32 buffer. Transformer Engine
    # keeps one for each shape and dtype (transformer_engine/pytorch/module/base.py:134-148 of 2.20), which Megatron's
    # linears take too (core/tensor_parallel/layers.py: get_dummy_wgrad).
    if run.gpu is not None and run.fuses_gradient_accumulation:
        for shape in sorted({each.shape for chunk in chunks for each in chunk.parameters if each.is_factor}):
            yield Tensor("placeholder gradients", math.prod(shape) * run.dtype.itemsize)


def list_lasting_tensors(run: Run, stage: int) -> Iterator[int]:
    """Bytes of each rotary table, and of each layer's routing, on a rank of a pipeline stage."""
    chunks = run.list_chunks(stage)
    layers = [layer for chunk in chunks for layer in chunk]
    if run.mtp_num_layers and any(ends["predicts"] for ends in run.list_ends(stage)):
        # Those of multi-token prediction are as the model's last, or of a hybrid as its pattern says.
        last = run.model.num_layers - 1 if run.hybrid is None else run.hybrid.pattern.rfind(run.hybrid.mtp_pattern[-1])
        layers += [last] * (1 if run.mtp_repeats_layer else run.mtp_num_layers)
    model, positions, is_rotary = run.model, run.tokens_of_sample, run.model.position_embedding_type in ("rope", "yarn")
    if is_rotary and not model.multi_latent_attention:
        # As long as the head's input, which further tokens' hidden states lengthen (gpt_model.py: get_rotary_seq_len).
        longer = run.mtp_num_layers if run.mtp_precedes_head and stage == run.layout.pp - 1 else 0
        of_table = FLOAT32 * positions * int(model.kv_channels * model.rotary_percent)
        yield from [of_table] * (len(chunks) + longer)
    elif is_rotary:
        of_layer = [FLOAT32 * positions]
        if model.position_embedding_type == "yarn":
            # A context-parallel rank has its own positions.
            in_tables = positions if run.fuses_latent_rope else _YARN_POSITIONS // run.layout.cp
            of_layer += [run.dtype.itemsize * in_tables] * 2
        yield from [(model.qk_pos_emb_head_dim or 0) * each for each in of_layer] * len(layers)
    with_experts = sum(model.layers_with_experts[layer] for layer in layers)
    yield from [_count_routing(run)] * with_experts if with_experts else ()


def _count_routing(run: Run) -> int:
    """Of one layer: probabilities, which expert each token goes to, and where its copies lie."""
    tokens = run.num_tokens // (run.layout.tp if run.layout.sp else 1)
    of_probability, number = (run.router_dtype or run.dtype).itemsize, run.model.num_experts or 0
    if run.layout.dispatcher == "flex":
        return tokens * number * (FLOAT32 + 1)
    if run.layout.dispatcher == "alltoall":
        rows = run.count_sent(tokens)
        probabilities = tokens * number * of_probability
    else:
        tokens *= run.layout.ep * run.layout.etp
        number, rows = run.num_local_experts, run.count_sent(tokens) // run.layout.ep
        probabilities = rows * of_probability
    # An int64 for each copy; a kernel has an int32 for each token and twice each expert, and how many there are.
    places = 4 * tokens * (2 * number + 1) if run.moe_permute_fusion else 8 * rows
    return tokens * number + probabilities + places

"""A CPU that answers as a CUDA device, so that an unmodified Megatron-LM checkout trains on it. For tests only.

Megatron-LM's training code asks for CUDA by name. What is answered here, and how:

- Tensors: device "cuda" (and "cuda:N", and torch.device of both) in any torch function, `Tensor.cuda()` and
  `Module.cuda()` mean the CPU. `Tensor.type()` says torch.cuda.FloatTensor where it would say torch.FloatTensor,
  because the optimizers compare that text.
- torch.cuda: `is_available` is True and `device_count` 1, the capability is 8.0; `set_device`, `synchronize`,
  `empty_cache` and the memory statistics do nothing and say 0. Streams and events are objects that do nothing, as the
  CPU does all in order, and an event's elapsed time is 0.
- Random numbers: the device's generator is the CPU's (tempo_megatron.cpu.use_cpu, which also gives Megatron's tracker
  states of its own for the tensor-parallel region).
- torch.distributed: backend "nccl" means gloo, without options and device ids; `all_reduce` of gloo has no AVG for
  every dtype, so that AVG is a sum and a division.
  What is sent to another stage is a copy: Megatron lets go of the memory while it is sent, which a GPU's stream keeps.
- What is compiled for a GPU is not: the fused kernels of megatron.legacy, the dataset's helpers (the compiled file must
  lie in the checkout), the warm-up of the JIT fusions. `torch.compile` gives functions that run as they are written.
- Names that 0.16.1 never defines without Transformer Engine, though its local layers are to be had without: None for
  `moe_utils.te_general_gemm` and for the BERT spec of Transformer Engine, which pretrain_bert.py imports.

- `typing.override`, which Megatron-LM asks for since 0.17 and Python has since 3.12, does nothing.

What this cannot show: anything about time and memory on a GPU, overlap of streams, Apex, Transformer Engine and FP8.
"""

from __future__ import annotations

import contextlib
import importlib
import typing
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tempo_megatron.cpu import use_cpu

_CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).partition(":")[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Device "cuda" in any argument of a torch function is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is not torch.device and any(map(_is_cuda, (*args, *kwargs.values()))):
            args = tuple(_CPU if _is_cuda(value) else value for value in args)
            kwargs = {name: _CPU if _is_cuda(value) else value for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _Nothing:
    """A stream or an event: everything one can ask of it does nothing."""

    cuda_stream = 0
    stream_id = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _Properties:
    name = "CPU"
    major, minor = 8, 0
    total_memory = 0
    multi_processor_count = 1


def install() -> None:
    """Answer as a CUDA device in this process from now on. Call it before Megatron-LM is imported."""
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    # Before it imports Megatron, whose decorators would import a compiler that takes seconds.
    torch.compile = lambda function=None, **_: function or (lambda function: function)  # type: ignore[assignment]
    use_cpu()
    _answer_torch_cuda()
    _answer_distributed()
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign,assignment]
    _CudaMeansCpu().__enter__()


def skip_what_is_compiled(megatron_root: str) -> None:
    """After `megatron_root` is on sys.path: nothing of the checkout is compiled for a GPU, or at all."""
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None
    for name in ("megatron.legacy.fused_kernels",):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name).load = lambda args: None  # type: ignore[attr-defined]
    _define("megatron.core.transformer.moe.moe_utils", "te_general_gemm", None)
    _define("megatron.core.models.bert.bert_layer_specs", "bert_layer_with_transformer_engine_spec", None)
    initialize = importlib.import_module("megatron.training.initialize")
    initialize.set_jit_fusion_options = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    training = importlib.import_module("megatron.training.training")
    if hasattr(training, "set_jit_fusion_options"):
        training.set_jit_fusion_options = initialize.set_jit_fusion_options  # type: ignore[attr-defined]


def _define(module_name: str, name: str, value: Any) -> None:
    """A name that is missing in a module of the checkout, where there is such a module."""
    with contextlib.suppress(ModuleNotFoundError):
        module = importlib.import_module(module_name)
        if name not in vars(module):
            setattr(module, name, value)


def _answer_torch_cuda() -> None:
    cuda: Any = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "set_stream", "_lazy_init"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.get_device_properties = lambda device=None: _Properties()
    cuda.get_device_name = lambda device=None: "CPU"
    cuda.memory_stats = lambda device=None: dict.fromkeys(
        ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak", "num_ooms"), 0
    )
    cuda.set_rng_state = lambda state, device=None: torch.random.set_rng_state(state)
    cuda.manual_seed_all = cuda.manual_seed
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda device=None: _Nothing())
    cuda.Stream = cuda.Event = _Nothing
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None


def all_to_all_single(
    out: Any, x: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
) -> Any:
    """torch's, which takes lists: Megatron has tensors, which it copies to the host where they are not there yet."""
    sizes = [None if each is None else [*map(int, each)] for each in (output_split_sizes, input_split_sizes)]
    return torch.distributed.distributed_c10d.all_to_all_single(out, x, *sizes, **kwargs)


def _answer_distributed() -> None:
    dist: Any = torch.distributed
    init_process_group, new_group, all_reduce = dist.init_process_group, dist.new_group, dist.all_reduce

    def init_on_gloo(*args: Any, **kwargs: Any) -> Any:
        kwargs = {**kwargs, "backend": "fake" if kwargs.get("backend") == "fake" else "gloo"}
        return init_process_group(*args[1:], **{**kwargs, "device_id": None})

    def new_gloo_group(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return new_group(*args, **{**kwargs, "pg_options": None, "device_id": None})

    def all_reduce_with_mean(
        tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op != dist.ReduceOp.AVG:
            return all_reduce(tensor, op, group, async_op)
        work = all_reduce(tensor, dist.ReduceOp.SUM, group, False)
        tensor.div_(dist.get_world_size(group))
        return work

    isend = dist.isend

    def send_copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return isend(tensor.clone(), *args, **kwargs)

    dist.init_process_group, dist.new_group, dist.all_reduce = init_on_gloo, new_gloo_group, all_reduce_with_mean
    dist.all_to_all_single = all_to_all_single
    # Its own module compares functions that are to be batched with its own name.
    dist.isend = dist.distributed_c10d.isend = send_copy

"""Gives the launches of Tempo's kernels to somebody else, on tensors of a CPU: a checker, or Triton's interpreter."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import tempo_kernels

ahead_of_time = importlib.import_module("ahead_of_time")


@contextlib.contextmanager
def replace_kernels(take: Callable[[Any], None], with_assembler: bool = True) -> Iterator[None]:
    """Gives all launches to `take`, and tells Python that every tensor is on a GPU; memory and torch's own operations
    stay on the CPU. Without assembler, which not every checker knows, kernels compute by Triton's operations alone."""
    addmm = torch.addmm

    def add_product(*tensors: torch.Tensor, out_dtype: Any = None, **named: Any) -> torch.Tensor:
        return addmm(*(t.to(out_dtype) if out_dtype else t for t in tensors), **named)

    answers = {
        "torch.Tensor.is_cuda": True,
        "torch.Tensor.get_device": lambda tensor: 0,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.device": contextlib.nullcontext,
        "torch.cuda.device_of": contextlib.nullcontext,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.cuda.get_device_capability": lambda device=None: (9, 0),
        "torch._C._cuda_getCurrentRawStream": lambda index: 0,
        "torch.addmm": add_product,  # a CPU has no product of 16 bits that is summed in float32
    }
    with contextlib.ExitStack() as patches:
        for module in pkgutil.walk_packages(tempo_kernels.__path__, "tempo_kernels."):
            if not module.name.rpartition(".")[2].startswith("kernel"):
                continue
            loaded = importlib.import_module(module.name)
            names = vars(loaded)
            for name, value in list(names.items()):
                if name.endswith("_kernel") and hasattr(value, "arg_names"):
                    patches.enter_context(mock.patch.object(loaded, name, ahead_of_time.Recorder(value, take)))
            if "IS_COMPILED" in names and not with_assembler:  # for good, as compiled kernels remember what it was
                names["IS_COMPILED"] = type(names["IS_COMPILED"])(False)
        for name, answer in answers.items():
            patches.enter_context(mock.patch(name, answer, create=True))
        yield

"""Fakes a GPU that accepts every launch and computes nothing, to measure what a launch costs the host.

Triton's own driver runs: it compiles a kernel for the faked architecture, loads it, reads the arguments of each launch
in C and passes them on. Below it libcuda is a stub of a few lines that counts calls and answers "done". Python code
sees every tensor on a GPU; memory and torch's own operations stay on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

CAPABILITY = (9, 0)
_INCLUDES = Path(nvidia.__file__).parent / "include"
_LIBCUDA = r"""
#include <cuda.h>
static unsigned long long num_launches;
unsigned long long count_launches(void) { return num_launches; }
#define DONE { return CUDA_SUCCESS; }
CUresult cuInit(unsigned int flags) DONE
CUresult cuDriverGetVersion(int *version) { *version = 12090; DONE }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "faked"; DONE }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; DONE }
CUresult cuDeviceGetCount(int *count) { *count = 1; DONE }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) {
  switch (what) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: *value = 232448;
  }
  DONE
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)8; DONE }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)8; DONE }
CUresult cuCtxSetCurrent(CUcontext context) DONE
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; DONE }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; DONE }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) DONE
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)8; DONE }
CUresult cuModuleUnload(CUmodule module) DONE
CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name) {
  static size_t number; /* so that two kernels can be told apart */
  *found = (CUfunction)(++number);
  DONE
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) DONE
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute what, int value) DONE
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute what, CUfunction function) {
  *value = what == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  DONE
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute what, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  DONE
}
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) DONE
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = 0; DONE }
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
    CUtensorMapFloatOOBfill fill) {
  *map = (CUtensorMap){0};
  cuuint64_t *word = (cuuint64_t *)map; /* so that two descriptors can be told apart */
  *word++ = (cuuint64_t)address;
  *word++ = type | rank << 8 | swizzle << 16 | fill << 24;
  for (cuuint32_t i = 0; i < rank; i++) *word++ = shape[i] << 16 | box[i];
  for (cuuint32_t i = 0; i + 1 < rank; i++) *word++ = strides[i];
  DONE
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  num_launches++;
  DONE
}
"""


class FakeDriver(nvidia.CudaDriver):  # type: ignore[misc]
    """Triton's driver, on top of the stub; the device is always number 0, the stream the default one."""

    def __init__(self) -> None:
        super().__init__()
        self.get_current_device = _find_current_device
        self.get_device_capability = lambda device=0: CAPABILITY
        self.get_current_stream = {0: 0}.__getitem__  # as cheap as torch's, which is a function in C
        self.set_current_device = lambda device: None

    @staticmethod
    def is_active() -> bool:
        return True


def _find_current_device() -> int:
    """Costs as much as torch.cuda.current_device: a test whether CUDA is initialised, and a call."""
    torch.cuda.is_initialized()
    return 0


@contextlib.contextmanager
def fake_gpu() -> Iterator[Any]:
    """Launches kernels inside the context on a GPU that does nothing; yields a function that counts the launches."""
    folder, loaded = _load_libcuda()
    with contextlib.ExitStack() as patches:
        patches.enter_context(triton.knobs.nvidia.scope())
        triton.knobs.nvidia.libcuda_path = folder.name
        for name, substitute in _list_substitutes().items():
            target, _, attribute = name.rpartition(".")
            patches.enter_context(mock.patch(f"{target}.{attribute}", substitute, create=True))
        before = driver._active
        driver.set_active(FakeDriver())
        try:
            yield loaded.count_launches
        finally:
            driver.set_active(before)


@functools.cache
def _load_libcuda() -> tuple[tempfile.TemporaryDirectory[str], Any]:
    """Builds the stub and loads it once: who opens libcuda by name, as Triton's driver does, finds the first one."""
    folder = tempfile.TemporaryDirectory()
    library, source = Path(folder.name, "libcuda.so.1"), Path(folder.name, "libcuda.c")
    source.write_text(_LIBCUDA, encoding="utf-8")
    command = ["gcc", "-O2", "-shared", "-fPIC", "-w", f"-I{_INCLUDES}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return folder, ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _list_substitutes() -> dict[str, Any]:
    """Lists what Python asks torch about tensors and devices, with the answers of a machine with one GPU."""
    return {
        "torch.Tensor.is_cuda": True,
        "torch.Tensor.get_device": lambda tensor: 0,
        "torch.cuda.current_device": _find_current_device,
        "torch.cuda._exchange_device": lambda device: 0,
        "torch.cuda._maybe_exchange_device": lambda device: 0,
    }

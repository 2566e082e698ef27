"""Computes the norms of large tensors on a CPU in compiled passes: RMSNorm, and the backward of both.

Backward reads and writes each row once: its sums, its gradient, and its part of the sums over rows, which Inductor
would compute in passes of their own.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tempo_kernels import compiled
from tempo_kernels.compiled import Compiled, Library, split_columns
from tempo_kernels.norm.operands import Statistics

MIN_ELEMENTS = 1 << 18
"""The size of a tensor for which one compilation, which takes seconds, is worth its time."""

_CHUNK = 32
"""Rows that one pass adds up one after the other; torch adds the chunks' sums up in pairs."""

BLOCK_ELEMENTS = 1 << 18
"""Elements for each thread of which backward makes float32 copies at a time, in two buffers that stay in the cache."""


def pays_for(rows: Tensor) -> bool:
    """Whether rows [n, h] are large enough to compile forward for."""
    return compiled.pays_for(rows, MIN_ELEMENTS, *rows.shape)


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Statistics]:
    """Returns y [n, h] in x's dtype, and rstd [n] in float32."""
    # contiguous: Dynamo would compile strides in.
    operands = split_columns(x.size(-1), x.contiguous(), gamma)
    y, rstd = _rms_norm(*operands, torch.tensor([eps], dtype=torch.float32, device=x.device))
    return y.view(x.shape), Statistics(rstd, None)


def backward(grad_y: Tensor, y: Tensor, affine: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns grad_x [n, h] in grad_y's dtype, and the sums [1 or 2, h] in float32, or None if y [n, h] is too small to
    compile for, float64, or nothing can be compiled. gamma and beta are affine [1 or 2, h]."""
    # The last row is beta, or without one gamma, which is not read.
    return _differentiate(grad_y, y, affine, affine[-1], affine[0].reciprocal(), rstd, from_input=False)


def backward_from_input(
    grad_y: Tensor, x: Tensor, affine: Tensor, statistics: Statistics
) -> tuple[Tensor, Tensor] | None:
    """As backward, from the input x [n, h]."""
    rstd, mean = statistics
    return _differentiate(grad_y, x, affine, rstd if mean is None else mean, rstd, rstd, from_input=True)


def _differentiate(
    grad_y: Tensor, values: Tensor, affine: Tensor, shift: Tensor, factor: Tensor, rstd: Tensor, from_input: bool
) -> tuple[Tensor, Tensor] | None:
    """Differentiates with xhat = (values - shift) * factor; both are [h], or [n] for values that are the input."""
    if values.numel() < MIN_ELEMENTS or rstd.dtype != torch.float32:
        return None
    (num_rows, num_columns), num_sums = values.shape, affine.size(0)
    is_wide = grad_y.dtype == values.dtype == torch.float32
    step = num_rows if is_wide else max(1, BLOCK_ELEMENTS // (_CHUNK * num_columns)) * _CHUNK * torch.get_num_threads()
    grad_x = torch.empty(values.shape, dtype=grad_y.dtype, device=values.device)
    sums = torch.empty(-(-num_rows // _CHUNK), num_sums, num_columns, dtype=torch.float32, device=values.device)
    buffers = sums.new_empty(0 if is_wide else 2, min(step, num_rows), num_columns)
    values, grad_y, affine = values.contiguous(), grad_y.contiguous(), affine.contiguous()
    name = f"differentiate_{'input' if from_input else 'output'}_{num_sums}"
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        tensors = [grad_y[rows], values[rows]]
        if not is_wide:
            tensors = [buffer[: len(t)].copy_(t) for buffer, t in zip(buffers, tensors, strict=True)]
        of_rows = (t[rows] if from_input else t for t in (shift, factor))
        sizes = (rows.stop - start, num_columns)
        out = grad_x[rows] if is_wide else tensors[0]
        if not _LIBRARY.run(name, *tensors, affine, *of_rows, rstd[rows], *sizes, out, sums[start // _CHUNK :]):
            return None
        if not is_wide:
            grad_x[rows] = out
    return grad_x, sums.sum(0)


def _normalize_rms(x: Tensor, gamma: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    rstd = (x.float().square().mean((-2, -1), keepdim=True) + eps).rsqrt()
    return (x.float() * rstd * gamma).to(x.dtype), rstd.flatten()


_rms_norm = Compiled(_normalize_rms, has_lanes=True)

_TEMPLATE = """
extern "C" void NAME(
    int64_t num_threads, const float* grad_y, const float* values, const float* gamma, const float* shift,
    const float* factor, const float* rstd, int64_t num_rows, int64_t num_columns, float* grad_x, float* sums) {
  #pragma omp parallel for num_threads(num_threads)
  for (int64_t first = 0; first < num_rows; first += CHUNK) {
    float* __restrict sum_gamma = sums + first / CHUNK * NUM_SUMS * num_columns;
    float* __restrict sum_beta = sum_gamma + (NUM_SUMS - 1) * num_columns;
    std::fill_n(sum_gamma, NUM_SUMS * num_columns, 0.0f);
    std::vector<float> memory(2 * num_columns);
    float* __restrict xhat = memory.data();
    float* __restrict scaled = xhat + num_columns;
    for (int64_t row = first; row < std::min<int64_t>(num_rows, first + CHUNK); ++row) {
      const int64_t start = row * num_columns;
      float mean = 0, slope = 0;
      #pragma omp simd reduction(+ : mean, slope)
      for (int64_t j = 0; j < num_columns; ++j) {
        const float grad = grad_y[start + j], product = grad * gamma[j];
        const float normal = (values[start + j] - (NUM_SUMS == 2 ? shift[PLACE] : 0)) * factor[PLACE];
        xhat[j] = normal;
        scaled[j] = product;
        sum_gamma[j] += grad * normal;
        slope += product * normal;
        if (NUM_SUMS == 2) {
          sum_beta[j] += grad;
          mean += product;
        }
      }
      mean /= num_columns;
      slope /= num_columns;
      // grad_x may lie where grad_y does, whose row has been read.
      #pragma omp simd
      for (int64_t j = 0; j < num_columns; ++j)
        grad_x[start + j] = (scaled[j] - mean - xhat[j] * slope) * rstd[row];
    }
  }
}
"""


def _write_source() -> str:
    """Writes the function of each form: from the output or the input, with one sum (RMSNorm) or two (LayerNorm)."""
    source = "#include <algorithm>\n#include <cstdint>\n#include <vector>\n"
    for (form, place), num_sums in itertools.product({"output": "j", "input": "row"}.items(), (1, 2)):
        function = _TEMPLATE.replace("NAME", f"differentiate_{form}_{num_sums}").replace("PLACE", place)
        source += function.replace("CHUNK", str(_CHUNK)).replace("NUM_SUMS", str(num_sums))
    return source


_LIBRARY = Library(_write_source())

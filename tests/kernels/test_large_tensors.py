"""Every operation, forward and backward, over more elements than a 32-bit number counts.

Only a few rows have gradients that are not 0, and only they are held against the specification: where tensors begin and
end, and where a 32-bit number of an element, or of a byte, would run over. So the sums over all rows are theirs too.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from gpu import operations
from gpu.operations import VECTORS, Sizes
from torch import Tensor
from witness import assert_within_rule

from tempo_kernels.dropout_add import bias_dropout_add

WIDTH = 4096
ROWS = 3  # before and after each place
FORMS = [
    pytest.param(operation, form, id=f"{operation.name}, keeping {form.keeps}")
    for operation in operations.OPERATIONS
    for form in operation.forms
]
# The same on a CPU with a smaller number in place of 2**31.
LIMITS = [
    pytest.param("cpu", 2**12, 64, id="cpu"),
    pytest.param("cuda", 2**31, WIDTH, id="cuda", marks=[pytest.mark.gpu, pytest.mark.slow]),
]


def places(num_rows: int, width: int, limit: int) -> list[slice]:
    """Rows at both ends of a tensor and around elements limit / 2 and limit, of one twice as wide too; apart."""
    firsts = [0, *(limit // width // parts - ROWS for parts in (4, 2, 1)), num_rows - 2 * ROWS]
    found = [slice(first, first + 2 * ROWS) for first in firsts]
    assert all(a.stop <= b.start for a, b in pairwise(found)) and found[-1].stop == num_rows
    return found


def function_at(operation, form, first_row: int):
    """The form as it is applied to rows from first_row on, on which a mask depends."""
    if not operation.draws:
        return form.factory(0.1)
    return lambda *tensors: bias_dropout_add(*tensors, p=0.1, key=operations.KEY, first_row=first_row)


def outputs_and_gradients(function, tensors: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, grads)]


def specified(operation, form, where: list[slice], tensors: list[Tensor], grads: list[Tensor], dtype: torch.dtype):
    """[rows of all places, one after the other], or their sum for a vector, as computed on a CPU from these rows."""
    parts = []
    for rows in where:
        part = [(t if t.dim() == 1 else t[rows]).cpu().to(dtype) for t in tensors]
        part_grads = [grad[rows].cpu().to(dtype) for grad in grads]
        parts.append(outputs_and_gradients(function_at(operation, form, rows.start), part, part_grads))
    return [
        torch.cat(found) if found[0].dim() > 1 else torch.stack(found).double().sum(0).to(dtype)
        for found in zip(*parts, strict=True)
    ]


@pytest.mark.parametrize(("device", "limit", "width"), LIMITS)
@pytest.mark.parametrize(("operation", "form"), FORMS)
def test_elements_beyond_a_32_bit_number_are_as_specified(operation, form, device, limit, width):
    num_rows = limit // width + 4 * ROWS
    sizes = Sizes(num_rows, 1, width, width, width, 0.1, torch.bfloat16)
    needed = 12 * num_rows * width * sizes.dtype.itemsize
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else needed
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory, and {free / 2**30:.0f} are free")
    where = places(num_rows, width, limit)
    function = function_at(operation, form, 0)
    tensors = filled(operation, sizes, device)
    grad = torch.zeros(num_rows, 1, width, dtype=sizes.dtype, device=device)
    assert grad.numel() > limit
    for rows in where:
        grad[rows] = torch.randn(2 * ROWS, 1, width, device=device)
    grads = [grad]
    found = outputs_and_gradients(function, tensors, grads)
    same, exact = (specified(operation, form, where, tensors, grads, dtype) for dtype in (sizes.dtype, torch.float64))
    for index, (ours, *witnesses) in enumerate(zip(found, same, exact, strict=True)):
        if ours.dim() > 1:
            ours = torch.cat([ours[rows] for rows in where])
        assert_within_rule(f"result {index}", ours.cpu(), *witnesses)
    # Where gradients are 0, so are those of the inputs; looked at in parts, for the memory's sake.
    for grad in found[1:]:
        if grad.dim() > 1:
            assert not any(grad[a.stop : b.start].any() for a, b in pairwise(where))


def filled(operation, sizes, device: str) -> list[Tensor]:
    """Random inputs in their own dtype from the start: four bytes an element would not fit."""
    found = []
    for name, small in zip(operation.inputs, operation.tensors(sizes._replace(s=1), device), strict=True):
        if name in VECTORS:
            found.append(small)
        else:
            large = torch.empty(sizes.s, *small.shape[1:], dtype=sizes.dtype, device=device)
            found.append(large.normal_())
    return found

"""Who computes an operation: Tempo's forms, torch eager, torch.compile of the plain formula, and Liger's kernel."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor

from gpu.operation import Liger, Operation, Sizes
from gpu.timing import Pass

EAGER, COMPILE, LIGER = "eager", "compile", "liger"
# Two roundings of bfloat16 in a row are off by less, a gate taken for an up or a wrong bias by much more.
AGREEMENT = 0.02


class Implementation(NamedTuple):
    name: str
    function: Callable[..., Any]
    is_flat: bool = False
    """Takes and returns [tokens, width] where others have [s, b, width]."""
    splits_x: bool = False

    def leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What function takes, requiring gradients: copies, since some write over their inputs."""
        if self.splits_x:
            tensors = [*tensors[0].chunk(2, -1), *tensors[1:]]
        return [t.clone(memory_format=torch.contiguous_format).requires_grad_() for t in self.shaped(tensors)]

    def shaped(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views of the tensors in the shape that function knows."""
        return [t.flatten(0, -2) if self.is_flat and t.dim() > 1 else t for t in tensors]

    def outputs(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found = self.function(*leaves)
        return found if isinstance(found, tuple) else (found,)

    def time(self, sets: Sequence[Sequence[Tensor]]) -> Pass:
        """Forward and backward of each set; those that write over inputs or gradients go on with what they wrote."""
        leaves = [self.leaves(tensors) for tensors in sets]
        grads = [[torch.randn_like(y) for y in self.outputs(each)] for each in leaves]

        def run() -> object:
            return [torch.autograd.grad(self.outputs(x), x, g) for x, g in zip(leaves, grads, strict=True)]

        return Pass(self.name, run, len(sets))


def tempo(operation: Operation, sizes: Sizes) -> list[Implementation]:
    """One for each form, named after what it keeps."""
    return [Implementation(form.keeps, form.factory(sizes.p)) for form in operation.forms]


def eager(operation: Operation, sizes: Sizes) -> Implementation:
    return Implementation(EAGER, operation.plain(sizes.p))


def compiled(operation: Operation, sizes: Sizes) -> Implementation:
    # Backward runs many times over one graph, so what is saved may not be given away.
    torch._functorch.config.donated_buffer = False
    return Implementation(COMPILE, torch.compile(operation.plain(sizes.p), dynamic=False, fullgraph=True))


def liger_version() -> str | None:
    """Of the wheel liger-kernel, or of its nightly; None where it is not installed."""
    for name in ("liger-kernel", "liger-kernel-nightly"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def liger(operation: Operation) -> Implementation:
    """Raises: LookupError where the operation or the package is not there; whatever its import raises."""
    if not operation.liger:
        raise LookupError("Liger has no such kernel")
    if liger_version() is None:
        raise LookupError("liger-kernel is not installed")
    for candidate in operation.liger:
        function = getattr(importlib.import_module(candidate.module), candidate.name, None)
        if function is not None:
            return _of_liger(function, candidate)
    raise LookupError(f"liger-kernel {liger_version()} has none of {[candidate.name for candidate in operation.liger]}")


def _of_liger(function: Any, which: Liger) -> Implementation:
    def call(*tensors: Tensor) -> Any:
        return function.apply(*tensors, *which.constants)

    # Some of its kernels return gradients in two dimensions, whatever they were given.
    return Implementation(LIGER, call, is_flat=True, splits_x=which.splits_x)


def results(implementation: Implementation, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, then the gradient of each tensor, in the shapes of grads and tensors."""
    leaves = implementation.leaves(tensors)
    outputs = implementation.outputs(leaves)
    # Copies: an implementation may write over gradients.
    own_grads = implementation.shaped([grad.clone() for grad in grads])
    gradients = list(torch.autograd.grad(outputs, leaves, own_grads))
    if implementation.splits_x:
        gradients = [torch.cat(gradients[:2], -1), *gradients[2:]]
    found = [*(output.detach() for output in outputs), *gradients]
    return [t.view(like.shape) for t, like in zip(found, [*grads, *tensors], strict=True)]


def disagreement(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest norm(found - expected) / norm(expected) over the results; NaN counts as infinite."""
    largest = 0.0
    for a, b in zip(found, expected, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        largest = max(largest, error.nan_to_num(float("inf")).item())
    return largest


def comparable(operation: Operation, sizes: Sizes, device: str) -> tuple[list[Implementation], dict[str, str]]:
    """torch.compile and Liger, where they run here and agree with torch eager, and why each other one is left out.

    They are other people's: whatever one raises is a reason to leave it out, and none to stop.
    """
    plain, tensors = eager(operation, sizes), operation.tensors(sizes, device)
    grads = [torch.randn_like(output) for output in plain.outputs(plain.leaves(tensors))]
    expected = results(plain, tensors, grads)
    found, left_out = [], {}
    for name, make in {COMPILE: lambda: compiled(operation, sizes), LIGER: lambda: liger(operation)}.items():
        try:
            implementation = make()
            error = disagreement(results(implementation, tensors, grads), expected)
        except Exception as reason:
            left_out[name] = f"{type(reason).__name__}: {reason}".partition("\n")[0]
            continue
        # What draws is torch's own formula, which there is nothing to hold against.
        if error > AGREEMENT and not operation.draws:
            left_out[name] = f"disagrees with torch eager by {error:.3g} of its norm"
        else:
            found.append(implementation)
    return found, left_out

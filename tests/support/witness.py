"""The rule by which a result is right: three witnesses, no tolerance per test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance from |value| to the next larger number of `dtype`."""
    exponent = torch.frexp(value.abs().double())[1] - 1
    limits = torch.finfo(dtype)
    return torch.maximum(
        torch.ldexp(torch.tensor(limits.eps, dtype=torch.float64), exponent), torch.tensor(limits.tiny)
    )


# Of fewer numbers torch's largest error may by chance be next to nothing, and another order of adding up exceeds it.
_FEW, _ULPS_OF_FEW = 64, 8


def assert_within_rule(name: str, ours: Tensor, same_dtype: Tensor, exact: Tensor, ulps: int = 1) -> None:
    """max error(ours) <= 2 x max error(torch in the same dtype) + 1 ulp of max abs(exact), or `ulps`; 8 where there are
    few numbers."""
    assert ours.dtype == same_dtype.dtype and ours.shape == exact.shape, f"{name}: {ours.dtype}, {list(ours.shape)}"
    if exact.numel() == 0:
        return
    error, allowed = ((t.double() - exact).abs().max() for t in (ours, same_dtype))
    limit = 2 * allowed + (_ULPS_OF_FEW if exact.numel() < _FEW else ulps) * ulp(exact.abs().max(), ours.dtype)
    assert error <= limit, f"{name}: error {error:.3e}, torch's own {allowed:.3e}, limit {limit:.3e}"


def assert_same(found: Iterable[Tensor | None], expected: Iterable[Tensor | None], **how: Any) -> None:
    """Each tensor has the dtype and the bits of the other one, or what torch.testing.assert_close is told in `how`."""
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **{"rtol": 0, "atol": 0, **how})


def assert_all_within_rule(
    name: str, ours: Sequence[Tensor], same_dtype: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """The rule for the first tensors, and for the others together, each in units of a power of two of its own."""
    assert_within_rule(name, ours[0], same_dtype[0], exact[0])
    exponents = [torch.frexp(t.abs().max())[1] for t in exact]
    units = (
        [torch.ldexp(t, -e).flatten() for t, e in zip(ts, exponents, strict=True)] for ts in (ours, same_dtype, exact)
    )
    assert_within_rule(f"gradients, {name}", *(torch.cat(each[1:]) for each in units))


def outputs_and_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """[output, gradient of each input that is a tensor], with inputs and grad cast to `dtype`."""
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in inputs]
    out = function(*leaves)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None)]


def assert_three_witnesses(
    ours: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    grad: Tensor,
    dtype: torch.dtype,
    ulps: int = 1,
) -> None:
    """Output and every gradient of `ours` against `reference` in float64 and in the same dtype.

    The inputs are rounded to `dtype` first, so that their rounding is nobody's error.
    """
    rounded = [None if t is None else t.to(dtype) for t in inputs]
    grad = grad.to(dtype)
    exact = outputs_and_gradients(reference, rounded, grad, torch.float64)
    same = outputs_and_gradients(reference, rounded, grad, dtype)
    found = outputs_and_gradients(ours, rounded, grad, dtype)
    assert len(found) == len(exact)
    for index, (a, b, c) in enumerate(zip(found, same, exact, strict=True)):
        assert_within_rule("output" if index == 0 else f"gradient of input {index - 1}", a, b, c, ulps)


def kept_storages(function: Callable[..., Tensor], *inputs: Tensor | None) -> dict[int, int]:
    """{data_ptr: bytes} of the distinct storages that autograd holds after `function(*inputs)`."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*inputs)
    kept["out"] = out  # type: ignore[index]  # alive until here, so that no address is used twice
    del kept["out"]  # type: ignore[arg-type]
    return kept

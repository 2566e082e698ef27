"""Defines `recompute_in_tiles`: applies a function to rows a tile at a time, and keeps the rows alone.

What the function makes inside, such as the wide tensors of an MLP, exists for one tile at a time, in forward and in
backward. The tiled MLP of ALST (arXiv 2506.13996) does the same. It differs in three points: parameters get their
gradients once, in the ordinary way, so that whoever follows them (DDP, ZeRO, Megatron) sees one gradient; sums over
tiles are float32; and a layer that torch.utils.checkpoint runs again does not run the function a third time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.derivative import check_transforms
from tempo_kernels.opaque import cut
from tempo_kernels.recompute.function import Call, find_other_leaf, read_random_states
from tempo_kernels.saved import KeepInput


def recompute_in_tiles(
    function: Callable[[Tensor], Tensor], x: Tensor, *, parameters: Iterable[Tensor], num_rows: int
) -> Tensor:
    """Returns function(x), computed for `num_rows` rows of x at a time.

    Args:
        function: gives each row of x, along the first dimension, its row of the result, from that row and `parameters`
            alone. Under tensor parallelism it may communicate; all ranks must have as many rows.
        x: [s, ...].
        parameters: all tensors other than x that function uses and that need a gradient.
        num_rows: of a tile; the last one may have fewer.

    Returns:
        y [s, ...].

    Keeps for backward: x; `drop` can put a promise in its place. Backward runs function once more on each tile, under
        the autocast of its first run.
    Error: y and x's gradient are those of function on its tiles: bit for bit those on the whole where a product's rows
        do not depend on how many there are. A parameter's gradient is a sum over tiles: each tile's has the parameter's
        dtype, and they are added in float32, or in the parameter's dtype where that is wider. Linears that add to
        `main_grad` themselves (Megatron's gradient_accumulation_fusion) do so for each tile.
    Raises: ValueError where function draws from torch's generators; in backward where it uses a tensor that needs a
        gradient and was not given. RuntimeError under create_graph.
    """
    check_transforms("recompute_in_tiles", (x,))
    assert num_rows > 0
    call = Call(function, (x,), {})
    call.take_tensors()
    given = [parameter for parameter in parameters if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or given):
        return _run(call, num_rows, x)
    # A checkpoint runs a layer again until it has what it kept. Kept by a node of its own in front, x is there before
    # function runs.
    kept = KeepInput.apply(x) if x.requires_grad else x
    y: Tensor = _Tiled.apply(call, num_rows, kept, *given)
    return y


def _run(call: Call, num_rows: int, x: Tensor) -> Tensor:
    """Returns what function gives, without a graph."""
    states = read_random_states([x])
    y: Tensor | None = None
    with torch.no_grad():
        for rows in cut(x.size(0), num_rows) or [slice(0, 0)]:
            tile = call.run([x[rows]], with_graph=False)
            if x.size(0) <= num_rows:
                y = tile
                break
            y = tile.new_empty(x.size(0), *tile.shape[1:]) if y is None else y
            y[rows] = tile
    if states != read_random_states([x]):
        raise ValueError(
            "a function that runs in tiles draws random numbers, and would draw others in its second run; expected one "
            "that draws none, such as an MLP without dropout; leave it whole"
        )
    assert y is not None
    return y


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, num_rows: int, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call, ctx.num_rows, ctx.parameters, ctx.keeper = call, num_rows, parameters, x.grad_fn
        if ctx.keeper is None:
            ctx.save_for_backward(x)
        return _run(call, num_rows, x)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "what runs in tiles is not twice differentiable, and create_graph=True is given; expected one "
                "derivative; leave the tiles out"
            )
        (x,) = (ctx if ctx.keeper is None else ctx.keeper).saved_tensors
        parameters, needs_grad_x = ctx.parameters, ctx.needs_input_grad[2]
        grad_x = torch.empty_like(x) if needs_grad_x else None
        sums: list[Tensor | None] = [None] * len(parameters)
        for rows in cut(x.size(0), ctx.num_rows) or [slice(0, 0)]:
            leaf = x[rows].detach().requires_grad_(needs_grad_x)
            y = ctx.call.run([leaf])
            if rows.start == 0 and (other := find_other_leaf([leaf, *parameters], y)) is not None:
                raise ValueError(
                    f"a function that runs in tiles uses a tensor of shape {list(other.shape)} that needs a gradient "
                    "and is not among `parameters`; name it there"
                )
            wanted = [leaf, *parameters] if needs_grad_x else [*parameters]
            found: list[Tensor | None] = [None] * len(wanted)
            if y.requires_grad:
                found = list(torch.autograd.grad(y, wanted, grad_y[rows], allow_unused=True))
            del y
            if grad_x is not None:
                grad_tile = found.pop(0)
                grad_x[rows] = 0.0 if grad_tile is None else grad_tile
                del grad_tile
            for place, parameter in enumerate(parameters):  # one after the other, so that each goes when it is added
                sums[place] = _add(sums[place], found.pop(0), parameter)
        rounded = ((sums.pop(0), parameter.dtype) for parameter in parameters)
        return None, None, grad_x, *(None if total is None else total.to(dtype) for total, dtype in rounded)


def _add(total: Tensor | None, grad: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Returns the sum of a parameter's gradients over one tile more, in float32 where the parameter has fewer bits."""
    if grad is None:
        return total
    if total is None or getattr(parameter, "grad_added_to_main_grad", False):
        # Megatron's fused linears have added it already, and return a tensor without meaning.
        return grad
    total = total.float() if total.dtype.itemsize < 4 else total
    total += grad
    return total

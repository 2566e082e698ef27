"""Defines `recompute_in_tiles`: applies a function to rows a tile at a time, and keeps the rows alone; and
`attend_to_tiles`, which goes on with attention.

What the function makes inside, such as the wide tensors of an MLP, exists for one tile at a time, in forward and in
backward. The tiled MLP of ALST (arXiv 2506.13996) does the same. It differs in three points: parameters get their
gradients once, in the ordinary way, so that whoever follows them (DDP, ZeRO, Megatron) sees one gradient; sums over
tiles are float32; and a layer that torch.utils.checkpoint runs again does not run the function a third time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.derivative import check_transforms
from tempo_kernels.recompute.function import Call, find_other_leaf, read_random_states
from tempo_kernels.recompute.kept_outputs import run_attention
from tempo_kernels.saved import KeepInput


def recompute_in_tiles(
    function: Callable[[Tensor], Tensor], x: Tensor, *, parameters: Iterable[Tensor], num_rows: int
) -> Tensor:
    """Returns function(x), computed for `num_rows` rows of x at a time.

    Args:
        function: gives each row of x, along the first dimension, its row of the result, from that row and `parameters`
            alone. Under tensor parallelism it may communicate; all ranks must have as many rows.
        x: [s, ...].
        parameters: all tensors besides x that function uses and that need a gradient.
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
    return _run_in_tiles(function, None, x, (), parameters, num_rows)


def attend_to_tiles(
    project: Callable[..., tuple[Tensor, ...]],
    attend: Callable[..., Tensor],
    x: Tensor,
    *beside: Tensor,
    parameters: Iterable[Tensor],
    num_rows: int,
) -> Tensor:
    """Returns attend(*project(x, *beside)), with project computed for `num_rows` rows at a time.

    Args:
        project: gives each row of x, along the first dimension, its rows of q, k and v, from that row, the same rows of
            `beside` and `parameters` alone: the norm, the products and the rotary embeddings.
        attend: gives the result from q, k and v, and from nothing else that needs a gradient.
        x, beside: [s, ...]; beside, such as cosines and sines, needs no gradient.
        parameters, num_rows: as for `recompute_in_tiles`.

    Returns:
        attend's result.

    Keeps for backward: x, and what attention makes, as under `keep_attention`: backward makes q, k and v again before
        attention's backward, which frees them, and project runs once more on each tile for its own.
    Error: as for `recompute_in_tiles`.
    Raises: as `recompute_in_tiles`.
    """
    check_transforms("attend_to_tiles", (x,))
    return _run_in_tiles(project, attend, x, beside, parameters, num_rows)


def _run_in_tiles(
    function: Callable[..., Any],
    attend: Callable[..., Tensor] | None,
    x: Tensor,
    beside: tuple[Tensor, ...],
    parameters: Iterable[Tensor],
    num_rows: int,
) -> Tensor:
    assert num_rows > 0
    # In a function of our own, a module's parameters are not replaced: `parameters` names them.
    call = Call(lambda *tile: function(*tile), (x, *beside), {})
    call.take_tensors()
    given = [parameter for parameter in parameters if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or given):
        parts = _run(call, num_rows, x, *beside)
        return parts[0] if attend is None else attend(*parts)
    # A checkpoint runs a layer again until it has what it kept. Kept by a node of its own in front, x is there before
    # function runs.
    kept = KeepInput.apply(x) if x.requires_grad else x
    y: Tensor = _Tiled.apply(call, attend, num_rows, beside, kept, *given)
    return y


def _cut(num_all: int, num_rows: int) -> Iterator[slice]:
    """Yields the tiles; one without rows where there are none."""
    return (slice(first, min(first + num_rows, num_all)) for first in range(0, max(num_all, 1), num_rows))


def _run(call: Call, num_rows: int, x: Tensor, *beside: Tensor) -> tuple[Tensor, ...]:
    """Returns what function gives, without a graph."""
    states = read_random_states([x])
    whole: tuple[Tensor, ...] = ()
    with torch.no_grad():
        for rows in _cut(x.size(0), num_rows):
            tiles = _list_outputs(call.run([x[rows], *(each[rows] for each in beside)], with_graph=False))
            if x.size(0) <= num_rows:
                whole = tiles
                break
            whole = whole or tuple(tile.new_empty(x.size(0), *tile.shape[1:]) for tile in tiles)
            for y, tile in zip(whole, tiles, strict=True):
                y[rows] = tile
    if states != read_random_states([x]):
        raise ValueError(
            "a function that runs in tiles draws random numbers, and would draw others in its second run; expected one "
            "that draws none, such as an MLP without dropout; leave it whole"
        )
    return whole


def _list_outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        attend: Callable[..., Tensor] | None,
        num_rows: int,
        beside: tuple[Tensor, ...],
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.call, ctx.num_rows, ctx.parameters, ctx.beside = call, num_rows, parameters, beside
        ctx.keeper, ctx.attend = x.grad_fn, None
        parts, made = _run(call, num_rows, x, *beside), list[Tensor]()
        y = parts[0]
        if attend is not None:
            ctx.attend = Call(attend, parts, {})
            ctx.attend.take_tensors()
            y, made, ctx.give_back = run_attention(lambda: ctx.attend.run(parts, with_graph=False))
        ctx.num_made = len(made)
        ctx.save_for_backward(*made, *([x] if ctx.keeper is None else []))
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "what runs in tiles is not twice differentiable, and create_graph=True is given; expected one "
                "derivative; leave the tiles out"
            )
        x: Tensor = (ctx if ctx.keeper is None else ctx.keeper).saved_tensors[-1]
        grads: tuple[Tensor, ...] = (grad_y,)
        if ctx.attend is not None:
            grads = _differentiate_attention(ctx, x, grad_y)
        return None, None, None, None, *_run_backward(ctx, x, grads)


def _differentiate_attention(ctx: Any, x: Tensor, grad_y: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k and v, which are made again and freed here."""
    leaves = [part.requires_grad_() for part in _run(ctx.call, ctx.num_rows, x, *ctx.beside)]
    with ctx.give_back(ctx.saved_tensors[: ctx.num_made]):
        y = ctx.attend.run(leaves)
    return torch.autograd.grad(y, leaves, grad_y)


def _run_backward(ctx: Any, x: Tensor, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x and of each parameter: runs function on each tile once more, and differentiates it."""
    call, parameters = ctx.call, ctx.parameters
    needs_grad_x = ctx.needs_input_grad[-1 - len(parameters)]
    grad_x = torch.empty_like(x) if needs_grad_x else None
    sums = [_Sum(parameter) for parameter in parameters]
    for rows in _cut(x.size(0), ctx.num_rows):
        leaf = x[rows].detach().requires_grad_(needs_grad_x)
        y = _list_outputs(call.run([leaf, *(each[rows] for each in ctx.beside)]))
        others = (find_other_leaf([leaf, *parameters], each) for each in y) if rows.start == 0 else ()
        if (other := next((each for each in others if each is not None), None)) is not None:
            raise ValueError(
                f"a function that runs in tiles uses a tensor of shape {list(other.shape)} that needs a gradient "
                "and is not among `parameters`; name it there"
            )
        wanted = [leaf, *parameters] if needs_grad_x else [*parameters]
        # Where few parameters train and x does not, as under LoRA, some outputs need no gradient.
        pairs = [(each, grad[rows]) for each, grad in zip(y, grads, strict=True) if each.requires_grad]
        found: list[Tensor | None] = [None] * len(wanted)
        if pairs:
            made, grad_made = zip(*pairs, strict=True)
            found = list(torch.autograd.grad(made, wanted, grad_made, allow_unused=True))
            del made
        del y, pairs
        if grad_x is not None:
            grad_tile = found.pop(0)
            grad_x[rows] = 0.0 if grad_tile is None else grad_tile
            del grad_tile
        for each in sums:
            each.add(found.pop(0))
    return grad_x, *(each.take() for each in sums)


class _Sum:
    """The sum of a parameter's gradients over the tiles."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self._total: Tensor | None = None

    def add(self, grad: Tensor | None) -> None:
        if grad is None:
            return
        if self._total is None or getattr(self._parameter, "grad_added_to_main_grad", False):
            # Megatron's fused linears have added it already, and return a tensor without meaning.
            self._total = grad
            return
        if self._total.dtype.itemsize < 4:
            self._total = self._total.float()
        self._total += grad

    def take(self) -> Tensor | None:
        total, self._total = self._total, None
        return None if total is None else total.to(self._parameter.dtype)

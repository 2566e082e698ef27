"""Runs a captured step with its tensors in one arena, at planned addresses, as far as operations can write there.

An operation can write to a given address if ATen has a kernel of its out= form, or if it copies or only allocates. Most
pointwise operations, reductions and matrix products have one. Convolutions, layer norms, embeddings and fused attention
do not: their out= forms copy a result that they have allocated. These, the results of Tempo's operations, the step's
own results and operations' scratch memory are left to torch's allocator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.dlpack import from_dlpack

from tempo_megatron.roam.capture import CapturedStep, list_tensors
from tempo_megatron.roam.execute import OrderedStep
from tempo_megatron.roam.placement import find_placement, list_rectangles

# The alignment of torch's own allocators. With another one a kernel may add up in another order.
_ALIGNMENT = {"cpu": 64, "cuda": 512}
_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten._to_copy.default, _aten.lift_fresh_copy.default)
_EMPTY = (_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default)
# These fill their result with a number, or leave it as it is.
_FILLS = {
    **dict.fromkeys((_aten.ones.default, _aten.ones_like.default), 1),
    **dict.fromkeys((_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default), 0),
    **dict.fromkeys(_EMPTY, None),
}
# For these, and for pointwise operations, the out= form gives the strides of the ordinary form for any arguments.
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot")
# For these the out= form gives the strides of the ordinary form if all arguments are contiguous. Others do not: reduced
# losses resize their out= tensor on the way.
_OTHERS = (
    *("sum", "mean", "amax", "amin", "max", "min", "cumsum", "linalg_vector_norm", "triu", "tril"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "native_batch_norm"),
    *("nll_loss_forward", "nll_loss_backward", "mse_loss_backward", "cat", "index", "index_select", "gather"),
    *("scatter", "scatter_add", "avg_pool2d", "avg_pool2d_backward", "_adaptive_avg_pool2d", "adaptive_max_pool2d"),
    *("max_pool2d_with_indices", "max_pool2d_with_indices_backward", "upsample_nearest2d"),
    *("upsample_nearest2d_backward", "upsample_bilinear2d", "upsample_bilinear2d_backward"),
)
# These take a number, but their out= forms a tensor of one element.
_OF_NUMBERS = {getattr(_aten, name).Scalar: getattr(_aten, name).Tensor for name in ("add", "sub", "mul", "div")}


class ArenaStep(OrderedStep):
    """An `OrderedStep` that writes as many results as possible into an arena, allocated once, here.

    It takes the same arguments, and its numbers are the same bit for bit.
    """

    def __init__(self, captured: CapturedStep, model: torch.nn.Module, order: Sequence[int] | None = None) -> None:
        super().__init__(captured, model, order)
        graph, device = captured.graph, next(model.parameters()).device
        placed = _find_placed(captured, device)
        storages, rectangles = list_rectangles(graph, self._order)
        chosen = {storage: each for storage, each in zip(storages, rectangles, strict=True) if storage in placed}
        alignment = _ALIGNMENT.get(device.type, max(_ALIGNMENT.values()))
        placement = find_placement(list(chosen.values()), alignment=alignment)
        arena = torch.empty(placement.height, dtype=torch.uint8, device=device)
        self.arena_bytes = placement.height
        rest = tuple(0 if s in placed else size for s, size in enumerate(graph.sizes))
        self.allocated_bytes = dataclasses.replace(graph, sizes=rest).count_peak(self._order) - graph.standing_bytes
        """The peak of what the allocator gives out beside the arena and the storages that exist throughout."""
        self.left_out = tuple(
            operation.name
            for operation in graph.operations
            if any(rest[storage] and storage not in graph.kept for storage in operation.makes)
        )
        """The operations whose results are not in the arena."""
        tensors = dict[int, Tensor]()
        for storage, offset in zip(chosen, placement.offsets, strict=True):
            like = placed[storage]
            # A storage of its own with offset 0, as any new tensor has.
            part = from_dlpack(arena[offset : offset + like.nbytes])
            tensors[storage] = part.view(like.dtype).as_strided(like.shape, like.stride())
        _write_into(self._module, captured, tensors)


def find_out_variant(operator: Any, device_type: str) -> Any | None:
    """Returns the overload that writes the same results to given tensors, if it has a kernel of its own, else None."""
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    operator = _OF_NUMBERS.get(operator, operator)
    expected = [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
    for name in operator.overloadpacket.overloads():
        other = getattr(operator.overloadpacket, name)
        outs = [argument for argument in other._schema.arguments if argument.is_out]
        others = [(argument.name, str(argument.type)) for argument in other._schema.arguments if not argument.is_out]
        if (
            others == expected
            and len(outs) == len(operator._schema.returns)
            and torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), device_type.upper())
        ):
            return other
    return None


def _find_placed(captured: CapturedStep, device: torch.device) -> dict[int, Tensor]:
    """Finds the storages that can lie in an arena, each with the fake tensor that fills it."""
    found = dict[int, Tensor]()
    for operation, nodes in zip(captured.graph.operations, captured.nodes, strict=True):
        tensors = list_tensors(nodes[0])
        if (
            _can_write(nodes[0], device.type)
            and len(tensors) == len(operation.makes)
            and not captured.graph.kept.intersection(operation.makes)
            and all(t.device == device and _fills_storage(t) for t in tensors)
        ):
            found.update(zip(operation.makes, tensors, strict=True))
    return found


def _can_write(node: fx.Node, device_type: str) -> bool:
    """Whether an operation can write its results to given tensors, and they have the strides of the fake ones."""
    if node.target in (*_COPIES, *_FILLS):
        return True
    variant = find_out_variant(node.target, device_type)
    if variant is None:
        return False
    if variant.overloadpacket.__name__ in _PRODUCTS or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    inputs = (t for each in node.all_input_nodes for t in list_tensors(each))
    return variant.overloadpacket.__name__ in _OTHERS and all(t.is_contiguous() for t in inputs)


def _fills_storage(t: Tensor) -> bool:
    """Whether each byte of its storage belongs to one element: only then a new tensor like it has its strides."""
    return 0 < t.nbytes == t.untyped_storage().nbytes() and torch.empty_like(t).stride() == t.stride()


def _write_into(module: fx.GraphModule, captured: CapturedStep, tensors: dict[int, Tensor]) -> None:
    """Makes the module's calls write to these tensors, given by storage."""
    calls = {node.name: node for node in module.graph.nodes}
    for operation, nodes in zip(captured.graph.operations, captured.nodes, strict=True):
        if not operation.makes or operation.makes[0] not in tensors:
            continue
        call = calls[nodes[0].name]
        with module.graph.inserting_before(call):
            targets = []
            for storage in operation.makes:
                name = f"in_arena_{storage}"
                module.register_buffer(name, tensors[storage], persistent=False)
                targets.append(module.graph.get_attr(name))
            call.replace_all_uses_with(_call_into(module.graph, call, targets, tensors[operation.makes[0]].device.type))
        module.graph.erase_node(call)
    module.graph.lint()
    module.recompile()


def _call_into(graph: fx.Graph, call: fx.Node, targets: list[fx.Node], device_type: str) -> fx.Node:
    if call.target in _COPIES:
        return graph.call_function(_aten.copy_.default, (targets[0], call.args[0]))
    if call.target in _FILLS:
        number = _FILLS[call.target]
        return targets[0] if number is None else graph.call_function(_aten.fill_.Scalar, (targets[0], number))
    variant = find_out_variant(call.target, device_type)
    assert variant is not None
    names = [argument.name for argument in variant._schema.arguments if argument.is_out]
    return graph.call_function(variant, call.args, {**call.kwargs, **dict(zip(names, targets, strict=True))})

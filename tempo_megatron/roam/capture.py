"""Captures a training step as a graph: the operations of eager mode in their order, without memory or values.

Forward and backward are traced through autograd as they run and are not made functional: operations in place stay in
place in the graph, and a view shares the storage of its base. Which operations depend on one another follows from the
storages that they read and write. Random numbers and collectives stay in their order. The optimizer's step is split
into updates of single parameters, which can run anywhere behind their gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, optim
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves

from tempo_kernels.opaque import Opaque, simulate
from tempo_megatron.memory.simulated.device import on_device
from tempo_megatron.memory.tape.follower import Follower, count_span, count_storage_bytes
from tempo_megatron.roam.graph import Operation, StepGraph
from tempo_megatron.roam.refusals import BatchStructure, check_model, explain_refusals, refuse_changed_attributes

# In these optimizers the update of an element depends on that element alone, so parameters can be updated one by one.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adadelta, optim.Adagrad, optim.Adamax),
    *(optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop),
)

_aten = torch.ops.aten
# These write to running statistics although their schemas do not say so.
_NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default)
_STATISTICS = ("running_mean", "running_var")
# Namespaces of collectives, which keep their order, because all ranks must call them in the same one.
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
# Elements of a parameter whose update is measured.
_SMALL = 4096


@dataclasses.dataclass(frozen=True)
class CapturedStep:
    """A step as a module that runs, and as a graph to order."""

    module: fx.GraphModule
    """Takes parameters, buffers and the micro batch's tensors, each tensor once; returns the loss, and the gradients
    where no optimizer uses them."""
    graph: StepGraph
    nodes: tuple[tuple[fx.Node, ...], ...]
    """For each operation of the graph its call, then the views of the call's results."""
    batch: BatchStructure

    def make_eager_graph(self) -> StepGraph:
        """Makes the graph of an eager step, which keeps every gradient until the step is over."""
        operations = zip(self.graph.operations, self.nodes, strict=True)
        gradients = {s for operation, nodes in operations if nodes[0].op == "call_module" for s in operation.reads}
        return dataclasses.replace(self.graph, kept=self.graph.kept | gradients)

    def count_eager_bytes(self) -> list[int]:
        """Counts the bytes that are alive at each operation of an eager step."""
        return self.make_eager_graph().count_bytes(range(len(self.nodes)))


def capture_step(
    model: torch.nn.Module,
    compute_loss: Callable[..., Tensor],
    batch: Sequence[Any],
    optimizer: Optimizer | None = None,
) -> CapturedStep:
    """Traces one step of a model in its present mode, without running it.

    Args:
        model: has real or fake tensors; it is left as it was.
        compute_loss: called with model and *batch; returns the loss, one number.
        batch: tensors, real or fake, and any other values, which are compiled in.
        optimizer: that of the model's parameters; without one the gradients are kept.

    Values that the model computes in Python are compiled in, too: a step that takes another branch is another step.

    Raises ValueError, naming the operation and its module, if a shape or a branch depends on data, an operation has no
    fake kernel, a module replaces a buffer or sets an attribute, or a storage is resized or sparse. It also raises for
    a hook on a gradient, which a trace does not call, and for an optimizer whose updates may depend on one another.
    """
    check_model(model)
    if optimizer is not None:
        check_optimizer(optimizer)
    parameters = dict(model.named_parameters())
    state: dict[str, Tensor] = {**parameters, **dict(model.named_buffers())}
    trained: dict[str, Tensor] = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not trained:
        raise ValueError("no parameter of the model needs a gradient; expected a model that trains")
    structure = BatchStructure(batch)
    tensors = [*state.values(), *structure.list_tensors(batch)]
    opaque = dict[str, Opaque]()

    def trace_opaque(function: Any, *inputs: Any, **numbers: Any) -> Any:
        if not isinstance(function, Opaque):
            return function(*inputs, **numbers)
        opaque[f"tempo_kernels.{function.name}.default"] = function
        return function.trace(*inputs)

    def step(*tensors: Tensor) -> list[Tensor | None]:
        given = dict(zip(state, tensors, strict=False))
        for name in trained:
            given[name].grad = None
        # stack_weights: for a module with two names, the last replacement is undone first.
        with _reparametrize_module(model, given, tie_weights=True, stack_weights=True):
            loss = compute_loss(model, *structure.fill(tensors[len(state) :]))
            for name, buffer in model.named_buffers():
                if buffer is not given.get(name):
                    raise ValueError(
                        f"buffer {name} is another tensor after the forward than before; expected a module that "
                        "changes its buffers in place"
                    )
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    "compute_loss returned no single number that depends on a parameter; let it return the loss"
                )
            found = loss.detach()  # the last node of forward
            # Inside the context, because backward may recompute modules, which read the model's parameters.
            grads = _differentiate(loss, [given[name] for name in trained])
        return [found, *grads]

    mode = detect_fake_mode(tensors) or FakeTensorMode()
    with simulate(trace_opaque), refuse_changed_attributes(model), explain_refusals(model), mode:
        fakes = [t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in tensors]
        module = make_fx(step, tracing_mode="fake")(*fakes)
    if optimizer is not None:
        with unset_fake_temporarily():
            _append_updates(module, optimizer, list(state), trained)
    module.graph.lint()
    module.recompile()
    return StepReader(module, opaque).read(structure)


def _differentiate(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the gradients without the copies that eager mode makes of gradients that something else holds, too.

    Reentrant checkpointing (torch's, Megatron's, DeepSpeed's) differentiates its recomputed region by a backward() of
    its own, which adds to .grad, as does a compute_loss that calls backward(). These gradients are added here.
    Checkpointing refuses to run under autograd.grad only because .grad would get lost. Torch has no switch for its
    check, so the check is replaced.
    """
    is_valid, torch.autograd._is_checkpoint_valid = torch.autograd._is_checkpoint_valid, lambda: True
    try:
        grads: list[Tensor | None] = list(torch.autograd.grad(loss, parameters, allow_unused=True))
    finally:
        torch.autograd._is_checkpoint_valid = is_valid
    with torch.no_grad():
        for place, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            if parameter.grad is not None:
                grads[place] = parameter.grad if grad is None else parameter.grad + grad
    return grads


def _append_updates(module: fx.GraphModule, optimizer: Optimizer, state: list[str], trained: dict[str, Tensor]) -> None:
    """Appends an update for each parameter of the optimizer that has a gradient, in the optimizer's order.

    The module then returns the loss alone.
    """
    placeholders = dict(zip(state, module.graph.find_nodes(op="placeholder"), strict=False))
    (output,) = module.graph.find_nodes(op="output")
    loss, *grads = output.args[0]
    found = {id(p): (name, grad) for (name, p), grad in zip(trained.items(), grads, strict=True) if grad is not None}
    for number, group in enumerate(optimizer.param_groups):
        measure = functools.cache(functools.partial(_measure_update, optimizer, group))
        for parameter in (each for each in group["params"] if id(each) in found):
            name, grad = found[id(parameter)]
            target = f"update_{len(module._modules)}"
            module.add_module(target, ParameterUpdate(optimizer, number))
            with module.graph.inserting_before(output):
                node = module.graph.call_module(target, (grad, placeholders[name]))
            # The bytes are linear in the number of elements, so the updates of two small parameters determine them.
            few, more = (measure(parameter.dtype, size) for size in (_SMALL, 2 * _SMALL))
            slopes = [(b - a) // _SMALL for a, b in zip(few, more, strict=True)]
            counts = (a + slope * (parameter.numel() - _SMALL) for a, slope in zip(few, slopes, strict=True))
            node.meta["update"] = name, *counts
    output.args = ([loss],)


class ParameterUpdate(torch.nn.Module):
    """Calls `optimizer.step()` for one parameter and its gradient, with a group of one."""

    def __init__(self, optimizer: Optimizer, group: int) -> None:
        super().__init__()
        # The group's index instead of the group, because loading the optimizer's state makes new groups.
        self._optimizer, self._group = optimizer, group

    def forward(self, grad: Tensor, parameter: Tensor) -> None:
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups, parameter.grad = [{**groups[self._group], "params": [parameter]}], grad
        try:
            optimizer.step()
        finally:
            optimizer.param_groups, parameter.grad = groups, None


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises ValueError if the update of a parameter may depend on another one, or a hook sees the step."""
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise ValueError(
            f"the optimizer is {type(optimizer).__name__}, whose updates may depend on one another; "
            f"expected one of torch.optim's {known}"
        )
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)):
        raise ValueError(
            "the optimizer has a hook on its step, which would be called once per parameter; expected none"
        )


def _measure_update(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, size: int) -> tuple[int, int]:
    """The bytes of scratch memory and of state of an update with the group's settings."""
    parameter = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    make: Any = type(optimizer)
    small: Optimizer = make([parameter], lr=group["lr"])
    small.param_groups = [{**group, "params": [parameter]}]
    grad = torch.ones_like(parameter.detach())
    update = functools.partial(ParameterUpdate(small, 0), grad, parameter)
    update()
    state = [value for value in small.state[parameter].values() if isinstance(value, Tensor)]
    with Follower(parameter, grad, *state) as seen:
        _, scratch = seen.measure(update)
    return scratch, count_storage_bytes(state)


class StepReader:
    """Reads the storages of a module's nodes from their fake tensors `val`, which share storages as real ones will.

    Args:
        module: the traced step.
        opaque: operations of tempo_kernels by name, whose scratch memory is measured.
    """

    def __init__(self, module: fx.GraphModule, opaque: dict[str, Opaque]) -> None:
        self._module, self._opaque = module, opaque
        self._numbers = dict[int, int]()
        self._sizes = list[int]()
        self._places = dict[fx.Node, int]()
        # The last operations of those that keep their order.
        self._last = dict[tuple[bool, bool], int]()

    def read(self, batch: BatchStructure) -> CapturedStep:
        """Returns the captured step, with the structure of its micro batch.

        Raises ValueError if a storage was resized during the trace, for a sparse tensor, and for mkldnn's recurrent
        layers.
        """
        kept, operations, nodes = set[int](), list[Operation](), list[list[fx.Node]]()
        for node in self._module.graph.nodes:
            if node.op == "get_attr":
                node.meta.setdefault("val", getattr(self._module, node.target))
            known = len(self._sizes)
            numbers = self._number(node)
            if node.op in ("placeholder", "get_attr"):
                kept.update(numbers)
            elif node.op == "output":
                kept.update(s for each in node.all_input_nodes for s in self._number(each))
            elif (place := self._find_joined(node, numbers)) is not None:
                self._places[node] = place
                nodes[place].append(node)
            else:
                if "update" in node.meta:
                    kept.add(known)
                self._places[node] = len(nodes)
                operations.append(self._read_node(node, [s for s in numbers if s >= known]))
                nodes.append([node])
        graph = StepGraph(tuple(operations), tuple(self._sizes), frozenset(kept))
        return CapturedStep(self._module, graph, tuple(map(tuple, nodes)), batch)

    def _find_joined(self, node: fx.Node, numbers: list[int]) -> int | None:
        """The operation of which a node is a view, or a part of its results, and with which it so runs."""
        inputs = node.all_input_nodes
        if len(inputs) != 1 or inputs[0] not in self._places:
            return None
        is_view = numbers and not list_written(node) and set(numbers) <= set(self._number(inputs[0]))
        return self._places[inputs[0]] if is_view or node.target is operator.getitem else None

    def _read_node(self, node: fx.Node, made: list[int]) -> Operation:
        if node.target == _aten.mkldnn_rnn_layer.default:
            raise ValueError(
                f"{node.name} keeps a workspace of which a trace sees nothing; expected recurrent layers without "
                "mkldnn (torch.backends.mkldnn.flags(enabled=False))"
            )
        writes = {s for each in list_written(node) for s in self._number(each)}
        reads = {s for each in node.all_input_nodes for s in self._number(each)} - writes
        # Storages do not tell of views of parameters, which make none and yet exist only after their node has run.
        after = sorted({self._places[each] for each in node.all_input_nodes if each in self._places})
        kind = is_random(node), getattr(node.target, "namespace", "") in _COLLECTIVES
        if any(kind):
            after += [self._last[kind]] if kind in self._last else []
            self._last[kind] = self._places[node]
        if "update" in node.meta:
            parameter, scratch_bytes, state_bytes = node.meta["update"]
            name = f"update of {parameter}"
            writes.add(len(self._sizes))
            self._sizes.append(state_bytes)
        else:
            name, scratch_bytes = node.name, self._count_scratch(node)
        return Operation(
            name=name,
            makes=tuple(made),
            reads=tuple(sorted(reads)),
            writes=tuple(sorted(writes)),
            after=tuple(after),
            scratch_bytes=scratch_bytes,
        )

    def _number(self, node: fx.Node) -> list[int]:
        """Returns the indices of a node's storages; new storages get new indices."""
        found = []
        for t in list_tensors(node):
            if t.layout != torch.strided:
                raise ValueError(
                    f"{node.name} makes a tensor of layout {t.layout}; expected torch.strided ones only (of "
                    "embeddings: sparse=False)"
                )
            storage = t.untyped_storage()
            if storage._cdata not in self._numbers:
                if storage.nbytes() < count_span(t):
                    raise ValueError(
                        f"{node.name} makes a storage that is resized later, which the graph does not show; expected "
                        'operations that leave storages as they are (of Tempo: no "recompute")'
                    )
                self._numbers[storage._cdata] = len(self._sizes)
                self._sizes.append(storage.nbytes())
            found.append(self._numbers[storage._cdata])
        return list(dict.fromkeys(found))

    def _count_scratch(self, node: fx.Node) -> int:
        """Measures on fake tensors what an operation of tempo_kernels holds inside beside its results."""
        operation = self._opaque.get(str(node.target))
        if operation is None:
            return 0
        args: Any = fx.map_arg(node.args, lambda each: each.meta["val"])
        tensors: list[Any] = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        with tensors[0].fake_mode, torch.no_grad(), Follower(*tensors) as seen, on_device("cpu", seen):
            results, rise = seen.measure(lambda: operation.call(*args))
        return max(0, rise - count_storage_bytes(results))


def list_written(node: fx.Node) -> list[fx.Node]:
    """Lists the arguments that a node changes in place."""
    arguments, schema = get_arguments(node), getattr(node.target, "_schema", None)
    found = list[Any](node.args[1:] if node.op == "call_module" else ())
    if node.target in _NORMS and arguments["training"]:
        found += [arguments[name] for name in _STATISTICS]
    for each in schema.arguments if schema else ():
        if each.alias_info is not None and each.alias_info.is_write:
            found.append(arguments.get(each.name))
    return [each for each in tree_leaves(found) if isinstance(each, fx.Node)]


def get_arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of an operation by the names of its schema."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def list_tensors(node: fx.Node) -> list[Tensor]:
    """Lists the fake tensors that a node results in."""
    return [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]

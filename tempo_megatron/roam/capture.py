"""Captures a training step as a graph: the operations of eager mode in their order, without memory or values.

Forward and backward are traced through autograd as they run and are not made functional: operations in place stay in
place in the graph, and a view shares the storage of its base. Which operations depend on one another follows from the
storages that they read and write. Random numbers and collectives stay in their order. The optimizer's step is split
into updates of single parameters, which can run anywhere behind their gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, optim
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves

from tempo_kernels.opaque import Opaque, simulate
from tempo_megatron.memory.simulated.device import on_device
from tempo_megatron.memory.tape.follower import Follower, count_span, count_storage_bytes
from tempo_megatron.roam.graph import Operation, StepGraph, count_bytes
from tempo_megatron.roam.refusals import BatchStructure, check_model, explain_refusals, refuse_changed_attributes

# In these optimizers the update of an element depends on that element alone, so parameters can be updated one by one.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adadelta, optim.Adagrad, optim.Adamax),
    *(optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop),
)

# These write to running statistics although their schemas do not say so: the indices of the statistics among the
# arguments, and of the flag that switches the writing on.
_WRITE_STATISTICS = {"aten::native_batch_norm": ((3, 4), 5), "aten::cudnn_batch_norm": ((3, 4), 5)}
# Namespaces of collectives, which keep their order, because all ranks must call them in the same one.
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


@dataclasses.dataclass(frozen=True)
class Update:
    """The update of one parameter by the optimizer, as metadata of its node."""

    parameter: str
    placeholder: fx.Node
    scratch_bytes: int
    state_bytes: int


@dataclasses.dataclass(frozen=True)
class CapturedStep:
    """A step as a module that runs, and as a graph to order."""

    module: fx.GraphModule
    """Takes parameters, buffers and the micro batch's tensors, each tensor once; returns the loss, and the gradients
    where no optimizer uses them."""
    graph: StepGraph
    nodes: tuple[tuple[fx.Node, ...], ...]
    """For each operation of the graph its call, then the views of the call's results."""
    standing_bytes: int
    """Bytes that exist before and after: parameters, buffers, optimizer states, constants and the micro batch."""
    batch: BatchStructure
    """The structure of the micro batch."""
    recomputes_draws: bool
    """Whether backward draws new random numbers, where eager mode would repeat those of forward."""

    def make_eager_graph(self) -> StepGraph:
        """Makes the graph of an eager step, which keeps every gradient until the step is over."""
        operations = zip(self.graph.operations, self.nodes, strict=True)
        gradients = {s for operation, nodes in operations if nodes[0].meta.get("update") for s in operation.reads}
        return dataclasses.replace(self.graph, kept=self.graph.kept | gradients)

    def count_eager_bytes(self) -> list[int]:
        """Counts the bytes that are alive at each operation of an eager step."""
        return count_bytes(self.make_eager_graph(), range(len(self.nodes)))


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
    trace = _Trace(model, compute_loss, batch)
    with _see_operations() as opaque, refuse_changed_attributes(model), explain_refusals(model):
        module = trace.run()
    if optimizer is not None:
        with unset_fake_temporarily():
            _append_updates(module, optimizer, trace)
    module.graph.lint()
    module.recompile()
    return StepReader(module, opaque).read(trace.batch, recomputes_draws=trace.recomputes_draws)


class _Trace:
    """A function to trace, and the tensors to trace it with."""

    def __init__(self, model: torch.nn.Module, compute_loss: Callable[..., Tensor], batch: Sequence[Any]) -> None:
        self._model, self._compute_loss = model, compute_loss
        parameters = dict(model.named_parameters())
        self.state: dict[str, Tensor] = {**parameters, **dict(model.named_buffers())}
        self.trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self.batch = BatchStructure(batch)
        self.batch_tensors = self.batch.list_tensors(batch)
        self.recomputes_draws = False
        """Whether backward draws new random numbers, where eager mode would repeat those of forward."""
        if not self.trained:
            raise ValueError("no parameter of the model needs a gradient; expected a model that trains")

    def run(self) -> fx.GraphModule:
        tensors = [*self.state.values(), *self.batch_tensors]
        mode = detect_fake_mode(tensors) or FakeTensorMode()
        with mode:
            inputs = [t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in tensors]
            return make_fx(self._step, tracing_mode="fake")(*inputs)

    def _step(self, *tensors: Tensor) -> list[Tensor | None]:
        state = dict(zip(self.state, tensors[: len(self.state)], strict=True))
        batch = self.batch.fill(tensors[len(state) :])
        for name in self.trained:
            state[name].grad = None
        # stack_weights: for a module with two names, the last replacement is undone first.
        with _reparametrize_module(self._model, state, tie_weights=True, stack_weights=True):
            loss = self._compute_loss(self._model, *batch)
            for name, buffer in self._model.named_buffers():
                if buffer is not state.get(name):
                    raise ValueError(
                        f"buffer {name} is another tensor after the forward than before; expected a module that "
                        "changes its buffers in place"
                    )
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    "compute_loss returned no single number that depends on a parameter; let it return the loss"
                )
            draws = self._count_draws()
            # Inside the context, because backward may recompute modules, which read the model's parameters.
            grads = _differentiate(loss, [state[name] for name in self.trained])
            self.recomputes_draws = self._count_draws() > draws
        return [loss.detach(), *grads]

    def _count_draws(self) -> int:
        mode = get_proxy_mode()
        assert mode is not None
        return sum(is_random(node) for node in mode.tracer.graph.nodes)


def _differentiate(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the gradients without the copies that eager mode makes of gradients that something else holds, too.

    Reentrant checkpointing (torch's, Megatron's, DeepSpeed's) differentiates its recomputed region by a backward() of
    its own, which adds to .grad, as does a compute_loss that calls backward(). These gradients are added here.
    Checkpointing refuses to run under autograd.grad only because .grad would get lost. Torch has no switch for its
    check, so the check is replaced.
    """
    is_valid, torch.autograd._is_checkpoint_valid = torch.autograd._is_checkpoint_valid, lambda: True
    try:
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    finally:
        torch.autograd._is_checkpoint_valid = is_valid
    with torch.no_grad():
        return [_add(parameter.grad, grad) for parameter, grad in zip(parameters, grads, strict=True)]


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one + other if one is not None and other is not None else other if one is None else one


@contextlib.contextmanager
def _see_operations() -> Iterator[dict[str, Opaque]]:
    """Collects the operations of tempo_kernels that are called inside the context, by name."""
    seen = dict[str, Opaque]()

    def note(function: Any, *inputs: Any, **numbers: Any) -> Any:
        if not isinstance(function, Opaque):
            return function(*inputs, **numbers)
        seen[function.name] = function
        return function.trace(*inputs)

    with simulate(note):
        yield seen


def _append_updates(module: fx.GraphModule, optimizer: Optimizer, trace: _Trace) -> None:
    """Appends an update for each parameter of the optimizer that has a gradient, in the optimizer's order.

    The module then returns the loss alone.
    """
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    placeholders = dict(zip(trace.state, inputs, strict=False))
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    loss, *grads = output.args[0]
    trained = zip(trace.trained.items(), grads, strict=True)
    found = {id(p): (name, grad) for (name, p), grad in trained if grad is not None}
    for group in optimizer.param_groups:
        measure = functools.cache(functools.partial(_measure_update, optimizer, group))
        for parameter in group["params"]:
            if id(parameter) not in found:
                continue
            name, grad = found[id(parameter)]
            target = f"update_{len(module._modules)}"
            module.add_module(target, ParameterUpdate(optimizer, parameter))
            with module.graph.inserting_before(output):
                node = module.graph.call_module(target, (grad,))
            node.meta["update"] = Update(name, placeholders[name], *_count_update(measure, parameter))
    output.args = ([loss],)


class ParameterUpdate(torch.nn.Module):
    """Calls `optimizer.step()` for one parameter, given its gradient, with a group of one."""

    def __init__(self, optimizer: Optimizer, parameter: torch.nn.Parameter) -> None:
        super().__init__()
        groups = enumerate(optimizer.param_groups)
        place = next(place for place, group in groups if any(p is parameter for p in group["params"]))
        # In a tuple, so that the parameter is not registered with this module. The group's index instead of the group,
        # because loading the optimizer's state makes new groups.
        self._held = optimizer, place, parameter

    def has_gradient(self) -> bool:
        return self._held[-1].grad is not None

    def forward(self, grad: Tensor) -> None:
        optimizer, place, parameter = self._held
        groups = optimizer.param_groups
        optimizer.param_groups, parameter.grad = [{**groups[place], "params": [parameter]}], grad
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


_SMALL = 4096


def _count_update(measure: Callable[[torch.dtype, int], tuple[int, int]], parameter: Tensor) -> list[int]:
    """The bytes of scratch memory and of state of a parameter's update. Both are linear in the number of elements, so
    the updates of two small parameters determine them."""
    few, more = (measure(parameter.dtype, size) for size in (_SMALL, 2 * _SMALL))
    assert all((b - a) % _SMALL == 0 for a, b in zip(few, more, strict=True)), "an optimizer's bytes are not linear"
    return [a + (b - a) // _SMALL * (parameter.numel() - _SMALL) for a, b in zip(few, more, strict=True)]


def _measure_update(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, num_elements: int
) -> tuple[int, int]:
    """The bytes of scratch memory and of state, with the group's settings."""
    parameter = torch.nn.Parameter(torch.ones(num_elements, dtype=dtype))
    make: Any = type(optimizer)
    small: Optimizer = make([parameter], lr=group["lr"])
    small.param_groups = [{**group, "params": [parameter]}]
    update = ParameterUpdate(small, parameter)
    grad = torch.ones_like(parameter.detach())
    update(grad)
    state = [value for value in small.state[parameter].values() if isinstance(value, Tensor)]
    with Follower(parameter, grad, *state) as seen:
        _, scratch = seen.measure(lambda: update(grad))
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
        self._standing = set[int]()
        self._operations = list[Operation]()
        self._nodes = list[list[fx.Node]]()
        self._places = dict[fx.Node, int]()
        # The last operations of those that keep their order.
        self._last = dict[str, int]()

    def read(self, batch: BatchStructure, *, recomputes_draws: bool) -> CapturedStep:
        """Returns the captured step. The arguments are its fields.

        Raises ValueError if a storage was resized during the trace, for a sparse tensor, and for mkldnn's recurrent
        layers.
        """
        kept = set[int]()
        for node in self._module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                if node.op == "get_attr":
                    node.meta.setdefault("val", getattr(self._module, node.target))
                self._standing.update(self._number(node))
            elif node.op == "output":
                kept.update(s for each in node.all_input_nodes for s in self._number(each))
            elif self._joins(node):
                place = self._places[node] = self._places[node.all_input_nodes[0]]
                self._nodes[place].append(node)
            else:
                self._operations.append(self._read_node(node))
                self._places[node] = len(self._nodes)
                self._nodes.append([node])
        return CapturedStep(
            self._module,
            StepGraph(tuple(self._operations), tuple(self._sizes), frozenset(kept | self._standing)),
            tuple(map(tuple, self._nodes)),
            sum(self._sizes[storage] for storage in self._standing),
            batch,
            recomputes_draws,
        )

    def _joins(self, node: fx.Node) -> bool:
        """Whether a node is a view or a part of one operation's results, and so runs with that operation."""
        inputs = node.all_input_nodes
        if len(inputs) != 1 or inputs[0] not in self._places:
            return False
        if is_part(node):
            return True
        known = {t.untyped_storage()._cdata for t in list_tensors(inputs[0])}
        return (
            not list_written(node)
            and all(t.untyped_storage()._cdata in known for t in list_tensors(node))
            and bool(list_tensors(node))
        )

    def _read_node(self, node: fx.Node) -> Operation:
        if update := node.meta.get("update"):
            return self._read_update(node, update)
        _check_workspace(node)
        writes = {s for each in list_written(node) for s in self._number(each)}
        reads = {s for each in node.all_input_nodes for s in self._number(each)} - writes
        known = len(self._sizes)
        made = [s for s in self._number(node) if s >= known]
        # Storages do not tell of views of parameters, which make none and yet exist only after their node has run.
        after = sorted({self._places[each] for each in node.all_input_nodes if each in self._places})
        is_collective = _get_name(node).partition("::")[0] in _COLLECTIVES
        for kind, is_of_kind in (("random", is_random(node)), ("collective", is_collective)):
            if is_of_kind:
                after += [self._last[kind]] if kind in self._last else []
                self._last[kind] = len(self._operations)
        return Operation(
            name=node.name,
            makes=tuple(made),
            reads=tuple(sorted(reads)),
            writes=tuple(sorted(writes)),
            after=tuple(after),
            scratch_bytes=self._count_scratch(node),
        )

    def _read_update(self, node: fx.Node, update: Update) -> Operation:
        state = len(self._sizes)
        self._sizes.append(update.state_bytes)
        self._standing.add(state)
        return Operation(
            name=f"update of {update.parameter}",
            reads=tuple(s for each in node.all_input_nodes for s in self._number(each)),
            after=tuple(self._places[each] for each in node.all_input_nodes if each in self._places),
            writes=(*self._number(update.placeholder), state),
            scratch_bytes=update.scratch_bytes,
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
        operation = self._opaque.get(_get_name(node).removeprefix("tempo_kernels::"))
        if operation is None:
            return 0
        args: Any = fx.map_arg(node.args, lambda each: each.meta["val"])
        tensors: list[Any] = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        with tensors[0].fake_mode, torch.no_grad(), Follower(*tensors) as seen, on_device("cpu", seen):
            results, rise = seen.measure(lambda: operation.call(*args))
        return max(0, rise - count_storage_bytes(results))


def is_part(node: fx.Node) -> bool:
    """Whether a node takes one result of an operation that has several."""
    return getattr(node.target, "__name__", "") == "getitem"


def list_written(node: fx.Node) -> list[fx.Node]:
    """Lists the arguments that a node changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    found = list[Any]()
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(node.args[place] if place < len(node.args) else node.kwargs.get(argument.name))
    places, training = _WRITE_STATISTICS.get(schema.name, ((), 0))
    if places and node.args[training]:
        found += [node.args[place] for place in places]
    return [each for each in tree_leaves(found) if isinstance(each, fx.Node)]


def get_arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of an operation by the names of its schema."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _check_workspace(node: fx.Node) -> None:
    """Raises ValueError for an operation that keeps more for backward than its fake kernel shows."""
    if _get_name(node) == "aten::mkldnn_rnn_layer":
        raise ValueError(
            f"{node.name} keeps a workspace of which a trace sees nothing; expected recurrent layers without mkldnn "
            "(torch.backends.mkldnn.flags(enabled=False))"
        )


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _get_name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema else str(node.target)


def list_tensors(node: fx.Node) -> list[Tensor]:
    """Lists the fake tensors that a node results in."""
    return [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]

"""Captures a training step as a graph: the operations of eager mode in their order, without memory or values.

Forward and backward are traced through autograd as they run and are not made functional: operations in place stay in
place in the graph, and a view shares the storage of its base. Which operations depend on one another follows from the
storages that they read and write. Random numbers and collectives stay in their order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer

from tempo_kernels.opaque import Opaque, simulate
from tempo_megatron.roam.read_graph import CapturedStep, StepReader, Update, is_random
from tempo_megatron.roam.refusals import BatchStructure, check_model, explain_refusals, refuse_changed_attributes
from tempo_megatron.roam.updates import ParameterUpdate, check_optimizer, measure_update


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
        _append_updates(module, optimizer, trace)
    module.graph.lint()
    module.recompile()
    captured = StepReader(module, opaque).read()
    return dataclasses.replace(captured, batch=trace.batch, recomputes_draws=trace.recomputes_draws)


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
        measure = functools.cache(functools.partial(measure_update, optimizer, group))
        for parameter in group["params"]:
            if id(parameter) not in found:
                continue
            name, grad = found[id(parameter)]
            target = f"update_{len(module._modules)}"
            module.add_module(target, ParameterUpdate(optimizer, parameter))
            with module.graph.inserting_before(output):
                node = module.graph.call_module(target, (grad,))
            node.meta["update"] = Update(name, placeholders[name], *measure(parameter.dtype)(parameter.numel()))
    output.args = ([loss],)

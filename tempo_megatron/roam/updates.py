"""Splits an optimizer's step into updates of single parameters, which can run anywhere behind their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tempo_megatron.memory.tape.follower import Follower, count_storage_bytes

# In these optimizers the update of an element depends on that element alone, so parameters can be updated one by one.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)


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


def measure_update(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> Callable[[int], tuple[int, int]]:
    """Measures the updates of two small parameters of this dtype with the group's settings.

    Returns a function from a parameter's number of elements to the bytes of its update's scratch memory and of its
    state. Both are linear in the number of elements, so two sizes determine them for any size.
    """
    small = 4096
    with unset_fake_temporarily():
        few, more = (_measure_elements(optimizer, group, dtype, size) for size in (small, 2 * small))
    slopes = [(b - a) // small for a, b in zip(few, more, strict=True)]
    assert all((b - a) % small == 0 for a, b in zip(few, more, strict=True)), "an optimizer's bytes are not linear"

    def count(num_elements: int) -> tuple[int, int]:
        scratch, state = (a + slope * (num_elements - small) for a, slope in zip(few, slopes, strict=True))
        return scratch, state

    return count


def _measure_elements(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, num_elements: int
) -> tuple[int, int]:
    """Measures the bytes of scratch memory and of state."""
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

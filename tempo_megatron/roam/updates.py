"""Splits an optimizer's step into updates of single parameters, which can run anywhere behind their gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tempo_megatron.memory.storages import PeakBytes, count_storage_bytes

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


@dataclasses.dataclass(frozen=True)
class UpdateBytes:
    """The scratch memory and the state of an update, each as (bytes, bytes per element of the parameter)."""

    scratch: tuple[int, int]
    state: tuple[int, int]

    def count_scratch(self, num_elements: int) -> int:
        return self.scratch[0] + self.scratch[1] * num_elements

    def count_state(self, num_elements: int) -> int:
        return self.state[0] + self.state[1] * num_elements


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


def measure_update(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> UpdateBytes:
    """Measures the updates of two small parameters of this dtype with the group's settings.

    The bytes are linear in the number of elements, so two sizes determine them for any size.
    """
    with unset_fake_temporarily():
        few_scratch, few_state = _measure_elements(optimizer, group, dtype, 4096)
        more_scratch, more_state = _measure_elements(optimizer, group, dtype, 8192)
    return UpdateBytes(_find_line(few_scratch, more_scratch), _find_line(few_state, more_state))


def _find_line(few: int, more: int) -> tuple[int, int]:
    slope, rest = divmod(more - few, 4096)
    assert not rest, "an optimizer is not linear in the elements of a parameter"
    return few - 4096 * slope, slope


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
    with PeakBytes(parameter, grad, *state) as seen:
        _, scratch = seen.measure(lambda: update(grad))
    return scratch, count_storage_bytes(state)

"""Parallel linears that drop an input which can be recomputed, and linears that can run twice."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from tempo_kernels.recompute import can_refill, drop, hold


class DropsInput:
    """A base of parallel linears, and of modules of several, that do not keep an input which the norm or attention
    before them can make again.

    The input is made again for the linear's backward, before the all-gather of sequence parallelism. Its memory is
    free from the moment when Megatron's layer releases it, at the end of its attention or MLP. If something else holds
    the input, such as a forward hook that stores it, it stays in memory and nothing is saved.
    """

    def __call__(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(output, bias), as Megatron's linear."""
        # Not in forward: ZeRO-3's hooks wrap the input that forward sees.
        result = super().__call__(input_, *args, **kwargs)  # type: ignore[misc]
        if can_refill(input_):
            drop(input_, after=result[0])
        return result


def name_as_stock(cls: Any) -> Any:
    """Give a class the name of the Megatron class that it replaces; its `__qualname__` stays Tempo's.

    Megatron-Bridge finds by a linear's name which dimension of a parameter the ranks share, and which adapter fits.
    """
    cls.__name__ = cls.__bases__[-1].__name__
    return cls


@name_as_stock
class TempoColumnParallelLinear(DropsInput, ColumnParallelLinear):
    """ColumnParallelLinear that does not keep its input; see DropsInput."""


@name_as_stock
class TempoRowParallelLinear(DropsInput, RowParallelLinear):
    """RowParallelLinear that does not keep its input; see DropsInput."""


class LinearCall(torch.nn.Module):
    """One call of a linear that can be repeated. It keeps the linear's input, which the linear keeps anyway.

    Under sequence parallelism a repetition gathers the input again, at the same place of backward on every rank.
    """

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear: Any = linear
        self.output: Tensor | None = None
        """Of the call, until `take_output`."""
        self._take_input: Callable[[], Tensor] | None = None

    def forward(self, input_: Tensor) -> Any:
        """(output, bias), as the linear.

        Raises ValueError where the linear wraps another module, such as an adapter whose dropout would draw again, and
        where ZeRO-3 partitions its weight, which is not gathered when it runs again."""
        if next(self.linear.children(), None) is not None:
            raise ValueError(
                f"a linear is a {type(self.linear).__name__} around another module, which may draw other random "
                "numbers when it runs again; expected Megatron's own linear; set tempo.linear_fc1 and tempo.linear_qkv "
                'to "off"'
            )
        if hasattr(self.linear.weight, "ds_id"):
            raise ValueError(
                f"the weight of a {type(self.linear).__name__} is partitioned by ZeRO-3, which has not gathered it "
                'when it runs again; expected ZeRO 0, 1 or 2; set tempo.linear_fc1 and tempo.linear_qkv to "off"'
            )
        # A linear that contains the norm in front of it tells the norm's output.
        has_norm = hasattr(self.linear, "take_normed")
        take_input = None if has_norm else hold(input_)
        result = self.linear(input_)
        self._take_input = self.linear.take_normed() if has_norm else take_input
        self.output = result[0]
        return result

    def take_output(self) -> Tensor:
        """The output of the call, which it then no longer holds."""
        output, self.output = self.output, None
        assert output is not None
        return output

    def repeat(self) -> Any:
        """(output, bias) once more, in backward and without a graph."""
        assert self._take_input is not None
        return getattr(self.linear, "run_linear", self.linear)(self._take_input())


class Function(torch.nn.Module):
    """Stands in for a module: calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.function(*args, **kwargs)


class Return(Function):
    """Stands in for a linear: returns the (output, bias) that it was made with, or its input and no bias."""

    def __init__(self, *result: Any) -> None:
        super().__init__(lambda input_, *_: result or (input_, None))


def replace_modules(module: Any, **others: torch.nn.Module) -> Any:
    """A copy of `module` with other submodules in some places; it shares everything else, parameters too."""
    stand_in = copy.copy(module)
    stand_in._modules = {**module._modules, **others}
    return stand_in


def run_between_linears(module: Any, forward: Callable[..., Any], x: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    """The input of a module's linear_fc2 from the (output, bias) of its linear_fc1, by Megatron's
    `forward(module, x, *args)`."""
    between = replace_modules(module, linear_fc1=Return(x, bias), linear_fc2=Return())
    made: Tensor = forward(between, x, *args)[0]
    return made


def replace_names(function: Callable[..., Any], **others: Any) -> Callable[..., Any]:
    """A copy of one of Megatron's functions that finds other objects under some of the names of its module; a name that
    the module does not have is left out."""
    own: Any = function
    names = {name: other for name, other in others.items() if name in own.__globals__}
    changed = types.FunctionType(
        own.__code__, {**own.__globals__, **names}, own.__name__, own.__defaults__, own.__closure__
    )
    changed.__kwdefaults__ = own.__kwdefaults__
    return changed


HOLD_INPUTS = {
    "delay_wgrad_compute": "by which linears hold their inputs beyond backward",
    "cpu_offloading": "which moves what a layer keeps to the host",
    "fine_grained_activation_offloading": "which moves what a layer keeps to the host",
}
"""Setting of a TransformerConfig under which more is done with a linear's input than to keep it -> what."""


def find_reason(config: Any, settings: Mapping[str, str]) -> str | None:
    """The first of these settings that a TransformerConfig has on, and what it does; None where all are off."""
    for name, why in settings.items():
        if value := getattr(config, name, None):
            return f"{name} is {value if type(value) is int else 'on'}, {why}"
    return None


def is_quantised(config: Any) -> bool:
    """Whether linears compute in FP8 or FP4."""
    return bool(config.fp8 or getattr(config, "fp4", None))


def keep_given_input(linear: Any) -> None:
    """Let one of Transformer Engine's linears keep the input that it is given, which a module before it keeps too, and
    quantise it again in backward; by itself it keeps a quantised copy.

    Raises ValueError where the linear cannot.
    """
    if not hasattr(linear, "save_original_input"):
        raise ValueError(
            f"fp8 or fp4 is on, and {type(linear).__name__} cannot keep the input that it is given, so that keeping "
            "outputs would save nothing; expected a linear of Transformer Engine 2.6 or newer; set tempo.norm and "
            'tempo.activation to "off"'
        )
    linear.save_original_input = True


def is_in_backward() -> bool:
    """Whether this forward runs inside a backward, that is, inside someone's recomputation."""
    return torch._C._current_graph_task_id() != -1

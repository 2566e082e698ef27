"""Megatron's column-parallel linear behind a norm that can make its output again."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from tempo_kernels.recompute import can_refill, drop


class DropsInput:
    """A base of column-parallel linears that do not keep their input, where it came from a norm that can make it again.

    The input is made again for this linear's backward, before sequence parallelism's all-gather. Its memory is free in
    between, from when Megatron's layer lets go of it at the end of its attention or MLP; somebody who holds on to it,
    such as a forward hook that stores it, finds it whole, and there nothing is saved.
    """

    def __call__(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(output, bias), as ColumnParallelLinear. Around the module's hooks, of which ZeRO-3's wrap the input."""
        result = super().__call__(input_, *args, **kwargs)  # type: ignore[misc]
        if can_refill(input_):
            drop(input_, after=result[0])
        return result


class TempoColumnParallelLinear(DropsInput, ColumnParallelLinear):
    """ColumnParallelLinear that does not keep its input; see DropsInput."""

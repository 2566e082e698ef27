"""Megatron's column-parallel linear behind a norm that can make its output again."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from tempo_kernels.recompute import can_refill, drop


class DropsInput:
    """A base of column-parallel linears that do not keep their input, where it came from a norm that can make it again.

    The norm makes the input again for this linear's backward, before the all-gather of sequence parallelism. In between
    its memory is free, as soon as Megatron's layer releases it at the end of its attention or MLP. Where something else
    holds the input, such as a forward hook that stores it, the input stays whole and nothing is saved.
    """

    def __call__(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(output, bias), as ColumnParallelLinear."""
        # Not in forward: ZeRO-3's hooks wrap the input that forward sees.
        result = super().__call__(input_, *args, **kwargs)  # type: ignore[misc]
        if can_refill(input_):
            drop(input_, after=result[0])
        return result


class TempoColumnParallelLinear(DropsInput, ColumnParallelLinear):
    """ColumnParallelLinear that does not keep its input; see DropsInput."""

"""Megatron's column-parallel linear behind a norm that can make its output again."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from tempo_kernels.recompute import drop


class TempoColumnParallelLinear(ColumnParallelLinear):
    """ColumnParallelLinear that drops its input, where that came from a norm that keeps its own input instead.

    The input's memory is free until this linear's backward, sequence parallelism's all-gather included. Nobody else may
    read it; what does so in Megatron is refused when the spec is made.
    """

    def __call__(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(output, bias), as ColumnParallelLinear. Around the module's hooks, of which ZeRO-3's wrap the input."""
        result = super().__call__(input_, *args, **kwargs)
        if hasattr(input_.grad_fn, "refill"):
            drop(input_, after=result[0], is_private=self.sequence_parallel)
        return result

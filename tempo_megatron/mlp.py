"""TempoMLP: Megatron's MLP with a GELU that keeps its output and one bit per element."""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tempo_kernels.gelu import gelu

_MLP_ARGUMENTS = frozenset(inspect.signature(MLP.__init__).parameters)


class TempoMLP(MLP):
    """h -> GELU(h W1 + b1) W2, where W2's input is also all that GELU keeps, beside one bit per element.

    `bias_activation_fusion=True` means the tanh form and False the erf form, as in Megatron's MLP.
    Submodule names and checkpoint keys are MLP's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: Any = None,
        *,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        if tp_group is None and pg_collection is not None:
            tp_group = pg_collection.tp
        if ffn_hidden_size is None and not is_expert:
            ffn_hidden_size = config.ffn_hidden_size
        kwargs["pg_collection"] = pg_collection
        # Newer Megatrons pass more names than older ones take.
        accepted = {name: value for name, value in kwargs.items() if name in _MLP_ARGUMENTS}
        super().__init__(config, submodules, is_expert, input_size, ffn_hidden_size, tp_group, **accepted)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any) -> Any:
        """(output [s, b, h], bias [h] or None) of hidden_states [s, b, h]."""
        if per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        # [s, b, f/p]
        intermediate, bias = self.linear_fc1(hidden_states)
        intermediate = gelu(intermediate, bias, "tanh" if self.config.bias_activation_fusion else "none")
        output, output_bias = self.linear_fc2(intermediate)
        if output_bias is not None and is_checkpointing():
            # A parameter that a recomputed region returns as it is would become that region's output, and its
            # backward would recompute the region without end: what happens to Megatron's own MLP.
            output_bias = output_bias.clone()
        return output, output_bias

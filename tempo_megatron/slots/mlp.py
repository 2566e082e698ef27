"""Megatron's MLP with an activation that keeps its output or its input, never both.

The TransformerConfig says which activation it is (`activation_func`, `gated_linear_unit`), and the class of this file
says what that activation keeps.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from megatron.core.activations import squared_relu as squared_relu_of_megatron
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from tempo_kernels.activation import activate
from tempo_kernels.recompute import can_refill, drop, recompute, recompute_in_tiles
from tempo_megatron.settings.activations import ACTIVATIONS, find_inplace_refusal
from tempo_megatron.slots.linear import (
    LinearCall,
    is_in_backward,
    is_quantised,
    keep_given_input,
    run_between_linears,
)

_MLP_ARGUMENTS = frozenset(inspect.signature(MLP.__init__).parameters)

FUNCTIONS: dict[str, Any] = {
    activation.formula: squared_relu_of_megatron
    if activation.formula == "squared_relu"
    else getattr(F, activation.formula)
    for activation in ACTIVATIONS.values()
}
"""Formula of an activation -> the `activation_func` of a TransformerConfig: torch's of that name, where it has one."""


def name_activation(config: TransformerConfig) -> str | None:
    """The MLP's activation, by its name in the table; None where the table has none such."""
    # Clamps and offsets of a gated unit are formulas of their own.
    clamp, offset = getattr(config, "activation_func_clamp_value", None), getattr(config, "glu_linear_offset", 0.0)
    is_plain = not config.gated_linear_unit or (clamp is None and offset == 0.0)
    for name, activation in ACTIVATIONS.items():
        has_formula = FUNCTIONS[activation.formula] is config.activation_func
        if is_plain and has_formula and activation.is_gated == config.gated_linear_unit:
            return name
    return None


def describe_activation(config: TransformerConfig) -> str:
    """The activation's name, also of one that Tempo has no operation for."""
    function = getattr(config.activation_func, "__name__", str(config.activation_func))
    return name_activation(config) or ("gated " if config.gated_linear_unit else "") + function


def find_activation_refusal(config: TransformerConfig, choice: str) -> str | None:
    """Why the MLP's activation cannot have tempo.activation = `choice`; None where it can."""
    if config.num_moe_experts and choice == "inplace":
        return (
            f"num_moe_experts is {config.num_moe_experts}, and an expert's activation is weighted by probabilities, "
            "which may be 0, so that its input cannot be computed from its output"
        )
    if config.num_moe_experts:
        is_recomputed = config.recompute_granularity == "selective" and "moe_act" in (config.recompute_modules or ())
        why = "recompute_modules holds moe_act, by which Megatron recomputes the activation of experts itself"
        return why if is_recomputed else None
    name = name_activation(config)
    if name is None:
        *others, last = (each.replace("_", " ") for each in ACTIVATIONS)
        return f"activation is {describe_activation(config)}, and Tempo has {', '.join(others)} and {last} only"
    return find_inplace_refusal(name) if choice == "inplace" else None


def make_activation(config: TransformerConfig, keep: str) -> Callable[[Tensor, Tensor | None], Tensor]:
    """activation(x, bias) of the MLP; fused into one kernel, and as Transformer Engine's, GELU has its tanh form."""
    name = name_activation(config)
    assert name is not None
    activation = ACTIVATIONS[name]
    # Megatron's fused bias_gelu is the tanh form (core/fusions/fused_bias_gelu.py), the F.gelu of MLP the erf form.
    is_tanh = config.bias_activation_fusion or getattr(config, "use_te_activation_func", False)
    formula = "gelu_tanh" if activation.formula == "gelu" and is_tanh else activation.formula
    return functools.partial(activate, activation=formula, keep=keep, is_gated=activation.is_gated, operation=name)


class TempoMLP(MLP):
    """h -> act(h W1 + b1) W2. The activation keeps its output, which W2 keeps anyway (GELU: and a bit per element).

    `bias_activation_fusion=True` means GELU's tanh form and False the erf form, as in Megatron's MLP.
    Submodule names and checkpoint keys are MLP's.
    """

    keep: ClassVar[str] = "inplace"

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
        # Pass on only the names that this Megatron's MLP takes.
        accepted = {name: value for name, value in kwargs.items() if name in _MLP_ARGUMENTS}
        super().__init__(config, submodules, is_expert, input_size, ffn_hidden_size, tp_group, **accepted)
        if self.keep == "inplace" and is_quantised(config):
            keep_given_input(self.linear_fc2)
        self._activation = self._make_activation()

    def _make_activation(self) -> Callable[[Tensor, Tensor | None], Tensor]:
        """activation(x, bias)."""
        return make_activation(self.config, self.keep)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any) -> Any:
        """(output [s, b, h], bias [h] or None) of hidden_states [s, b, h]."""
        if per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        output, output_bias = self._run(hidden_states)
        # The first forward of a checkpointed region runs without a graph, the second inside of a backward.
        if output_bias is not None and (not torch.is_grad_enabled() or is_in_backward()):
            # If a recomputed region returned a parameter itself, the parameter would become the region's output, and
            # its backward would recompute the region without end. That happens with Megatron's own MLP.
            output_bias = output_bias.clone()
        return output, output_bias

    def _run(self, hidden_states: Tensor) -> Any:
        """What MLP.forward returns."""
        # [s, b, f/p], before a gated activation 2f/p
        intermediate = self._activation(*self.linear_fc1(hidden_states))
        output = self.linear_fc2(intermediate)
        if self.keep == "recompute":
            drop(intermediate, after=output[0])
        return output


class TempoRecomputeMLP(TempoMLP):
    """TempoMLP that keeps the activation's input. The output is freed after W2 has used it, and made again for W2's
    backward. Exact, for any activation, gated ones included."""

    keep = "recompute"

    def _make_activation(self) -> Callable[[Tensor, Tensor | None], Tensor]:
        # Layers of experts can have any activation, and so can the dense layers beside them.
        is_known = name_activation(self.config) is not None
        return super()._make_activation() if is_known else functools.partial(recompute, self._make_stock_activation())

    def _make_stock_activation(self) -> Callable[[Tensor, Tensor | None], Tensor]:
        return functools.partial(run_between_linears, self, MLP.forward)


class TempoLinearRecomputeMLP(TempoRecomputeMLP):
    """Keeps only W1's input: W1's output and the activation's output are freed after W2 has used them.

    Just before W2's backward both are computed again. Exact: the same kernels on the same input. If Megatron recomputes
    the MLP or the layer, W1 does not run a third time.
    """

    def _run(self, hidden_states: Tensor) -> Any:
        if not torch.is_grad_enabled() or is_in_backward():
            return super()._run(hidden_states)
        linear_fc1 = LinearCall(self.linear_fc1)
        intermediate = self._activation(*linear_fc1(hidden_states))
        output = self.linear_fc2(intermediate)
        drop(intermediate, after=output[0])
        drop(linear_fc1.take_output(), after=intermediate, make=lambda: linear_fc1.repeat()[:1])
        return output


class LinearRecomputeMLP(TempoLinearRecomputeMLP):
    """TempoLinearRecomputeMLP with Megatron's own activation, whatever it is, which runs again with W1."""

    def _make_activation(self) -> Callable[[Tensor, Tensor | None], Tensor]:
        return functools.partial(recompute, self._make_stock_activation())


class TempoTiledMLP(TempoRecomputeMLP):
    """Keeps W1's input only, and computes a tile of tokens at a time, in forward and in backward: of what is f wide no
    more than a tile is ever there. Backward runs W1, the activation and W2 once more on each tile.

    A tile has as many tokens as the hidden size, and under sequence parallelism its part of them on each rank, which
    gathers and reduces them by itself. So ranks communicate in the same order, and a tile's rows are those of stock.

    Error: none in outputs and in gradients of inputs where a product's rows do not depend on how many there are; the
    gradients of W1, b1 and W2 are sums over tiles, in float32.
    """

    _z3_leaf = True
    """DeepSpeed's ZeRO 3 gathers the weights once for all tiles, and not for each tile, of which ranks may have
    different numbers (deepspeed/utils/z3_leaf_module.py)."""

    def _run(self, hidden_states: Tensor) -> Any:
        bias: Tensor | None = None

        def run_tile(x: Tensor) -> Tensor:
            nonlocal bias
            output: Tensor
            output, bias = self.linear_fc2(self._activation(*self.linear_fc1(x)))
            return output

        ranks = self.tp_group.size() if self.config.sequence_parallel else 1
        tokens_of_row = hidden_states.size(1) * ranks
        num_rows = max(1, self.count_tile_tokens() // tokens_of_row)
        output = recompute_in_tiles(run_tile, hidden_states, parameters=self.parameters(), num_rows=num_rows)
        if can_refill(hidden_states):
            drop(hidden_states, after=output)
        return output, bias

    def count_tile_tokens(self) -> int:
        """The tokens of a tile, over all ranks that share a sequence."""
        return int(self.config.hidden_size)


class TiledMLP(TempoTiledMLP):
    """TempoTiledMLP with Megatron's own activation, whatever it is."""

    def _make_activation(self) -> Callable[[Tensor, Tensor | None], Tensor]:
        return self._make_stock_activation()

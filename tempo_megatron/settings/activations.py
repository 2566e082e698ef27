"""The activations that an MLP can have with Tempo: one table, by the names that a model's JSON has for them.

A new one is a row here, its function in Megatron in `FUNCTIONS` of `tempo_megatron/slots/mlp.py`, and a formula that is
not there yet in `tempo_kernels/pointwise`: for torch in `activations.py`, for Triton in `kernel_activations.py`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activation:
    """One activation, and which values of the switch `activation` it can have beside "recompute" and "off"."""

    name: str
    formula: str
    """Of x, or where it is gated of the gate: its name in `tempo_kernels.pointwise.ACTIVATIONS`."""

    is_gated: bool = False
    """Whether the first linear gives gate and up, whose product formula(gate) * up is the output."""

    has_inplace: bool = False
    """Whether the derivative can be computed from the output; of a gated one that is a product of two unknowns."""

    help: str = ""
    """What `--help` says of the option `--NAME`, for those that Megatron-LM has an option for; empty for the others,
    which only a JSON names. --geglu is one more: Megatron-LM's --quick-geglu, x * sigmoid(1.702 x), is no GELU."""

    @property
    def option(self) -> str:
        """`--squared-relu`."""
        return f"--{self.name.replace('_', '-')}"


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation(name="gelu", formula="gelu", has_inplace=True),
        Activation(name="squared_relu", formula="squared_relu", has_inplace=True, help="squared relu instead of gelu"),
        Activation(name="silu", formula="silu"),
        Activation(
            name="swiglu",
            formula="silu",
            is_gated=True,
            help="gated MLP: silu of one half times the other, instead of gelu",
        ),
        Activation(
            name="geglu",
            formula="gelu",
            is_gated=True,
            help="gated MLP: gelu of one half times the other (Megatron-LM has --quick-geglu, another)",
        ),
        Activation(name="reglu", formula="relu", is_gated=True),
    )
}

GATED = tuple(name for name, activation in ACTIVATIONS.items() if activation.is_gated)


def find_inplace_refusal(name: str) -> str | None:
    """Why an activation cannot be in place; None where it can."""
    if ACTIVATIONS[name].has_inplace:
        return None
    can = [each.replace("_", " ") for each, activation in ACTIVATIONS.items() if activation.has_inplace]
    return f"activation is {name}, and in place exists for {' and '.join(can)} only"

"""The activations that an MLP can have with Tempo: one table, by the names that a model's JSON has for them.

A new one needs a row here. A new formula also goes into `tempo_kernels/activation`: for torch into the table of
`activations.py`, for Triton into `kernel_activations.py`; `FUNCTIONS` of `tempo_megatron/slots/mlp.py` takes torch's.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activation:
    """One activation of an MLP."""

    name: str
    formula: str
    """The function of x, or of the gate if it is gated: its name in `tempo_kernels.activation.ACTIVATIONS`."""

    is_gated: bool = False
    """Whether the first linear gives gate and up, whose product formula(gate) * up is the output."""

    has_inplace: bool = False
    """Whether the derivative can be computed from the output; a gated one's is a product of two unknowns."""

    help: str = ""
    """The help of the option `--NAME`, if Megatron-LM has such an option; empty for activations that only a JSON names.
    --geglu is not Megatron-LM's --quick-geglu, whose x * sigmoid(1.702 x) is not GELU."""

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
        Activation(name="mish", formula="mish"),
    )
}

GATED = tuple(name for name, activation in ACTIVATIONS.items() if activation.is_gated)


def find_inplace_refusal(name: str) -> str | None:
    """Why an activation cannot be in place; None if it can."""
    if ACTIVATIONS[name].has_inplace:
        return None
    can = [each.replace("_", " ") for each, activation in ACTIVATIONS.items() if activation.has_inplace]
    return f"activation is {name}, and in place exists for {' and '.join(can)} only"

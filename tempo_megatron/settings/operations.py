"""One table of the operations that Tempo replaces: their switches, their slots, and their rows in the ledger.

TempoConfig, the arguments, the specs, the ledger, `doctor`, a run's banner and docs/settings.md all read it. A new
operation needs a row of OPERATIONS, a field of TempoConfig, and for each value a row of CLASSES in
tempo_megatron/slots/block_slots.py. The ledger shows what it keeps in the rows that name it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation: its switch, its slots, what computes it, and what is kept."""

    name: str
    """Field of TempoConfig, key of the "tempo" block, and with dashes `--tempo-NAME`."""

    what: str
    """The part of a model that it is."""

    keeps: Mapping[str, str]
    """The switch's values besides "auto" and "off" (stock Megatron), and what is kept for backward with each."""

    preference: tuple[str, ...] = ("off",)
    """What "auto" tries, in this order: in place where that exists, else recompute, else stock."""

    functions: tuple[str, ...]
    """The operations of tempo_kernels that compute it, by their full names."""

    kernels: tuple[str, ...] = ()
    """Their Triton kernels, by files of kernels/tempo_kernels."""

    slots: tuple[str, ...] = ()
    """Attributes of a layer's submodules that hold the operation; a dot leads into the submodules of a slot."""

    block_slots: tuple[str, ...] = ()
    """Attributes of a block's submodules that hold it."""

    title: str = ""
    """Its name in `doctor`'s output, if that differs."""

    has_banner_line: bool = False
    """Whether a run's banner has a line that says by which code the operation runs."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The switch's values; "auto" is the first of `preference` that nothing refuses."""
        return ("auto", "off", *self.keeps)

    @property
    def argument(self) -> str:
        """`--tempo-NAME`."""
        return f"--tempo-{self.name.replace('_', '-')}"

    @property
    def help(self) -> str:
        """What `--help` says about the switch."""
        values = "; with ".join(f"{value}: {kept}" for value, kept in self.keeps.items())
        return f"{self.what}. Kept for backward with {values}{'; auto is off' if self.is_opt_in else ''}"

    @property
    def is_opt_in(self) -> bool:
        """Whether "auto" always means stock (opt-in). Banners and reports then mention the operation only if somebody
        set it."""
        return self.preference == ("off",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """One row of the ledger: the tensors that a module saves first, in a model with one layer in each stack."""

    title: str
    module: str
    """Qualified name in the model. A module without a row counts for the nearest module around it that has one."""

    operation: str | None = None
    """The switch that decides what is kept here, if one does."""

    stack: str = ""
    """encoder or decoder; empty for what a model has once."""

    is_scores: bool = False
    """Whether the row holds the module's tensors of [..., s, s] only."""

    is_in_layer: bool = True
    """Whether each layer has it; else the model has it once."""

    moves_with: str | None = None
    """The module in the layer by whose name `offload` moves it; None for its own."""


_RECOMPUTE = "tempo_kernels.recompute.drop"

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            name="activation",
            what="the MLP's activation",
            keeps={
                "inplace": "its output, which the next linear keeps anyway, and for gelu one bit per element",
                "recompute": "its input; the output is made again (gated activations too)",
            },
            preference=("inplace", "recompute", "off"),
            functions=("tempo_kernels.activation.activate", _RECOMPUTE),
            kernels=("activation/kernel.py", "activation/kernel_activations.py"),
            slots=("mlp",),
        ),
        Operation(
            name="norm",
            what="LayerNorm and RMSNorm",
            keeps={
                "inplace": "the output, which the next linear keeps anyway, and rstd",
                "recompute": "the input; the output is made again, exactly",
            },
            preference=("inplace", "recompute", "off"),
            functions=("tempo_kernels.norm.layer_norm", "tempo_kernels.norm.rms_norm", _RECOMPUTE),
            kernels=("norm/kernel.py", "norm/kernel_forward.py", "norm/kernel_backward.py"),
            slots=("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm", "norm"),
            block_slots=("layer_norm",),
        ),
        Operation(
            name="dropout",
            what="hidden and embedding dropout",
            keeps={"recompute": "nothing; masks are drawn again"},
            preference=("recompute", "off"),
            functions=("tempo_kernels.dropout_add.bias_dropout_add",),
            kernels=("dropout_add/kernel.py", "philox/kernel.py"),
            slots=("self_attn_bda", "cross_attn_bda", "mlp_bda", "mamba_bda"),
        ),
        Operation(
            name="attention",
            what="attention",
            keeps={
                "flash": "q, k, v, the output and logsumexp, no s*s tensor and no mask",
                "softmax": "one s*s tensor, the softmax's output (the paper's form)",
                "recompute": "q, k and v; flash runs again",
            },
            preference=("flash", "off"),
            functions=("tempo_kernels.attention.attention",),
            kernels=("attention/kernel.py", "attention/kernel_forward.py", "attention/kernel_backward.py"),
            slots=("self_attention.core_attention", "cross_attention.core_attention"),
            has_banner_line=True,
        ),
        Operation(
            name="linear_fc1",
            what="the MLP's first linear, with the activation",
            keeps={
                "recompute": "its input; the linear runs again (a third of a GPT layer's products)",
                "tile": "its input; both linears run again (two thirds), a tile of tokens at a time",
            },
            functions=(_RECOMPUTE, "tempo_kernels.recompute.recompute_in_tiles"),
            slots=("mlp",),
        ),
        Operation(
            name="linear_qkv",
            what="self attention's projection",
            keeps={"recompute": "its input; q, k and v are computed again (a quarter of a GPT layer's products)"},
            functions=(_RECOMPUTE,),
            slots=("self_attention",),
        ),
        Operation(
            name="moe_permute",
            what="a mixture of experts",
            keeps={
                "recompute": "its tokens; a copy for each expert is gathered again (if all experts are on this rank)",
                "repeat": "not the tokens that its ranks were sent; another all-to-all sends them again",
            },
            functions=(_RECOMPUTE,),
            slots=("mlp",),
        ),
        Operation(
            name="loss",
            what="the loss head",
            keeps={"fused": "hidden states; logits exist for one chunk of tokens at a time"},
            preference=("fused", "off"),
            functions=("tempo_kernels.linear_cross_entropy.linear_cross_entropy",),
            kernels=("linear_cross_entropy/kernel.py",),
            title="loss head",
        ),
    )
}

CHOICES = {name: operation.choices for name, operation in OPERATIONS.items()}


def check_value(where: str, name: Any, value: object, known: tuple[str, ...]) -> None:
    """Raise ValueError where `name`, an operation's in the block `where`, is not `known`, or has no such `value`."""
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
        raise ValueError(f"{where}{name} is unknown; the nearest known name is {where}{near}")
    if name in CHOICES and value not in CHOICES[name]:
        choices = ", ".join(map(repr, CHOICES[name]))
        raise ValueError(f"{where}{name} is {value!r}; it must be one of {choices}")


STACKS = ("encoder", "decoder")
STACKS_OF_FAMILIES = {"gpt": ("decoder",), "bert": ("encoder",), "t5": STACKS}
ACTIVATION = "activation"
"""Ends the titles in LEDGER_ROWS that end in the name of the activation that was measured: gelu, swiglu, ..."""
MASK = "attention mask"
"""Takes the place of a module in the row of masks, which a model makes once, outside of its modules."""
LAYER = "layer"
"""Names, among OFFLOAD_ROWS, what a layer keeps outside of its modules, such as the masks of stock dropout."""
DISPATCHER = "token_dispatcher"
"""The attribute of a mixture of experts that brings tokens to its experts, and back."""
INPUT = "input"
"""Names, among OFFLOAD_ROWS, the input of a layer that is recomputed as a whole."""


def _list_rows_of_stack(stack: str) -> tuple[LedgerRow, ...]:
    """In the order of the table."""
    layer = f"{stack}.layers.0"

    def row(title: str, module: str, operation: str | None = None, **kinds: Any) -> LedgerRow:
        return LedgerRow(title=title, module=f"{layer}.{module}", operation=operation, stack=stack, **kinds)

    def list_attention(name: str, *projections: str) -> tuple[LedgerRow, ...]:
        prefix = "cross " if name == "cross_attention" else ""
        return (
            *(row(prefix + projection, f"{name}.{projection}") for projection in projections),
            row(f"{prefix}q_layernorm", f"{name}.q_layernorm", "norm"),
            row(f"{prefix}k_layernorm", f"{name}.k_layernorm", "norm"),
            # Of latent attention, whose q_layernorm is of a latent vector too.
            row(f"{prefix}kv_layernorm", f"{name}.kv_layernorm", "norm"),
            row(f"{name} (q, k, v)", name, "linear_qkv" if name == "self_attention" else None),
            row(f"{prefix}core_attention", f"{name}.core_attention", "attention"),
            row(f"{prefix}core_attention (s*s)", f"{name}.core_attention", "attention", is_scores=True),
            row(f"{prefix}linear_proj", f"{name}.linear_proj"),
        )

    # Of latent attention.
    projections = (
        *("linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj"),
        *("linear_q_up_proj", "linear_kv_up_proj"),
    )
    latent = tuple(row(name, f"self_attention.{name}", moves_with="self_attention") for name in projections)
    # Of a mixture of experts; its dispatcher is not a module, but named like one.
    mixture = tuple(
        row(title, f"mlp.{module}", operation, moves_with="mlp")
        for title, module, operation in (
            ("router", "router", None),
            ("dispatcher", DISPATCHER, "moe_permute"),
            ("experts' linear_fc1", "experts.linear_fc1", "moe_permute"),
            (f"experts' {ACTIVATION}", "experts", "activation"),
            ("experts' linear_fc2", "experts.linear_fc2", "activation"),
            ("shared experts' linear_fc1", "shared_experts.linear_fc1", None),
            (f"shared experts' {ACTIVATION}", "shared_experts", "activation"),
            ("shared experts' linear_fc2", "shared_experts.linear_fc2", "activation"),
        )
    )
    return (
        LedgerRow(title="checkpoint (layer input)", module=stack, stack=stack),
        row("input_layernorm", "input_layernorm", "norm"),
        *latent,
        *list_attention("self_attention", "linear_qkv"),
        row("self_attn_bda", "self_attn_bda", "dropout"),
        row("pre_cross_attn_layernorm", "pre_cross_attn_layernorm", "norm"),
        *list_attention("cross_attention", "linear_q", "linear_kv"),
        row("cross_attn_bda", "cross_attn_bda", "dropout"),
        row("pre_mlp_layernorm", "pre_mlp_layernorm", "norm"),
        row("linear_fc1", "mlp.linear_fc1"),
        # The activation is not a module: it runs in the MLP's own forward, between its linears.
        row(ACTIVATION, "mlp", "activation"),
        row("linear_fc2", "mlp.linear_fc2", "linear_fc1"),
        *mixture,
        row("mlp_bda", "mlp_bda", "dropout"),
        LedgerRow(title="transformer layer", module=layer, stack=stack),
        LedgerRow(
            title="final_layernorm",
            module=f"{stack}.final_layernorm",
            operation="norm",
            stack=stack,
            is_in_layer=False,
        ),
    )


LEDGER_ROWS = (
    *(row for stack in STACKS for row in _list_rows_of_stack(stack)),
    LedgerRow(title="embedding", module="embedding", operation="dropout", is_in_layer=False),
    LedgerRow(title="rotary positions", module="rotary_pos_emb", is_in_layer=False),
    LedgerRow(title=MASK, module=MASK, is_in_layer=False),
    LedgerRow(title="multi-token prediction", module="mtp", is_in_layer=False),
    LedgerRow(title="lm_head", module="lm_head", is_in_layer=False),
    LedgerRow(title="pooler", module="pooler", is_in_layer=False),
    LedgerRow(title="binary_head", module="binary_head", is_in_layer=False),
    LedgerRow(title="output_layer", module="output_layer", operation="loss", is_in_layer=False),
    LedgerRow(title="loss", module="", operation="loss", is_in_layer=False),
)


def find_offload_row(row: LedgerRow) -> str | None:
    """The name by which `offload` moves a row of the ledger; None for a row of what no layer keeps.

    It is the module's name in the layer: `input_layernorm`, `self_attention.core_attention`, `mlp`.
    """
    stack, _, rest = row.module.partition(".layers.0")
    if row.module == row.stack:
        return INPUT
    if not row.is_in_layer or stack != row.stack:
        return None
    if row.moves_with is not None:
        return row.moves_with
    # Additions with dropout are functions of the layer's, not modules.
    return LAYER if row.operation == "dropout" else rest.removeprefix(".") or LAYER


OFFLOAD_ROWS = tuple(
    dict.fromkeys(name for row in LEDGER_ROWS if row.moves_with is None and (name := find_offload_row(row)) is not None)
)
"""What `offload` can move of a layer, in the order of the ledger."""


def is_moved(row: str, offload: str) -> bool:
    """Whether a layer with this value of `offload` moves one of OFFLOAD_ROWS."""
    return offload == "all" or row in offload.split("+")


def keeps_copies(*, is_megatrons: bool, is_grouped: bool) -> bool:
    """Whether stock core attention may keep copies of q, k and v. Megatron's own does if keys and values are grouped,
    because it repeats them; nothing is known about other classes."""
    return is_grouped or not is_megatrons


def check_offload(where: str, value: object) -> None:
    """Raise ValueError where `value` is not "off", "all" or some of OFFLOAD_ROWS joined by "+"."""
    expected = '"off", "all", or names of rows joined by "+", such as "input_layernorm+mlp.linear_fc2"'
    if not isinstance(value, str):
        raise ValueError(f"{where}offload is {value!r}; expected {expected}")
    if value in ("off", "all"):
        return
    names = value.split("+")
    for name in names:
        if name not in OFFLOAD_ROWS:
            near = difflib.get_close_matches(name, ("off", "all", *OFFLOAD_ROWS), n=1, cutoff=0.0)[0]
            raise ValueError(f'{where}offload has {name!r}; expected {expected}; the nearest known name is "{near}"')
    if len(set(names)) < len(names):
        raise ValueError(f"{where}offload is {value!r}, which names a row twice; leave one out")

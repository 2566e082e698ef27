"""Replaces the modules of a model, and chooses for each what it becomes, or why it stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from tempo_kernels.activation import ACTIVATIONS
from tempo_torch.activation import FUNCTIONS, IN_PLACE, ReplacedActivation, is_activation, name_function
from tempo_torch.attention import PLACE, AttentionPlace, is_apart, name_implementation, use_attention
from tempo_torch.attention_modules import AlibiAttention, MultiheadAttention, get_alibi
from tempo_torch.dropout import RedrawnDropout
from tempo_torch.experts import RecomputesExperts, get_experts_refusal, is_experts
from tempo_torch.functional import RedirectsFunctions, list_functions, redirect
from tempo_torch.linear import DropsInput, is_linear
from tempo_torch.loss import FusedLoss, is_language_model, use_fused_loss
from tempo_torch.mlp import TiledMLP, get_mlp_refusal, is_mlp
from tempo_torch.norm import Norm, choose_keep, recognise_norm
from tempo_torch.position import Passes
from tempo_torch.replace import Replaced, change_class
from tempo_torch.report import Entry

_OTHER_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Becomes(NamedTuple):
    """What a module becomes: `mixin` with these attributes, and what its entry in the report says."""

    mixin: type[Replaced]
    attributes: dict[str, Any]
    now: str
    stock_bytes: float = 0.0
    tempo_bytes: float = 0.0
    operation: str = ""
    """The argument of tempoize, where the table names another."""


def replace_modules(model: nn.Module, choices: dict[str, str], passes: Passes) -> Iterator[Entry]:
    """Replaces the modules of a model that are stock, and yields an entry for each that it knows."""
    for name, module in list(model.named_modules()):
        if is_linear(module):
            change_class(module, DropsInput)
        if isinstance(module, Replaced):
            continue
        kind = type(module).__name__
        for operation, choose in _OPERATIONS:
            if choices.get(operation) == "off" or (found := choose(name, module, choices, passes)) is None:
                continue
            if isinstance(found, str):
                yield Entry(name, kind, operation, None, found)
            else:
                change_class(module, found.mixin, **found.attributes)
                sizes = found.stock_bytes, found.tempo_bytes
                yield Entry(name, kind, found.operation or operation, found.now, "", *sizes)
            break


def replace_attention(
    model: nn.Module, choices: dict[str, str], passes: Passes, head_ranks: tuple[int, int], known: Sequence[Entry]
) -> Iterator[Entry]:
    """Gives all attention that asks transformers' registry Tempo's, and yields its one entry, if not among `known`."""
    modules = dict(model.named_modules())
    has_own = any(map(is_apart, modules.values())) and not hasattr(model, "set_attn_implementation")
    if has_own or any(isinstance(module, AlibiAttention) for module in modules.values()):
        return
    if any(entry.operation == "attention" and not is_apart(modules.get(entry.name)) for entry in known):
        return
    why = use_attention(model)
    for name, module in modules.items() if why is None else ():
        if "Attention" in type(module).__name__ and not is_apart(module):
            place = _make_place(f"{name}.attention", choices, passes)
            place.head_ranks, place.implementation = head_ranks, name_implementation(module)
            module.__dict__[PLACE] = place
    yield Entry("", type(model).__name__, "attention", "flash" if why is None else None, why or "")


def replace_losses(model: nn.Module) -> Iterator[Entry]:
    """Gives the language models of transformers in `model` the fused loss."""
    models = [(name, module) for name, module in model.named_modules() if is_language_model(module)]
    for name, module in models:
        kind, is_new = type(module).__name__, not isinstance(module, FusedLoss)
        why = use_fused_loss(module)
        if is_new:
            yield Entry(name, kind, "loss", "fused" if why is None else None, why or "")
    if not models:
        yield Entry("", type(model).__name__, "loss", None, "it is no language model of transformers")


def _make_place(name: str, choices: dict[str, str], passes: Passes) -> AttentionPlace:
    return AttentionPlace(passes.add_place(name), choices["attention"] == "flash")


def _choose_norm(name: str, module: nn.Module, choices: dict[str, str], _: Passes) -> Becomes | str | None:
    found = recognise_norm(module)
    if not isinstance(found, dict):
        return found
    value = compiled = choices["norm"]
    if value == "auto":
        value, compiled = choose_keep(module, found["zero_centered"] is True), "recompute"
    return Becomes(Norm, {**found, "keep": value, "compiled_keep": compiled}, value, 2.0)


def _choose_activation(name: str, module: nn.Module, choices: dict[str, str], _: Passes) -> Becomes | str | None:
    if not is_activation(module):
        return None
    function = None if getattr(module, "inplace", False) else name_function(partial(type(module).forward, module))
    if function is None:
        return f"Tempo has {', '.join(sorted(FUNCTIONS))} only"
    attributes = {"function": function, "keep": "recompute"}
    if choices["activation"] != "inplace":
        return Becomes(ReplacedActivation, attributes, "recompute", 4.0, 2.0)
    if function not in IN_PLACE:
        return f"in place exists for {', '.join(IN_PLACE)} only"
    bits = 0.0 if ACTIVATIONS[function].x_min is None else 0.125
    return Becomes(ReplacedActivation, {**attributes, "keep": "inplace"}, "inplace", 2.0, bits)


def _choose_experts(name: str, module: nn.Module, choices: dict[str, str], _: Passes) -> Becomes | str | None:
    if not is_experts(module):
        return None
    if (why := get_experts_refusal(module)) is not None:
        return why
    if choices["activation"] == "inplace":
        return "a gated activation cannot be computed from its output"
    return Becomes(RecomputesExperts, {}, "recompute", 1.0)


def _choose_dropout(name: str, module: nn.Module, _: dict[str, str], passes: Passes) -> Becomes | str | None:
    if isinstance(module, _OTHER_DROPOUTS):
        return "it drops channels, or changes more than it drops"
    if not isinstance(module, nn.Dropout):
        return None
    if type(module) is not nn.Dropout or module.inplace:
        return "it writes in place, or its class derives from nn.Dropout"
    # peft's dropout: other adapters of the same input, and without dropout this one, keep its input anyway.
    is_lora = ".lora_dropout." in f".{name}"
    attributes = {"place": passes.add_place(name), "keeps_input": is_lora}
    return Becomes(RedrawnDropout, attributes, "recompute", 3.0 if is_lora else 1.0)


def _choose_multihead(name: str, module: nn.Module, choices: dict[str, str], passes: Passes) -> Becomes | None:
    if type(module) is not nn.MultiheadAttention or not module.dropout:
        return None  # without dropout stock keeps what ours keeps and draws nothing
    return Becomes(MultiheadAttention, {PLACE: _make_place(name, choices, passes)}, "flash")


def _choose_alibi(name: str, module: nn.Module, choices: dict[str, str], passes: Passes) -> Becomes | None:
    if (found := get_alibi(module)) is None:
        return None
    mixin, slopes = found
    attributes = {"slopes": slopes, PLACE: _make_place(f"{name}.attention", choices, passes)}
    return Becomes(mixin, attributes | _redirect_functions(name, module, choices, passes), "flash")


def _choose_functions(name: str, module: nn.Module, choices: dict[str, str], passes: Passes) -> Becomes | None:
    if all(choices[operation] == "off" for operation in list_functions(type(module))):
        return None
    attributes = _redirect_functions(name, module, choices, passes)
    operation = attributes["redirected"][0]
    if operation == "attention":
        attributes[PLACE] = _make_place(f"{name}.attention", choices, passes)
        return Becomes(RedirectsFunctions, attributes, "flash", operation=operation)
    sizes = (1.0, 0.0) if operation == "dropout" else (4.0, 2.0)
    return Becomes(RedirectsFunctions, attributes, "recompute", *sizes, operation)


def _redirect_functions(name: str, module: nn.Module, choices: dict[str, str], passes: Passes) -> dict[str, Any]:
    redirect(type(module))  # made here, so that a compiler need not make it
    redirected = tuple(operation for operation in list_functions(type(module)) if choices[operation] != "off")
    return {"redirected": redirected, "function_place": passes.add_place(f"{name}.functional")}


def _choose_mlp(name: str, module: nn.Module, choices: dict[str, str], _: Passes) -> Becomes | str | None:
    if not is_mlp(module):
        return None
    # ZeRO 3 gathers the weights of a leaf once for all tiles (deepspeed/utils/z3_leaf_module.py).
    return get_mlp_refusal(module) or Becomes(TiledMLP, {"_z3_leaf": True}, "tile")


_OPERATIONS: tuple[tuple[str, Callable[..., Becomes | str | None]], ...] = (
    ("mlp", _choose_mlp),
    ("norm", _choose_norm),
    ("activation", _choose_experts),
    ("activation", _choose_activation),
    ("dropout", _choose_dropout),
    ("attention", _choose_multihead),
    ("attention", _choose_alibi),
    ("", _choose_functions),
)
"""The argument of tempoize that decides, and what it makes of a module; the first that knows the module counts."""

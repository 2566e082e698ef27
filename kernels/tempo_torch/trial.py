"""Finds out by a trial on a few tokens whether an attention module computes in tiles what it computes as a whole.

What a module does before attention and behind it is its author's: gates, norms, scales by position, keys of another
layer. So a copy with random float32 weights is called both ways, and its results and all gradients are compared.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tempo_torch.attention import PLACE
from tempo_torch.compare import Comparison, Unit, describe_error
from tempo_torch.mlp import find_dropout
from tempo_torch.probe import copy_bare, keep_random_states
from tempo_torch.replace import Replaced

DIRECT, THROUGH_STOCK = "direct", "through stock"
"""How attention's result goes on: to o_proj, or through the stock forward."""
NORM = "tempo_norm"
"""The keyword by which a call that runs in tiles is told the norm, or None, that makes what it projects."""
_SAMPLES, _TOKENS, _ROWS = 2, 7, 4

_found: dict[Any, str] = {}
"""Results by what a module is, since layers are alike."""


def list_leaves(hidden: Tensor, call: dict[str, Any]) -> tuple[list[Any], Any, list[int]]:
    """Returns the leaves and the structure of a call's arguments but hidden [b, s, h], and the places of tensors
    [1 or b, s, ...], which have a row for each token, as cosines and sines have."""
    leaves, structure = pytree.tree_flatten(call, lambda e: e is not call and not isinstance(e, tuple | list))
    batch, length = hidden.shape[:2]
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.size(0) in (1, batch) and leaf.size(1) == length
    ]
    return leaves, structure, places


def get_form(hidden: Tensor, call: dict[str, Any]) -> Any:
    """Returns the form of a call, which decides whether it needs another trial."""
    leaves, structure, places = list_leaves(hidden, call)
    kinds = ("Tensor" if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves)
    return str(structure), tuple(f"{kind} {place in places}" for place, kind in enumerate(kinds))


def get_way(module: Any, hidden: Tensor, call: dict[str, Any]) -> str:
    """Returns how a module of TiledProjections can run in tiles, or why it cannot.

    Args:
        hidden, call: the arguments of a call but its mask; of tensors the shapes and dtypes matter only.
    """
    if (why := find_dropout(module)) is not None:
        return why
    key = module.stock_class, _describe_module(module), get_form(hidden, call)
    if key not in _found:
        try:
            with _undisturbed():
                _found[key] = _try(module, hidden, call)
        except Exception as error:  # a foreign module may raise anything
            _found[key] = _shorten(f"it fails on a few tokens: {describe_error(error)}")
    return _found[key]


def _describe_module(module: nn.Module) -> str:
    """All that tells modules of one class apart, but for the values of tensors."""
    parts = [f"{name} {list(getattr(p, 'ds_shape', p.shape))}" for name, p in module.named_parameters()]
    for name, each in module.named_modules():
        plain = {k: v for k, v in each.__dict__.items() if isinstance(v, int | float | str | None)}
        parts.append(f"{name} {type(each)} {sorted(plain.items() - {('layer_idx', plain.get('layer_idx'))})}")
    return "\n".join(parts)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Runs a trial apart from what the forward around it may do: autocast, a checkpoint, modes that watch."""
    with (
        _disable_current_modes(),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        keep_random_states(),
        saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        yield


class _Refuses(TorchFunctionMode):
    """Raises ValueError where a module calls arange, by which it numbers tokens, in a tile from 0, or drops, which a
    trial in evaluation would pass over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange:
            raise ValueError("numbers its tokens by itself, which it would do in each tile")
        if func is nn.functional.dropout and kwargs.get("p", args[1] if len(args) > 1 else 0.5):
            raise ValueError("has a dropout behind or in front of attention, and tiles draw no masks")
        return func(*args, **kwargs)


def _try(module: Any, hidden: Tensor, call: dict[str, Any]) -> str:
    generator = torch.Generator("cpu").manual_seed(1)
    twin = _copy(module, generator)
    hidden_states = torch.randn(_SAMPLES, _TOKENS, hidden.size(-1), generator=generator)
    leaves, structure, places = list_leaves(hidden, call)
    batch = hidden.size(0)
    made = [_make(leaf, batch if place in places else None, generator) for place, leaf in enumerate(leaves)]
    alone = _Alone(twin, hidden_states, lambda: pytree.tree_unflatten(list(map(_empty, made)), structure))
    given = alone.make_call()
    with _Refuses():
        module.stock_class.forward(twin, hidden_states, **given, attention_mask=None)
    if any(isinstance(leaf, MutableMapping) and leaf for leaf in list_leaves(hidden, given)[0]):
        raise ValueError("shares keys and values with other layers")
    # A padded sample, causal.
    hides = torch.ones(_SAMPLES, 1, _TOKENS, _TOKENS, dtype=torch.bool).tril_()
    hides[1, :, :, -2:] = False
    place = module.__dict__[PLACE]
    twin.__dict__[PLACE] = dataclasses.replace(place, is_required=False, is_always_ours=True)
    unit = Unit("qkv", module.stock_class.__name__, (twin,))
    comparisons = [Comparison(alone, place.place.passes, [unit], ((), {"attention_mask": m})) for m in (None, hides)]
    why = ""
    for way in (DIRECT, THROUGH_STOCK):
        twin.__dict__["_get_way"] = lambda *_, way=way: way
        found = next(filter(None, (each.differs([unit]) for each in comparisons)), None)
        if found is None:
            return way
        why = _shorten(found)
    return why


def _shorten(why: str) -> str:
    """Returns a sentence about "it" without the subject; of Tempo's own exceptions it keeps what they say only."""
    return re.sub("^it (fails [a-z ]+: (ValueError|Caught): )?", "", why)


class _Alone(nn.Module):
    """A model of one attention module. Its input is a parameter, whose gradient is compared with the others."""

    def __init__(self, attention: nn.Module, hidden_states: Tensor, make_call: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.hidden_states, self.attention, self.make_call = nn.Parameter(hidden_states), attention, make_call

    def forward(self, attention_mask: Tensor | None) -> Any:
        more = {NORM: None} if isinstance(self.attention, Replaced) else {}
        # Not through __call__, which would look for the norm in front.
        return self.attention.forward(self.hidden_states, **self.make_call(), attention_mask=attention_mask, **more)


def _empty(leaf: Any) -> Any:
    """Returns an argument of a call as it is before the call: layers that share keys and values fill a mapping."""
    return type(leaf)() if isinstance(leaf, MutableMapping) else leaf


def _copy(module: Any, generator: torch.Generator) -> Any:
    """Returns a copy on the CPU without hooks and places, with random weights in float32."""
    bare = copy.copy(module)
    memo: dict[int, Any] = {}
    bare.__dict__.update({PLACE: None, "tempo_norms": [], "tempo_ways": {}})
    for parameter in module.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if parameter.is_floating_point():
            vector = torch.rand(shape, generator=generator, dtype=torch.float32) + 0.5
            data = vector if len(shape) < 2 else (vector - 1.0).mul_(6.0 * shape[-1] ** -0.5)
            memo[id(parameter)] = nn.Parameter(data)
    for buffer in module.buffers():
        memo[id(buffer)] = _make(buffer, None, generator) if buffer.is_meta else buffer.detach().to("cpu").clone()
    memo |= {id(e): e for each in module.modules() for e in [each.__dict__.get("config")] if e is not None}
    (twin,) = copy_bare(bare, memo)
    twin.eval().tempo_rows = _ROWS
    return twin


def _make(leaf: Any, batch: int | None, generator: torch.Generator) -> Any:
    """Returns what a trial gives in a leaf's place; with `batch`, the call's number of samples, for a few tokens."""
    if not isinstance(leaf, Tensor):
        return leaf
    samples = _SAMPLES if leaf.dim() and leaf.size(0) == batch else 1
    shape = leaf.shape if batch is None else (samples, _TOKENS, *leaf.shape[2:])
    if leaf.is_complex():
        return torch.randn(shape, generator=generator, dtype=torch.complex64)
    if leaf.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float32)
    numbers = torch.arange(shape[1] if len(shape) > 1 else 1)
    return numbers.view(-1, *[1] * (len(shape) - 2)).expand(shape).to(leaf.dtype)

"""Computes norm, projections and rotary embeddings in front of attention a tile of tokens at a time."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tempo_kernels.recompute import attend_to_tiles
from tempo_torch.attention import Caught, attend, catching
from tempo_torch.mlp import check_gathered
from tempo_torch.norm import MADE, LayerNorm, RMSNorm
from tempo_torch.replace import Replaced
from tempo_torch.trial import DIRECT, NORM, THROUGH_STOCK, get_form, get_way, list_leaves

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_CACHES = ("cache", "past_key_values", "past_key_value")


class TiledProjections(Replaced):
    """An attention module of transformers that keeps the input of the norm in front of it, and attention's output with
    its logsumexp. q, k and v are made again for attention's backward, and are gone after it. What makes them runs for a
    tile of as many tokens as the hidden size, in forward and in backward. `attend_to_tiles` says how exact that is.

    The stock forward is run for a tile until it asks for attention. Where it goes from attention straight to o_proj,
    that is all. Where it has gates or norms between, it runs once more as a whole and is given attention's result: it
    then keeps what these keep, and makes q, k and v once more in forward. A trial on a few tokens (`get_way`) tells
    which, or that the module cannot run in tiles.
    """

    tempo_norms: list[nn.Module]
    """Those norms of the layer that may be in front of this module."""
    tempo_ways: dict[Any, str]
    """What the trial found, by the form of the call."""
    tempo_rows: int | None = None
    """Rows of a tile; None for as many as the hidden size."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the stock module returns. Its positional argument is hidden_states, or the norm's input instead:
        ZeRO 3 takes the gradients of weights when the positional arguments have theirs, and at once without any.

        Raises ValueError in training with a cache of keys and values, or for a call whose trial failed.
        """
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return self._call_in_tiles(*args, **kwargs)

    # A compiler would look through the tiles and keep what they make.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _call_in_tiles(self, *args: Any, **kwargs: Any) -> Any:
        call_stock: Any = super().__call__  # type: ignore[misc]
        y, call = self._bind(args, kwargs)
        norm, x = self._take_made(y)
        why = self.find_refusal(*args, **kwargs)
        if any(call.get(name) is not None for name in _CACHES):
            why = "fills a cache of keys and values; set model.config.use_cache = False"
        if why and self.training:
            raise ValueError(f'qkv is "tile", but {self.stock_class.__name__} {why}')
        if why:
            return call_stock(y, **call)
        for parameter in [] if norm is None else norm.parameters():
            if hasattr(parameter, "ds_id"):
                # ZeRO 3 gathers the norm's weights for the norm; this module uses them too.
                sys.modules["deepspeed"].zero.register_external_parameter(self, parameter)
        return call_stock(x, **call, **{NORM: norm})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the stock module returns; with NORM for what this norm makes of x [b, s, h]."""
        stock = self.stock_class
        if NORM not in kwargs:
            return stock.forward(self, *args, **kwargs)
        norm = kwargs.pop(NORM)
        x, call = self._bind(args, kwargs)
        check_gathered(self, *([] if norm is None else [norm]))
        way, (batch, length) = self._get_way(x, call), x.shape[:2]
        # What attend_to holds is there until backward: not y, which the norm makes again.
        mask = call.pop("attention_mask", None)
        leaves, structure, places = list_leaves(x, call)
        asked: dict[str, Any] = {}

        def normalise(x: Tensor) -> Tensor:
            return x if norm is None else norm.normalise(x)

        def project(tile: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
            own = list(leaves)
            for place, row in zip(places, rows, strict=True):
                own[place] = row[None]
            try:
                with catching():
                    more = pytree.tree_unflatten(own, structure)
                    stock.forward(self, normalise(tile)[None], attention_mask=None, **more)
            except Caught as caught:
                if caught.mask is not None:
                    raise ValueError("makes a mask from what it projects") from None
                # As the module says it, but of what it was given the whole.
                asked.update({name: call.get(name, value) for name, value in caught.given.items()})
                return tuple(part[0].transpose(0, 1) for part in caught.parts)
            raise ValueError("asks transformers' registry for no attention")

        def attend_to(*parts: Tensor) -> Tensor:
            q, k, v = (part.unflatten(0, (batch, length)).transpose(1, 2) for part in parts)
            return attend(self, q, k, v, mask, **asked)[0]  # type: ignore[arg-type]

        parameters = [p for name, p in self.named_parameters() if not name.startswith("o_proj.")]
        parameters += [] if norm is None else list(norm.parameters())
        rows = (leaves[place].expand(batch, *leaves[place].shape[1:]).flatten(0, 1) for place in places)
        num_rows = self.tempo_rows or x.size(-1)
        out = attend_to_tiles(project, attend_to, x.flatten(0, 1), *rows, parameters=parameters, num_rows=num_rows)
        if way == DIRECT:
            return self.o_proj(out.flatten(2)), None
        with catching(out):
            return stock.forward(self, normalise(x), attention_mask=mask, **call)

    def find_refusal(self, *args: Any, **kwargs: Any) -> str | None:
        """Returns why such a call cannot run in tiles; None where it can. The first call of each form is tried."""
        way = self._get_way(*self._bind(args, kwargs))
        return None if way in (DIRECT, THROUGH_STOCK) else way

    def _get_way(self, hidden: Tensor, call: dict[str, Any]) -> str:
        call = {name: value for name, value in call.items() if name not in ("attention_mask", *_CACHES)}
        form = get_form(hidden, call)
        if form not in self.tempo_ways:
            self.tempo_ways[form] = get_way(self, hidden, call)
        return self.tempo_ways[form]

    def _bind(self, args: Any, kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Returns (hidden_states, the other arguments of a call by name)."""
        signature = inspect.signature(self.stock_class.forward)
        call = signature.bind(self, *args, **kwargs).arguments
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                call |= call.pop(parameter.name, {})
        del call["self"]
        return call.pop("hidden_states"), call

    def follow_norms(self, norms: Iterable[nn.Module]) -> None:
        """Asks Tempo's norms among `norms`, which the layer has, to tell what they normalise."""
        self.tempo_norms = [norm for norm in norms if isinstance(norm, LayerNorm | RMSNorm)]
        for norm in self.tempo_norms:
            if MADE not in norm.__dict__:
                norm.__dict__[MADE] = None
                norm.__dict__["tempo_attributes"] += (MADE,)

    def leave_norms(self) -> None:
        """Lets them tell nothing any more."""
        for norm in self.tempo_norms:
            norm.__dict__.pop(MADE, None)

    def _take_made(self, y: Tensor) -> tuple[Any, Tensor]:
        """Returns (the norm that made y, or None, and what it made it from, or y)."""
        found: tuple[Any, Tensor] = None, y
        for norm in list(self.tempo_norms):
            made = norm.__dict__.get(MADE)
            if made is not None and made[1].cdata == y.untyped_storage()._cdata and made[0].shape == y.shape:
                found = norm, made[0]
                norm.__dict__[MADE] = None
            else:
                # One behind attention: it would hold its input until the next forward.
                norm.__dict__.pop(MADE, None)
                self.tempo_norms.remove(norm)
        return found


def is_projected_attention(module: nn.Module) -> bool:
    """Returns whether a module is attention of transformers with rotary embeddings and four projections, as Llama's."""
    names = inspect.signature(type(module).forward).parameters
    return {"hidden_states", "position_embeddings", "attention_mask"} <= names.keys() and all(
        isinstance(getattr(module, name, None), nn.Linear) for name in _PROJECTIONS
    )

"""Computes norm, projections and rotary embeddings in front of attention a tile of tokens at a time."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tempo_kernels.recompute import attend_to_tiles
from tempo_torch.attention import Caught, attend, catching
from tempo_torch.mlp import check_gathered, find_mlp_refusal
from tempo_torch.norm import MADE, LayerNorm, RMSNorm
from tempo_torch.replace import Replaced

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORM = "tempo_norm"
"""The keyword by which a call that runs in tiles is told the norm, or None, that makes what it projects."""
_CACHES = ("cache", "past_key_values", "past_key_value")


class TiledProjections(Replaced):
    """An attention module of transformers that keeps the input of the norm in front of it, and attention's output with
    its logsumexp. q, k and v are made again for attention's backward, and are gone after it. What makes them runs for a
    tile of as many tokens as the hidden size, in forward and in backward. `attend_to_tiles` says how exact that is."""

    tempo_norms: list[nn.Module]
    """Those norms of the layer that may be in front of this module."""
    o_proj: nn.Module
    training: bool
    config: Any
    attention_dropout: float

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the stock module returns. Its positional argument is hidden_states, or the norm's input in their place:
        ZeRO 3 takes the gradients of weights once those of positional arguments are there, or at once without any.

        Raises ValueError in training with a cache of keys and values, or with rotary embeddings of another form.
        """
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return self._call_in_tiles(*args, **kwargs)

    # A compiler would look through the tiles and keep what they make.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _call_in_tiles(self, *args: Any, **kwargs: Any) -> Any:
        call_stock: Any = super().__call__  # type: ignore[misc]
        call = inspect.signature(self.stock_class.forward).bind(self, *args, **kwargs).arguments
        y, more = call["hidden_states"], call.pop("kwargs", {})
        del call["self"], call["hidden_states"]
        norm, x = self._take_made(y)
        why = _find_refusal(y, {**call, **more})
        if why and self.training:
            raise ValueError(f'qkv is "tile", but {self.stock_class.__name__} {why}')
        if why:
            return call_stock(y, **call, **more)
        for parameter in [] if norm is None else norm.parameters():
            if hasattr(parameter, "ds_id"):
                # ZeRO 3 gathers the norm's weights for the norm; this module uses them too.
                sys.modules["deepspeed"].zero.register_external_parameter(self, parameter)
        return call_stock(x, **call, **more, **{_NORM: norm})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the stock module returns; with _NORM for what this norm makes of x [b, s, h]."""
        stock: Any = self.stock_class
        if _NORM not in kwargs:
            return stock.forward(self, *args, **kwargs)
        norm = kwargs.pop(_NORM)
        call = inspect.signature(stock.forward).bind(self, *args, **kwargs).arguments
        x: Tensor = call["hidden_states"]
        check_gathered(self, *([] if norm is None else [norm]))
        batch, length = x.shape[:2]
        # What attend_to holds is there until backward: not y, which the norm makes again.
        mask, others = call.get("attention_mask"), call.get("kwargs", {})

        def project(tile: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            normed = tile if norm is None else norm.normalise(tile)
            try:
                with catching():
                    stock.forward(self, normed[None], position_embeddings=(cos[None], sin[None]), attention_mask=None)
            except Caught as caught:
                return tuple(part[0].transpose(0, 1) for part in caught.parts)
            raise AssertionError("attention did not ask for it")

        def attend_to(*parts: Tensor) -> Tensor:
            q, k, v = (part.unflatten(0, (batch, length)).transpose(1, 2) for part in parts)
            more = {"dropout": self.attention_dropout if self.training else 0.0, "scaling": self.scaling}  # type: ignore[attr-defined]
            if (window := getattr(self, "sliding_window", None)) is not None:
                more["sliding_window"] = window
            out, _ = attend(self, q, k, v, mask, **more, **others)  # type: ignore[arg-type]
            return out

        parameters = [p for name in _PROJECTIONS[:3] for p in getattr(self, name).parameters()]
        parameters += [p for name, each in self.named_children() if name not in _PROJECTIONS for p in each.parameters()]  # type: ignore[attr-defined]
        parameters += [] if norm is None else list(norm.parameters())
        rows = (each.expand(batch, length, -1).flatten(0, 1) for each in call["position_embeddings"])
        out = attend_to_tiles(project, attend_to, x.flatten(0, 1), *rows, parameters=parameters, num_rows=x.size(-1))
        return self.o_proj(out.flatten(2)), None

    def follow_norms(self, norms: Iterable[nn.Module]) -> None:
        """Asks Tempo's norms among `norms`, those of the layer, to tell what they normalise."""
        self.tempo_norms = [norm for norm in norms if isinstance(norm, LayerNorm | RMSNorm)]
        for norm in self.tempo_norms:
            if MADE not in norm.__dict__:
                norm.__dict__[MADE] = None
                norm.__dict__["tempo_attributes"] += (MADE,)

    def _take_made(self, y: Tensor) -> tuple[Any, Tensor]:
        """(The norm that made y, or None, and what it made it from, or y)."""
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
    """Whether a module is attention of transformers with rotary embeddings, as Llama's: projections of its own to q, k
    and v, and one behind attention."""
    names = inspect.signature(type(module).forward).parameters
    return {"hidden_states", "position_embeddings", "attention_mask"} <= names.keys() and all(
        isinstance(getattr(module, name, None), nn.Linear) for name in _PROJECTIONS
    )


def find_projections_refusal(module: Any) -> str | None:
    """Why an attention module cannot make q, k and v in tiles; None where it can."""
    if not all(hasattr(module, name) for name in ("scaling", "attention_dropout")) or hasattr(module, "sinks"):
        return "its attention has sinks, or no scale of its own"
    others = [child for name, child in module.named_children() if name not in _PROJECTIONS]
    return next((why for each in others if (why := find_mlp_refusal(each)) and "orm" not in type(each).__name__), None)


def _find_refusal(y: Tensor, call: dict[str, Any]) -> str | None:
    """Why a call cannot run in tiles, with what to do; None where it can."""
    if any(call.get(name) is not None for name in _CACHES):
        return "fills a cache of keys and values; set model.config.use_cache = False"
    angles = call.get("position_embeddings")
    if isinstance(angles, tuple) and all(
        isinstance(each, Tensor) and each.dim() == 3 and each.size(1) == y.size(1) and not each.requires_grad
        for each in angles
    ):
        return None
    return 'has rotary embeddings other than a cosine and a sine for each token; set qkv to "off"'
